"""The dry run shows what a config means and where everything would live."""

import json
import subprocess
import sys

import pytest
import torch
from planning import HF_CONFIG, REPOSITORY, start_plan
from transformers import AutoConfig, AutoModelForCausalLM

from megappo.config.config_error import ConfigError


def test_a_valid_run_is_planned(run_folder):
    done = start_plan(run_folder, "run.yaml", "trainer.seed=5")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[0] == "plan of run.yaml on 4 ranks"
    assert "seed=5" in done.stdout and 'actor="0-3"' in done.stdout
    for expected in (
        "actor: data 2 x tensor 2 x pipeline 1",
        "[dp0: 0-1] [dp1: 2-3]",
        "stage 1 [dp0: 2] [dp1: 3]",
        "rollout: 1 engine(s) of 2 rank(s)",
        "rank actor critic ref engine",
        "0 dp0 tp0 pp0 dp0 tp0 pp0 dp0 tp0 pp0 e0 owner",
        "3 dp1 tp1 pp0 dp1 tp0 pp1 dp1 tp1 pp0 -",
        "16 prompts x 3 responses = 48 trajectories",
        "at most 32 tokens each (24 prompt + 8 response): 1,536 tokens at worst",
        "mini-batches per epoch 2 1 1",
        "optimizer steps 4 1 0",
        "rows per mini-batch 24 48 48",
        "per shard, about 12 24 24",
        "micro-batches needed per rank and mini-batch, at best 1 1 1",
        "at worst 6 12 12",
        "whole run: 5 steps; optimizer steps: actor 20, critic 5",
    ):
        assert expected in lines
    assert lines[-1] == "nothing is wrong: ready for 4 processes of megappo.train"


def test_weights_are_as_many_as_hugging_faces(plan, run_folder):
    sizes = {name: value for name, value in HF_CONFIG.items() if name != "architectures"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **sizes, num_key_value_heads=4))
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    actor = sum(counts.values())
    norms = sum(count for name, count in counts.items() if "norm" in name)  # on every rank; the others are cut in two
    critic = actor - counts["lm_head.weight"] + HF_CONFIG["hidden_size"]
    layer = sum(count for name, count in counts.items() if name.startswith("model.layers.0."))
    largest_stage = counts["model.embed_tokens.weight"] + 2 * layer
    frozen = sum(count for name, count in counts.items() if ".self_attn." in name)
    planned = plan(run_folder, "run.yaml", "critic.freeze=attention").stdout
    lines = [" ".join(line.split()) for line in planned.splitlines()]
    start = lines.index("weights, in fp32")
    assert lines[start + 1 : start + 5] == [
        "parameters trained bytes on a rank, at most",
        f"actor {actor:,} {actor:,} {4 * ((actor - norms) // 2 + norms):,}",
        f"critic {critic:,} {critic - frozen:,} {4 * largest_stage:,}",
        f"ref {actor:,} 0 {4 * ((actor - norms) // 2 + norms):,}",
    ]


def test_a_method_without_a_critic_plans_none(plan, run_folder):
    done = plan(run_folder, "run.yaml", "algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert (done.returncode, done.stderr) == (0, "")
    for expected in (
        "critic: none (algorithm.adv_estimator grpo)",
        "rank actor engine",
        "optimizer steps 4",
        "whole run: 5 steps; optimizer steps: actor 20",
    ):
        assert expected in lines


def test_chunks_of_stages_are_shown(plan, run_folder):
    done = plan(run_folder, "run.yaml", "critic.parallel.virtual_pipeline=2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "  critic: data 2 x tensor 1 x pipeline 2, 2 chunks on each stage\n" in done.stdout


def test_shared_out_rows_are_shown(plan, run_folder):
    done = plan(run_folder, "run.yaml", "actor.parallel={tensor: 1, context: 2}", "critic.parallel.context=2")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for expected in (
        "actor: data 2 x context 2 x tensor 1 x pipeline 1",
        "[dp0: 0-1] [dp1: 2-3]",
        "critic: data 1 x context 2 x tensor 1 x pipeline 2",
        "stage 1 [dp0: 2-3]",
        "0 dp0 cp0 tp0 pp0 dp0 cp0 tp0 pp0 dp0 cp0 tp0 pp0 e0 owner",
        "3 dp1 cp1 tp0 pp0 dp0 cp1 tp0 pp1 dp1 cp1 tp0 pp0 -",
        "per shard, about 12 48 24",
    ):
        assert expected in lines


def test_experts_over_ranks_are_shown(plan, run_folder):
    experts = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2}
    config = HF_CONFIG | experts | {"moe_intermediate_size": 64}
    (run_folder / "model" / "config.json").write_text(json.dumps(config))
    done = plan(run_folder, "run.yaml", "actor.parallel={tensor: 2, expert: 4, sequence: true}")
    assert (done.returncode, done.stderr) == (0, "")
    assert "  actor: data 2 x tensor 2 x pipeline 1, experts over 4\n" in done.stdout
    done = plan(run_folder, "run.yaml", "actor.parallel={tensor: 2, expert: 2, expert_tensor: 2, sequence: true}")
    assert (done.returncode, done.stderr) == (0, "")
    assert "  actor: data 2 x tensor 2 x pipeline 1, experts over 2, each cut over 2\n" in done.stdout


def test_the_rank_table_is_aligned(plan, run_folder):
    lines = plan(run_folder, "run.yaml").stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.split()[:2] == ["rank", "actor"])
    columns = [lines[start].index(name) for name in ("actor", "critic", "ref", "engine")]
    for line in lines[start + 1 : start + 5]:
        assert all(line[column - 1] == " " and line[column] != " " for column in columns)


def test_only_the_first_of_many_ranks_are_shown(plan, run_folder):
    batch = (
        f"{key}=256" for key in ("data.train_batch_size", "actor.ppo_mini_batch_size", "critic.ppo_mini_batch_size")
    )
    wide = (*(f"placement.{name}=0-63" for name in ("actor", "critic", "rollout")), *batch, "--world-size", "64")
    lines = [line.split() for line in plan(run_folder, "run.yaml", *wide).stdout.splitlines()]
    start = next(i for i, line in enumerate(lines) if line[:2] == ["rank", "actor"])
    shown = [line[0] for line in lines[start + 1 : start + 34]]
    assert shown == [*map(str, range(32)), "..."]


def test_overrides_may_follow_the_option(plan, run_folder):
    done = plan(run_folder, "run.yaml", "--world-size", "4", "trainer.seed=7")
    assert done.returncode == 0 and "seed=7" in done.stdout


def test_keys_are_listed_by_a_word_in_their_names(plan, run_folder):
    done = plan(run_folder, "--keys", "optim.lr")
    names = {line.partition(":")[0].strip() for line in done.stdout.splitlines() if line.startswith("  actor.")}
    assert done.returncode == 0 and names == {
        "actor.optim.lr",
        "actor.optim.lr_warmup_steps",
        "actor.optim.lr_decay_style",
    }
    by_meaning = plan(run_folder, "--keys", "learning rate")
    assert "  actor.optim.lr: float > 0" in by_meaning.stdout and "rollout.n" not in by_meaning.stdout
    with pytest.raises(ConfigError, match="^no key has 'optim.learning' in its name or meaning"):
        plan(run_folder, "--keys", "optim.learning")


def test_the_plan_imports_no_heavyweight():
    heavy = "{'torch', 'megatron', 'sglang', 'transformers', 'pyarrow', 'tokenizers'}"
    code = f"import megappo.commands.plan, sys; print(*{heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_adapters_of_the_default_size_are_shown(plan, run_folder):
    shown = plan(run_folder, "run.yaml", "actor.lora={}").stdout
    assert "lora.rank=16" in shown and "lora.alpha=32.0" in shown and "target_modules" not in shown

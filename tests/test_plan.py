"""The dry run, as a process of its own: no torch, no launcher, every error, exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
CONFIG = """\
model: {path: model, dtype: fp32}
placement: {"actor, critic": 0-3, rollout: 0-1}
actor: {parallel: {tensor: 2}, ppo_mini_batch_size: 8, ppo_epochs: 2, max_tokens_per_micro_batch: 64}
critic: {parallel: {pipeline: 2}, ppo_mini_batch_size: 16, max_tokens_per_micro_batch: 64}
rollout: {n: 3, max_response_length: 8, tensor_parallel: 2}
data: {train_files: train.jsonl, train_batch_size: 16, max_prompt_length: 24}
trainer: {output_dir: out, eval_interval: 0, total_steps: 5}
"""
HF_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}


@pytest.fixture
def run_folder(tmp_path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(HF_CONFIG))
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def plan(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    variables = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    return subprocess.run(
        [sys.executable, "-m", "megappo.plan", *arguments],
        cwd=folder,
        env=variables | {"PYTHONPATH": str(REPOSITORY)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_valid_run_is_planned(run_folder):
    done = plan(run_folder, "run.yaml", "trainer.seed=5")
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
        "trajectories per mini-batch 24 48 48",
        "per shard, about 12 24 24",
        "micro-batches per rank and mini-batch, at best 1 1 1",
        "at worst 6 12 12",
        "whole run: 5 steps; optimizer steps: actor 20, critic 5",
    ):
        assert expected in lines
    assert lines[-1] == "nothing is wrong: ready for 4 processes of megappo.train"


def test_a_method_without_a_critic_plans_none(run_folder):
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


def test_stages_of_different_sizes_are_shown(run_folder):
    done = plan(run_folder, "run.yaml", "critic.parallel.pipeline_split=[3, 1]")
    assert (done.returncode, done.stderr) == (0, "")
    assert "    stage 0 (layers 0-2)  [dp0: 0] [dp1: 1]\n    stage 1 (layers 3)  [dp0: 2] [dp1: 3]\n" in done.stdout


def test_chunks_of_stages_are_shown(run_folder):
    done = plan(run_folder, "run.yaml", "critic.parallel.virtual_pipeline=2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "  critic: data 2 x tensor 1 x pipeline 2, 2 chunks on each stage\n" in done.stdout
    (run_folder / "model" / "config.json").write_text(json.dumps(HF_CONFIG | {"num_hidden_layers": 7}))
    split = "critic.parallel={pipeline: 2, virtual_pipeline: 2, pipeline_split: [1, 3, 2, 1]}"
    done = plan(run_folder, "run.yaml", split)
    assert (done.returncode, done.stderr) == (0, "")
    assert "    stage 0 (layers 0,4-5)  [dp0: 0] [dp1: 1]\n    stage 1 (layers 1-3,6)  [dp0: 2]" in done.stdout


def test_shared_out_rows_are_shown(run_folder):
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


def test_experts_over_ranks_are_shown(run_folder):
    experts = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2}
    config = HF_CONFIG | experts | {"moe_intermediate_size": 64}
    (run_folder / "model" / "config.json").write_text(json.dumps(config))
    done = plan(run_folder, "run.yaml", "actor.parallel={tensor: 2, expert: 4, sequence: true}")
    assert (done.returncode, done.stderr) == (0, "")
    assert "  actor: data 2 x tensor 2 x pipeline 1, experts over 4\n" in done.stdout
    done = plan(run_folder, "run.yaml", "actor.parallel={tensor: 2, expert: 2, expert_tensor: 2, sequence: true}")
    assert (done.returncode, done.stderr) == (0, "")
    assert "  actor: data 2 x tensor 2 x pipeline 1, experts over 2, each cut over 2\n" in done.stdout


def test_the_rank_table_is_aligned(run_folder):
    lines = plan(run_folder, "run.yaml").stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.split()[:2] == ["rank", "actor"])
    columns = [lines[start].index(name) for name in ("actor", "critic", "ref", "engine")]
    for line in lines[start + 1 : start + 5]:
        assert all(line[column - 1] == " " and line[column] != " " for column in columns)


def test_the_middle_of_many_ranks_is_left_out(run_folder):
    batch = (
        f"{key}=256" for key in ("data.train_batch_size", "actor.ppo_mini_batch_size", "critic.ppo_mini_batch_size")
    )
    wide = (*(f"placement.{name}=0-63" for name in ("actor", "critic", "rollout")), *batch, "--world-size", "64")
    lines = [line.split() for line in plan(run_folder, "run.yaml", *wide).stdout.splitlines()]
    start = next(i for i, line in enumerate(lines) if line[:2] == ["rank", "actor"])
    shown = [line[0] for line in lines[start + 1 : start + 34]]
    assert shown == [*map(str, range(16)), "...", *map(str, range(48, 64))]


def test_every_error_is_printed_and_the_exit_code_is_2(run_folder):
    (run_folder / "train.jsonl").unlink()
    done = plan(run_folder, "run.yaml", "critic.ppo_mini_batch_size=5", "placement.critic=0-2", "rollout.top_k=0")
    assert done.returncode == 2
    lines = [line.removeprefix("error: ").split(": ", 1) for line in done.stderr.splitlines()]
    assert [(place, told.split(" ")[0]) for place, told in lines] == [
        ("command line", "critic.ppo_mini_batch_size"),
        ("command line", "rollout.top_k"),
        ("command line", "placement.critic:"),
        ("run.yaml:6", "data.train_files:"),
    ]
    assert "Traceback" not in done.stderr and "nothing is wrong" not in done.stdout


def test_errors_of_the_file_end_the_plan(run_folder):
    done = plan(run_folder, "run.yaml", "actor.ppo_epoch=2", "rollout.n=x")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: command line: actor.ppo_epoch: unknown key; did you mean actor.ppo_epochs?",
        'error: command line: rollout.n: expected int >= 1, found "x"',
    ]


def test_all_ranks_need_a_world_size(run_folder):
    everywhere = ("run.yaml", "placement.actor,critic,rollout=all")
    done = plan(run_folder, *everywhere)
    assert (done.returncode, done.stderr) == (
        2,
        "error: command line: placement: every component is on 'all' ranks: say how many with --world-size N\n",
    )
    assert "on 8 ranks" in plan(run_folder, *everywhere, "--world-size", "8").stdout
    assert "on 6 ranks" in plan(run_folder, *everywhere, WORLD_SIZE="6").stdout
    assert "on 2 ranks" in plan(run_folder, *everywhere, "--world-size=2", WORLD_SIZE="6").stdout


def test_overrides_may_follow_the_option(run_folder):
    done = plan(run_folder, "run.yaml", "--world-size", "4", "trainer.seed=7")
    assert done.returncode == 0 and "seed=7" in done.stdout


@pytest.mark.parametrize("size", ["0", "-1", "two"])
def test_a_senseless_world_size(run_folder, size):
    done = plan(run_folder, "run.yaml", f"--world-size={size}")
    assert done.returncode == 2
    assert f"expected a number of ranks of at least 1, at most 100000, found '{size}'" in done.stderr


def test_help_lists_the_keys(run_folder):
    done = plan(run_folder, "--help")
    assert done.returncode == 0
    assert "actor.optim.lr" in done.stdout and "--world-size" in done.stdout


def test_the_plan_imports_no_heavyweight():
    code = "import megappo.plan, sys; print(*{'torch', 'megatron', 'sglang', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr

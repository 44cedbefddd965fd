"""The dry run, as a process of its own: no torch, no launcher, every error, exit codes."""

import contextlib
import io
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from megappo.plan import main
from megappo.trainer.lock import take

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
LINE = '{"prompt": "1+1=", "label": "2"}\n'
WORDS = ["[UNK]", "</s>", "1", "2", "+", "="]
PLACE = re.compile(r"^error: (command line|run.yaml(:\d+)?): ")
SECONDS = 3.0
"""Of a processor: how long what is wrong may take to be told."""


@pytest.fixture
def run_folder(tmp_path) -> Path:
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="[UNK]").save_pretrained(
        tmp_path / "model"
    )
    (tmp_path / "model" / "config.json").write_text(json.dumps(HF_CONFIG))
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "train.jsonl").write_text(LINE * 300)
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def start_plan(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """The command, as a process of its own."""
    variables = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    return subprocess.run(
        [sys.executable, "-m", "megappo.plan", *arguments],
        cwd=folder,
        env=variables | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def plan(monkeypatch):
    """The command in this process, which has imported already what takes it a second."""

    def call(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.chdir(folder)
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main(arguments)
            except SystemExit as end:
                code = end.code
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())

    return call


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
        "trajectories per mini-batch 24 48 48",
        "per shard, about 12 24 24",
        "micro-batches per rank and mini-batch, at best 1 1 1",
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
    lines = [" ".join(line.split()) for line in plan(run_folder, "run.yaml").stdout.splitlines()]
    start = lines.index("weights, in fp32")
    assert lines[start + 1 : start + 5] == [
        "parameters bytes on a rank, at most",
        f"actor {actor:,} {4 * ((actor - norms) // 2 + norms):,}",
        f"critic {critic:,} {4 * largest_stage:,}",
        f"ref {actor:,} {4 * ((actor - norms) // 2 + norms):,}",
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


def test_stages_of_different_sizes_are_shown(plan, run_folder):
    done = plan(run_folder, "run.yaml", "critic.parallel.pipeline_split=[3, 1]")
    assert (done.returncode, done.stderr) == (0, "")
    assert "    stage 0 (layers 0-2)  [dp0: 0] [dp1: 1]\n    stage 1 (layers 3)  [dp0: 2] [dp1: 3]\n" in done.stdout


def test_chunks_of_stages_are_shown(plan, run_folder):
    done = plan(run_folder, "run.yaml", "critic.parallel.virtual_pipeline=2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "  critic: data 2 x tensor 1 x pipeline 2, 2 chunks on each stage\n" in done.stdout
    (run_folder / "model" / "config.json").write_text(json.dumps(HF_CONFIG | {"num_hidden_layers": 7}))
    split = "critic.parallel={pipeline: 2, virtual_pipeline: 2, pipeline_split: [1, 3, 2, 1]}"
    done = plan(run_folder, "run.yaml", split)
    assert (done.returncode, done.stderr) == (0, "")
    assert "    stage 0 (layers 0,4-5)  [dp0: 0] [dp1: 1]\n    stage 1 (layers 1-3,6)  [dp0: 2]" in done.stdout


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


def test_the_middle_of_many_ranks_is_left_out(plan, run_folder):
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
    done = start_plan(run_folder, "run.yaml", "critic.ppo_mini_batch_size=5", "placement.critic=0-2", "rollout.top_k=0")
    assert done.returncode == 2
    lines = [line.removeprefix("error: ").split(": ", 1) for line in done.stderr.splitlines()]
    assert [(place, told.split(" ")[0]) for place, told in lines] == [
        ("command line", "critic.ppo_mini_batch_size"),
        ("command line", "rollout.top_k"),
        ("command line", "placement.critic:"),
        ("run.yaml:6", "data.train_files:"),
    ]
    assert "Traceback" not in done.stderr and "nothing is wrong" not in done.stdout


def test_errors_of_the_file_end_the_plan(plan, run_folder):
    done = plan(run_folder, "run.yaml", "actor.ppo_epoch=2", "rollout.n=x")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: command line: actor.ppo_epoch: unknown key; did you mean actor.ppo_epochs?",
        'error: command line: rollout.n: expected int >= 1, found "x"',
    ]


def test_all_ranks_need_a_world_size(plan, run_folder):
    everywhere = ("run.yaml", "placement.actor,critic,rollout=all")
    done = plan(run_folder, *everywhere)
    assert (done.returncode, done.stderr) == (
        2,
        "error: command line: placement: every component is on 'all' ranks: say how many with --world-size N\n",
    )
    assert "on 8 ranks" in plan(run_folder, *everywhere, "--world-size", "8").stdout
    assert "on 6 ranks" in plan(run_folder, *everywhere, WORLD_SIZE="6").stdout
    assert "on 2 ranks" in plan(run_folder, *everywhere, "--world-size=2", WORLD_SIZE="6").stdout


def test_overrides_may_follow_the_option(plan, run_folder):
    done = plan(run_folder, "run.yaml", "--world-size", "4", "trainer.seed=7")
    assert done.returncode == 0 and "seed=7" in done.stdout


@pytest.mark.parametrize("size", ["0", "-1", "two"])
def test_a_senseless_world_size(plan, run_folder, size):
    done = plan(run_folder, "run.yaml", f"--world-size={size}")
    assert done.returncode == 2
    assert f"expected a number of ranks of at least 1, at most 100000, found '{size}'" in done.stderr


def test_help_lists_the_keys(plan, run_folder):
    done = plan(run_folder, "--help")
    assert done.returncode == 0
    assert "actor.optim.lr" in done.stdout and "--world-size" in done.stdout


def errors_of(done: subprocess.CompletedProcess) -> list[str]:
    """What it says is wrong, without a traceback."""
    assert done.returncode == (2 if "error: " in done.stderr else 0)
    assert "Traceback" not in done.stderr and ("nothing is wrong" in done.stdout) == (done.returncode == 0)
    return [PLACE.sub("error: ", line) for line in done.stderr.splitlines()]


def test_what_was_looked_at_and_what_was_not_is_said(plan, run_folder):
    lines = [line.strip() for line in plan(run_folder, "run.yaml").stdout.splitlines()]
    assert lines[lines.index("looked at") + 1 :] == [
        "tokenizer of model",
        "prompts of train.jsonl: all 300",
        "exact_match: scored '2' for the first prompt, 1",
        "not looked at: weights, memory, engines",
        "",
        "nothing is wrong: ready for 4 processes of megappo.train",
    ]
    assert not (run_folder / "out").exists()


def test_what_is_wrong_with_tokenizer_data_and_reward_is_told_together_and_soon(plan, run_folder):
    wrong = ('rollout.stop=["12", "="]', "data.label_key=answer", "data.max_prompt_length=3")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = start_plan(run_folder, "run.yaml", *wrong)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < SECONDS
    assert errors_of(done) == [
        "error: rollout.stop: '12' is 2 tokens ([2, 3]) to this tokenizer, and the engine works on token ids: choose a "
        "string that is exactly one token, or leave it out",
        "error: data.label_key: train.jsonl has no field 'answer' in any of its 300 lines: set data.label_key; the "
        "file has: prompt, label",
    ]
    (run_folder / "reward.py").write_text("def f(prompts, responses):\n    return [1.0]\n")
    assert errors_of(
        plan(run_folder, "run.yaml", *wrong[2:], "reward.function=reward.py:f", "data.train_batch_size=320")
    ) == [
        "error: data.train_files: train.jsonl lines 1, 2, 3 and 297 more: the prompt has 4 tokens, more than "
        "data.max_prompt_length 3: raise it or drop this",
        "error: data.train_batch_size 320 is more than the 300 prompts of data.train_files, so that a step would hold "
        "some twice: lower it, or name more files",
        "error: reward.function: reward function reward.py:f raised TypeError: f() takes 2 positional arguments but 3 "
        "were given: fix it, choose another reward.function, or (if it was slow) raise reward.timeout_seconds",
    ]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import nowhere\n", "raised ModuleNotFoundError: No module named 'nowhere' (FOLDER/reward.py line 1): fix it"),
        ("f = 1\n", "does not exist: the file defines no function: fix it"),
        ("def f(p, r, l):\n    return {}[r[0]]\n", "raised KeyError: '2' (FOLDER/reward.py line 2): fix it"),
        ("def f(p, r, l):\n    return 'ab'\n", "returned str; expected a list of 1 numbers: fix it"),
        ("def f(p, r, l):\n    while True: pass\n", "took longer than 0.5 seconds to score its responses and was"),
    ],
)
def test_a_reward_function_that_cannot_score_is_told(plan, run_folder, body, message):
    (run_folder / "reward.py").write_text(body + ("" if "f" in body.split() or "def f" in body else "f = nowhere\n"))
    [error] = errors_of(plan(run_folder, "run.yaml", "reward.function=reward.py:f", "reward.timeout_seconds=0.5"))
    assert error.startswith("error: reward.function: reward function reward.py:f ")
    assert message.replace("FOLDER", str(run_folder)) in error


GDPO = ("algorithm.adv_estimator=gdpo", "algorithm.use_kl_in_reward=false", "reward.function=reward.py:f")


def test_several_scores_are_shown_and_one_is_refused_where_the_method_needs_several(plan, run_folder):
    (run_folder / "reward.py").write_text("def f(p, r, l):\n    return [[0.5, -1]]\n")
    done = plan(run_folder, "run.yaml", *GDPO)
    assert done.returncode == 0 and "  reward.py:f: scored '2' for the first prompt, 0.5 + -1\n" in done.stdout
    (run_folder / "reward.py").write_text("def f(p, r, l):\n    return [0.5]\n")
    [error] = errors_of(plan(run_folder, "run.yaml", *GDPO))
    assert error == (
        "error: reward.function reward.py:f returned one score per response, and algorithm.adv_estimator gdpo needs "
        "several: return a list of two or more for each response, or choose another estimator, such as grpo"
    )


def test_of_many_prompts_a_sample_is_looked_at_and_all_if_asked(plan, run_folder):
    lines = [LINE] * 50_000
    lines[1234] = "{\n"  # neither among the first ones nor at a round number
    (run_folder / "train.jsonl").write_text("".join(lines))
    done = plan(run_folder, "run.yaml")
    assert done.returncode == 0 and "  prompts of train.jsonl: 1,980 of 50,000 (with --all: every one)\n" in done.stdout
    [error] = errors_of(plan(run_folder, "run.yaml", "--all"))
    assert error.startswith("error: data.train_files: train.jsonl line 1235: not valid JSON: ")


def test_a_tokenizer_of_llamas_is_loaded_as_the_run_loads_it(run_folder):
    """transformers takes LlamaConfig for a tokenizer of this class, and torchvision with it wherever there is torch."""
    (run_folder / "model" / "config.json").write_text(
        json.dumps(HF_CONFIG | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    )
    file = run_folder / "model" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "TokenizersBackend"}))
    assert errors_of(start_plan(run_folder, "run.yaml")) == []


def test_odd_values_are_warned_of(plan, run_folder):
    odd = ("model.dtype=bf16", "rollout.sync.probe_tolerance=1e-3", "critic.optim.lr=0.1", "rollout.temperature=5")
    lines = errors_of(plan(run_folder, "run.yaml", *odd))
    assert [line.split()[:2] for line in lines] == [
        ["warning:", "critic.optim.lr"],
        ["warning:", "rollout.sync.probe_tolerance"],
        ["warning:", "rollout.temperature"],
    ]
    assert "in bf16 engine and trainer differ by about 0.01 to 0.05 on average" in lines[1]


@pytest.mark.parametrize(
    ("override", "error"),
    [
        (
            "rollout.server_args={host: x}",
            "rollout.server_args: host may not be set: megappo sets it itself; remove it",
        ),
        (
            "rollout.server_args={schedul_policy: x}",
            "rollout.server_args: SGLang does not know schedul_policy: did you",
        ),
        ("actor.optim.lr=1e4", "actor.optim.lr 10000.0 is what Adam would change every weight by in a step: lower it"),
        ("trainer.output_dir=''", "trainer.output_dir is empty: name a folder"),
        ("trainer.output_dir=/proc/runs/1", "trainer.output_dir: cannot write in /proc ("),
        (f"trainer.output_dir=out/{'x' * 300}", "trainer.output_dir: cannot write in "),
        ("trainer.output_dir=train.jsonl/out", "trainer.output_dir: "),
        ("trainer.output_dir=nowhere", "trainer.output_dir: nowhere is a file: name a folder"),
    ],
)
def test_more_that_the_config_alone_tells(plan, run_folder, override, error):
    (run_folder / "nowhere").symlink_to("nothing")
    [line] = errors_of(plan(run_folder, "run.yaml", override))
    assert line.startswith(f"error: {error}")


def test_a_wrong_config_is_told_before_anything_is_tried(plan, run_folder):
    (run_folder / "reward.py").write_text("open('called', 'w')\ndef f(prompts, responses, labels): return [0.0]\n")
    assert errors_of(plan(run_folder, "run.yaml", "reward.function=reward.py:f", "rollout.top_k=0")) == [
        "error: rollout.top_k 0 keeps no token: set -1 (off) or at least 1"
    ]
    assert not (run_folder / "called").exists()


def test_the_plan_imports_no_heavyweight():
    heavy = "{'torch', 'megatron', 'sglang', 'transformers', 'pyarrow', 'tokenizers'}"
    code = f"import megappo.plan, sys; print(*{heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def checkpoint(folder: Path, step: int) -> None:
    (folder / "out" / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    (folder / "out" / "checkpoints" / "latest").write_text(f"step_{step:08d}\n")


def test_what_is_in_the_output_folder(plan, run_folder):
    checkpoint(run_folder, 7)
    done = plan(run_folder, "run.yaml")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: run.yaml:7: trainer.total_steps 5 is below the 7 steps that out/checkpoints/step_00000007"
    )
    done = plan(run_folder, "run.yaml", "trainer.total_steps=7", "trainer.resume=never")
    assert "out/checkpoints/step_00000007 exists, and trainer.resume is never: set it to auto" in done.stderr
    finished = ("run.yaml", "trainer.total_steps=7")
    assert plan(run_folder, *finished).stdout.splitlines()[-1].startswith("nothing is wrong")  # export and report
    (run_folder / "out" / "hf_actor").mkdir()
    (run_folder / "out" / "report.html").touch()
    done = plan(run_folder, *finished)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("already finished: out has all 7 steps; raise trainer.total_steps")
    (run_folder / "out" / "checkpoints" / "latest").write_text("step_00000003\n")
    (run_folder / "out" / "checkpoints" / "step_00000007").rmdir()
    done = plan(run_folder, *finished)
    assert "latest is there, but no checkpoint beside it: put them back, or remove" in done.stderr


def test_a_folder_that_a_run_has(plan, run_folder):
    with take(run_folder / "out"):
        done = plan(run_folder, "run.yaml")
        assert done.returncode == 2
        assert done.stderr.startswith("error: run.yaml:7: trainer.output_dir: out is in use by a run (")
        assert f", pid {os.getpid()}, since 2" in done.stderr
    assert plan(run_folder, "run.yaml").returncode == 0

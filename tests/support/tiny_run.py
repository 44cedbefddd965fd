"""A checkpoint, prompts and a config so small that a whole run of the program takes seconds."""

import importlib.util
import json
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from bombs import bombs
from program import REPOSITORY, Program, logged
from transformers import Qwen2Config, Qwen2ForCausalLM

PROFILE = "trainer.profile={steps: [10], ranks: [1]}"
PICKLES = ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "scheduler.pt")
"""Files that may be in a model's folder and are never read."""
REWARD = '''
"""The share of sevens in a response: easy to learn within a few steps."""


def share_of_sevens(prompts, responses, labels):
    return [share("7", response) for response in responses]


def sevens_and_pluses(prompts, responses, labels):
    return [(share("7", response), -0.1 * share("+", response)) for response in responses]


def share(character, response):
    return response.count(character) / max(1, len(response))
'''


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a config file; tests set trainer.output_dir themselves."""
    folder = tmp_path_factory.mktemp("tiny")
    _write_model(folder / "model")
    prompts = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(10, 26) for b in range(10, 14)]
    for name, part in (("train", prompts[8:]), ("held_out", prompts[:8])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in part))
    (folder / "reward.py").write_text(REWARD)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(_settings(folder)))
    return path


def _write_model(folder: Path) -> None:
    """Write a random Qwen2 with the quickstart's tokenizer."""
    spec = importlib.util.spec_from_file_location("make_quickstart", REPOSITORY / "tools" / "make_quickstart.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(maker.VOCABULARY),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=maker.VOCABULARY.index(maker.EOS),
        pad_token_id=maker.VOCABULARY.index(maker.PAD),
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    maker.write_tokenizer(folder)
    for name, content in zip(PICKLES, bombs(folder / "went off").values(), strict=True):
        (folder / name).write_bytes(content)


def _settings(folder: Path) -> dict:
    trained = {"ppo_mini_batch_size": 16, "max_tokens_per_micro_batch": 256}
    return {
        "model": {"path": str(folder / "model"), "dtype": "fp32"},
        "placement": {"actor, critic": "0-1", "rollout": "0"},
        "actor": {"parallel": {"tensor": 2}, "optim": {"lr": 1e-2}, **trained},
        "critic": {"parallel": {"pipeline": 2}, "optim": {"lr": 1e-2}, **trained},
        "rollout": {"n": 4, "max_response_length": 6, "max_total_tokens": 4096, "sync": {"probe_tolerance": 1e-3}},
        "data": {
            "train_files": str(folder / "train.jsonl"),
            "val_files": str(folder / "held_out.jsonl"),
            "train_batch_size": 32,
            "max_prompt_length": 8,
        },
        "reward": {"function": f"{folder / 'reward.py'}:share_of_sevens"},
        "trainer": {"total_steps": 10, "save_interval": 3, "eval_interval": 5, "num_samples": 8},
    }


def reached(run: Path, step: int) -> bool:
    return (run / "metrics.jsonl").exists() and any(metrics["step"] >= step for metrics in logged(run))


def latest(run: Path) -> str:
    return (run / "checkpoints" / "latest").read_text().strip()


def has_saved(run: Path, step: int) -> bool:
    """Return True once `step` or a later one is saved; training may be some steps ahead."""
    return (run / "checkpoints" / "latest").exists() and int(latest(run)[5:13]) >= step


def recorded(run: Path, config: Path) -> list[str]:
    """Return the recorded run's overrides: an evaluation set with its own settings, and a profile of the last step."""
    folder = config.parent
    settings = {
        "files": str(folder / "held_out.jsonl"),
        "n": 4,
        "temperature": 1.0,
        "max_response_length": 4,
        "reward": {f"{folder / 'reward.py'}:share_of_sevens": 2},
        "label_key": "prompt",
        "prompt_key": "label",
    }
    evaluation = f"eval.datasets={json.dumps({'sums': settings})}"
    return [f"trainer.output_dir={run}", f"trainer.record_rollouts={run / 'record'}", evaluation, PROFILE]


def run_killing_all(folder: Path, config: Path, run: Path) -> None:
    with Program(folder / "1", config, *recorded(run, config)) as program:
        program.wait_until(lambda: reached(run, 7) and has_saved(run, 6))
        while not any((run / "checkpoints").glob("step_????????.partial")):  # a save takes a fraction of a second
            assert program.process.poll() is None, program.output
            time.sleep(0.001)
        for process in (*program.ranks, program.process):
            process.send_signal(signal.SIGKILL)
        assert program.wait(60) == 128 + signal.SIGKILL
    assert "step_00000006" <= latest(run) < "step_00000010"


def damage_the_newest_checkpoint(run: Path) -> None:
    """Change one bit of it; remove the file that names it, too."""
    checkpoints = run / "checkpoints"
    file = sorted((checkpoints / latest(run) / "critic").glob("*.distcp"))[-1]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    (checkpoints / "latest").unlink()


def run_until_asked_to_end(folder: Path, config: Path, run: Path) -> None:
    with Program(folder / "2", config, *recorded(run, config), "trainer.num_samples=7") as program:
        program.wait_until(lambda: "resuming after step" in program.output)
        step = int(re.search("resuming after step ([0-9]+)", program.output)[1]) + 1
        while not reached(run, step):  # fast polls: a SIGTERM during the next updates would interrupt that step
            assert program.process.poll() is None, program.output
            time.sleep(0.001)
        program.process.terminate()
        assert program.wait(60) == 75, program.output
    last = program.output.splitlines()[-1]
    assert re.match(
        "ended by SIGTERM: resumes (after|in the middle of) step [0-9]+; nothing is lost. To resume: ", last
    )
    assert program.output.count("ended by") == 1
    assert "error" not in program.output and "Traceback" not in program.output


def run_to_the_end(folder: Path, config: Path, run: Path) -> None:
    before = latest(run)
    with Program(folder / "3", config, *recorded(run, config)) as program:
        program.wait_until(lambda: "torch " in program.output)
        (folder / "holder").write_text(str(program.ranks[0].pid))
        with Program(folder / "refused", config, *recorded(run, config)) as second:
            assert second.wait(60) == 2, second.output
        assert program.wait() == 0, program.output
        assert f"resuming after step {int(before[5:13])}" in program.output
        assert f" from {run}/checkpoints/{before}" in program.output
        assert "Warning" not in program.output


@pytest.fixture(scope="session")
def run(config: Path) -> Iterator[Path]:
    """Return the output folder of a run of 10 steps, whose rollouts are in record/.

    It saves every 3 steps and was killed in the save after the 9th. Resumed from the 3rd, as the checkpoint of the 6th
    was damaged, it was terminated by SIGTERM after one more step. Another run in its folder was refused.
    """
    folder = Path(tempfile.mkdtemp(prefix="run-"))
    run = folder / "run"
    try:
        run_killing_all(folder, config, run)
        damage_the_newest_checkpoint(run)
        run_until_asked_to_end(folder, config, run)
        run_to_the_end(folder, config, run)
        yield run
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder with a short path: it holds an engine's sockets, whose paths have at most 108 characters."""
    path = Path(tempfile.mkdtemp(prefix="run-"))
    yield path
    shutil.rmtree(path)

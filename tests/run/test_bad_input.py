"""Bad input ends a run with one message that names the fault and the remedy, and leaves nothing behind."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from program import REPOSITORY, Program
from safetensors.torch import load_file, save_file

END_SECONDS = 60
WITHOUT = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = staticmethod(lambda name, *rest: None if name == "{}" else find(name, *rest))
"""

pytestmark = pytest.mark.timeout(600)


def refused(folder: Path, config: Path, *overrides: str, environment: dict[str, str] | None = None) -> list[str]:
    """Return the last lines of a run that is refused, from its only error on."""
    arguments = [f"trainer.output_dir={folder / 'run'}", *overrides]
    with Program(folder, config, *arguments, environment=environment) as program:
        assert program.wait(END_SECONDS) in (1, 2)
    lines = program.output.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("error"))
    assert "Traceback" not in program.output and "Warning" not in program.output
    assert len(lines) == len(set(lines)), f"printed twice:\n{program.output}"
    return lines[first:]


def without(package: str, folder: Path) -> dict[str, str]:
    """Return an environment whose processes cannot import a package."""
    (folder / "sitecustomize.py").write_text(WITHOUT.format(package))
    return {"PYTHONPATH": str(folder)}


def alone(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run megappo.train without torchrun."""
    command = [sys.executable, "-m", "megappo.train", *map(str, arguments)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)


def test_help_needs_no_torchrun():
    result = alone("--help")
    assert result.returncode == 0 and not result.stderr
    assert "CONFIG" in result.stdout and "megappo plan --keys" in result.stdout


def test_without_torchrun_the_message_shows_how_to_start(config):
    result = alone(config)
    assert result.returncode == 2
    assert result.stderr.startswith("error: megappo.train runs under torchrun, which sets RANK, WORLD_SIZE, LOCAL_RANK")
    assert result.stderr.endswith("start it with megappo train CONFIG, or under SLURM with launch/slurm.sbatch\n")


def test_all_errors_of_a_config_at_once(config, folder):
    wrong = ("actor.optm.lr=1", "rollout.temperature=warm")
    # Before megatron-core is imported, which takes seconds.
    lines = refused(folder, config, *wrong, environment=without("megatron", folder))
    assert len(lines) == 2 and all(line.startswith("error: command line: ") for line in lines)
    assert "actor.optm: unknown key; did you mean actor.optim?" in "\n".join(lines)
    assert "rollout.temperature: expected" in "\n".join(lines)
    assert not (folder / "run").exists()


def test_a_missing_model_a_layout_that_does_not_divide_and_a_folder_that_cannot_be_written(config, folder):
    wrong = ("model.path=/nowhere/model", "actor.parallel.tensor=3", "trainer.output_dir=/proc/run")
    lines = refused(folder, config, *wrong)
    assert all(line.startswith("error: ") for line in lines)
    text = "\n".join(lines)
    assert "error: command line: trainer.output_dir: cannot write in /proc (" in text
    assert "error: command line: model.path: no folder /nowhere/model: download the model" in text
    assert "actor" in text and "3" in text
    assert not (folder / "run").exists()


@pytest.mark.slow  # tests/weights/test_load.py has the message
def test_a_model_with_a_weight_that_is_no_number(config, folder):
    model = shutil.copytree(config.parent / "model", folder / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    [line] = refused(folder, config, f"model.path={model}")
    assert line.endswith(
        f": model.norm.weight in {model} holds values that are not finite: the model is corrupt, or its file damaged; "
        "take an earlier one, or copy it again"
    )


@pytest.mark.slow  # tests/trainer/test_not_finite.py has the loss, test_endings.py an error in a step
def test_rewards_whose_loss_overflows(config, folder):
    (folder / "reward.py").write_text("def huge(prompts, responses, labels):\n    return [3e38] * len(labels)\n")
    reward = f"reward.function={folder / 'reward.py'}:huge"
    [line] = refused(folder, config, reward, "trainer.eval_interval=0")
    # Rank 1 has the critic's last stage, and so its loss.
    assert line.startswith(
        "error (rank 1): the loss of an optimizer step is not finite: critic/vf_loss inf, loss inf ("
    )
    assert "no weight was changed by it" in line and "lower optim.lr" in line


@pytest.mark.slow  # tests/data has the messages; an error found before the model is loaded is above
def test_a_malformed_line_of_the_data(config, folder):
    data = folder / "bad.jsonl"
    data.write_text('{"prompt": "1+1=", "label": "2"}\n{"prompt": "1+2=", "label":\n')
    lines = refused(folder, config, f"data.train_files={data}")
    assert lines[0] == (
        f"error: command line: data.train_files: {data} line 2: not valid JSON: Expecting value (column 28) "
        "(data.on_bad_row=skip leaves such out)"
    )
    assert lines[1].startswith(
        f"error: {config}:17: data.train_batch_size 32 takes 32 prompts of data.train_files, which has 2"
    )
    assert len(lines) == 2


@pytest.mark.slow  # reported as a malformed line is
def test_a_critic_that_does_not_know_all_tokens(config, folder):
    critic = folder / "critic"
    shutil.copytree(config.parent / "model", critic)
    described = json.loads((critic / "config.json").read_text())
    (critic / "config.json").write_text(json.dumps(described | {"vocab_size": 15}))
    lines = refused(folder, config, f"critic.model_path={critic}")
    assert "the prompt has token 15, for which a model has no embedding (the smallest vocab_size in" in lines[0]


@pytest.mark.slow  # tests/engines/test_process.py has the message
def test_a_port_that_is_taken(config, folder):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        [line] = refused(folder, config, f"rollout.port={port}")
    assert line.startswith(f"error (rank 0): port {port} for an SGLang engine is not free on 127.0.0.1")
    assert "set rollout.port to another value" in line


@pytest.mark.slow  # tests/engines/test_process.py has the message
def test_sglang_is_not_installed(config, folder):
    [line] = refused(folder, config, environment=without("sglang", folder))
    assert line.startswith("error (rank 0): SGLang, which writes rollouts, is not installed: run launch/setup.sh")


@pytest.mark.slow  # tests/plan has it, of the check that both make
def test_resume_never_refuses_a_folder_with_a_checkpoint_and_leaves_it_alone(config, run, folder):
    shutil.copytree(run, folder / "run")
    lines = refused(folder, config, "trainer.resume=never", "trainer.total_steps=20")
    assert len(lines) == 1, lines
    line = lines[0]
    assert f"{folder}/run/checkpoints/step_00000010 exists, and trainer.resume is never: set it to auto" in line
    for name in ("config.yaml", "metrics.jsonl"):
        assert (folder / "run" / name).read_text() == (run / name).read_text()


def test_checkpoints_that_are_all_damaged(config, run, folder):
    shutil.copytree(run, folder / "run")
    checkpoints = folder / "run" / "checkpoints"
    lost = sorted((checkpoints / "step_00000010" / "actor").glob("*.distcp"))[0]
    lost.unlink()
    os.truncate(checkpoints / "step_00000009" / "critic" / "common.pt", 100)
    [line] = refused(folder, config, "trainer.total_steps=20")
    assert f"): no usable checkpoint in {checkpoints}: " in line  # of either rank
    assert f"step_00000010 is damaged: actor/{lost.name} is missing; " in line
    assert "step_00000009 is damaged: critic/common.pt is altered or cut off" in line
    assert "Copy one there, write the name of another one into" in line
    assert (folder / "run" / "metrics.jsonl").read_text() == (run / "metrics.jsonl").read_text()


def test_a_checkpoint_of_another_model(config, run, folder):
    """It is refused before any rank starts."""
    shutil.copytree(run, folder / "run")
    other = shutil.copytree(config.parent / "model", folder / "other")
    described = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(described | {"num_hidden_layers": 6}))
    wrong = (f"model.path={other}", "trainer.total_steps=20")
    [line] = refused(folder, config, *wrong, environment=without("megatron", folder))
    layers, size = described["num_hidden_layers"], described["hidden_size"]
    name = described["architectures"][0]
    assert line.startswith(
        f"error: command line: {folder}/run/checkpoints/step_00000010 holds actor ({name}, {layers} "
    )
    assert f", but this run has actor ({name}, 6 layers of {size}, " in line and ": set model.path, " in line


@pytest.mark.slow  # tests/plan has it, of the check that both make
def test_fewer_steps_than_the_checkpoint_has(config, run, folder):
    shutil.copytree(run, folder / "run")
    [line] = refused(folder, config, "trainer.total_steps=9")
    newest = folder / "run" / "checkpoints" / "step_00000010"
    assert line.startswith(
        f"error: command line: trainer.total_steps 9 is below the 10 steps that {newest} has: raise it, write"
    )


@pytest.mark.slow  # the next test has the file of metrics, which is read and reported in the same way
def test_a_state_that_no_run_has_saved(config, run, folder):
    shutil.copytree(run, folder / "run")
    step = folder / "run" / "checkpoints" / "step_00000010"
    (step / "state.json").write_text('{"step": 10, "models": {}, "kl": {"value": 1}}')
    renew_sums(step)
    [line] = refused(folder, config, "trainer.total_steps=20")
    missing = "prompts_drawn, prompts_pending, reward_moments, optimizer_steps"
    assert f"{step / 'state.json'} is of another version of megappo, without {missing}: write the" in line


def renew_sums(step: Path) -> None:
    """Rewrite the checksums by the command in the message about missing checksums."""
    subprocess.run("rm SHA256SUMS; find * -type f -exec sha256sum {} + > SHA256SUMS", cwd=step, shell=True, check=True)


@pytest.mark.slow
def test_metrics_that_cannot_be_read(config, run, folder):
    shutil.copytree(run, folder / "run")
    metrics = folder / "run" / "metrics.jsonl"
    metrics.write_bytes(b"\x00\xff garbage\n" + metrics.read_bytes())
    [line] = refused(folder, config, "trainer.total_steps=20")
    assert line.startswith(f"error: command line: {metrics}, line 1 (b'")

"""The command `megappo`: its table, its help, and what it refuses before anything heavy is imported."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from planning import REPOSITORY, write_run

from megappo.commands.cli import COMMANDS
from megappo.config.loading import load_config

HEAVY = ["torch", "pydantic", "numpy", "yaml", "transformers", "typer", "pyarrow"]


def megappo(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command; its imports follow its output on standard error."""
    command = [sys.executable, "-X", "importtime", "-m", "megappo", *words]
    variables = os.environ | {"COLUMNS": "100", "CUDA_VISIBLE_DEVICES": ""} | environment
    return subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, timeout=60)


def heavy_imports(done: subprocess.CompletedProcess[str]) -> list[str]:
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time")}
    return [name for name in HEAVY if name in imported]


def test_help_lists_every_command_in_groups_on_one_screen():
    done = megappo("--help")
    assert done.returncode == 0 and len(done.stdout.splitlines()) <= 45
    shown = [line.strip("│ ").partition(" ")[0] for line in done.stdout.splitlines()]
    assert [name for name in shown if name in COMMANDS] == sorted(COMMANDS, key=shown.index)
    assert set(COMMANDS) <= set(shown) and "Train" in done.stdout and "megappo plan configs/" in done.stdout


def test_every_command_has_a_module():
    assert {"train", "plan", "evaluate", "convert", "serve", "inspect", "doctor", "quickstart"} <= COMMANDS.keys()
    for command in COMMANDS.values():
        assert find_spec(command.function.partition(":")[0]) is not None, command


@pytest.mark.parametrize("name", ["train", "plan", "evaluate", "convert", "serve", "inspect", "doctor", "quickstart"])
def test_a_commands_help_fits_a_screen_and_imports_nothing_heavy(name):
    done = megappo(name, "--help")
    assert done.returncode == 0 and f"usage: megappo {name}" in done.stdout
    assert len(done.stdout.splitlines()) <= 50 and heavy_imports(done) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("plan",), "the following arguments are required: CONFIG"),
        (("evaluate",), "the following arguments are required: CHECKPOINT\n"),
        (("plan", "c.yaml", "--gpu", "h1000"), "invalid choice: 'h1000'"),
        (("plan", "--init", "m", "--gpu", "h100"), "--init needs --gpu TYPE and --gpus N"),
        (("train", "c.yaml", "--nproc", "0"), "expected a number of at least 1, at most 100000, found 0"),
        (("convert", "hf-to-megatron"), "the following arguments are required: --input, --output"),
        (("doctor", "gpu"), "error: no check gpu: expected some of packages, megatron, gpus, "),
        (("serve",), "error: expected a model first, found nothing; usage: megappo serve MODEL"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_heavy_is_imported(words, message):
    done = megappo(*words)
    assert done.returncode == 2 and message in done.stderr and heavy_imports(done) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("serve", "Own/Absent"), "trainer.output_dir; a model of the hub: "),
        (("evaluate", "absent"), ": name a run, a checkpoint, or a Hugging Face folder\n"),
        (("inspect", "absent"), f"error: no folder absent; {REPOSITORY} has "),
        (("samples", "absent"), f"no folder absent (looked in {REPOSITORY}): name the output folder of a run"),
    ],
)
def test_a_missing_folder_is_named_without_importing_torch(words, message):
    done = megappo(*words)
    assert done.returncode == 2 and message in done.stderr and "torch" not in heavy_imports(done)


def test_a_wrong_folder_is_refused_with_the_right_one_without_importing_torch(tmp_path):
    critic, run = tmp_path / "critic", tmp_path / "parent" / "run"
    (run / "checkpoints").mkdir(parents=True)
    critic.mkdir()
    (critic / "model.safetensors").touch()
    (critic / "config.json").write_text('{"architectures": ["Qwen2ForTokenClassification"]}')
    for words, message in (
        (("serve", critic), f"{critic} is a critic (Qwen2ForTokenClassification), which SGLang does not serve: "),
        (("evaluate", run.parent), f"a Hugging Face folder with config.json: did you mean {run}?\n"),
        (("evaluate", run), "a Hugging Face folder with config.json: name one of these\n"),
        (("convert", "hf-to-megatron", "--input", critic, "--output", run.parent), f"{run.parent} is not empty: "),
        (("convert", "verify", "--input", critic, "--output", tmp_path / "no"), f"--output: no folder {tmp_path}/no; "),
    ):
        done = megappo(*map(str, words))
        assert done.returncode == 2 and message in done.stderr, done.stderr
        assert "torch" not in heavy_imports(done)


@pytest.mark.parametrize("words", [("plan", "--keys"), ("serve", "--help")])
def test_a_reader_of_the_output_that_has_left_ends_a_command_without_a_traceback(words):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "megappo", *words]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert done.returncode == 128 + signal.SIGPIPE and done.stderr == ""


def test_a_port_in_use_is_refused_at_once(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        done = megappo("serve", str(write_run(tmp_path) / "model"), "--port", port)
    assert done.returncode == 2 and "torch" not in heavy_imports(done)
    assert f"error: port {port} is in use: end the server that listens on it, or choose another port, --" in done.stderr


def test_a_command_that_imports_for_seconds_reports_it_first():
    done = megappo("doctor", "limits")
    assert re.search(r"\nimporting torch\n.*\| +torch\n", done.stderr, re.DOTALL) and done.stdout.startswith("limits")


def test_an_unknown_command_is_named():
    done = megappo("trian")
    assert done.returncode == 2 and "No such command 'trian'" in done.stderr


def test_the_shell_completes_commands_and_keys():
    variables = {"_MEGAPPO_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    assert megappo(**variables, COMP_WORDS="megappo ev").stdout.split() == ["evaluate"]
    words = "megappo plan configs/quickstart.yaml actor.optim.lr"
    completed = megappo(**variables | {"COMP_CWORD": "3"}, COMP_WORDS=words).stdout.split()
    assert completed == ["actor.optim.lr=", "actor.optim.lr_warmup_steps=", "actor.optim.lr_decay_style="]


def test_init_writes_a_config_that_fits(tmp_path):
    done = megappo("plan", "--init", "Qwen/Qwen2.5-7B", "--gpu", "h100", "--gpus", "8")
    file = tmp_path / "run.yaml"
    file.write_text(done.stdout)
    config = load_config(file)
    assert config.model.path == "Qwen/Qwen2.5-7B" and config.placement.critic == "0-7"
    assert yaml.safe_load(done.stdout)["actor"]["optim"] == {"lr": 1e-6}
    assert "  # GPUs per SGLang engine" in done.stdout
    planned = megappo("plan", str(file), "--gpu", "h100")
    assert "  it fits: " in planned.stdout and "does not fit" not in planned.stderr
    absent = megappo("plan", "--init", "Own/Absent", "--gpu", "h100", "--gpus", "8")
    assert absent.returncode == 2
    assert "hf download Own/Absent config.json), or name one of the shapes deepseek-llm-7b, " in absent.stderr
    few = megappo("plan", "--init", "llama-3.1-70b", "--gpu", "h100", "--gpus", "2")
    assert (
        few.returncode == 2
        and "fits 2 h100: split as far as possible, it needs " in few.stderr
        and ": take about 32, or larger" in few.stderr
    )
    assert (
        done.stdout.count("\n#   # ") == 2 and "rollout: {tensor_parallel: " in done.stdout.partition("\n#   # 2: ")[2]
    )


@pytest.mark.slow
def test_a_wheel_has_the_commands_and_the_shapes(tmp_path):
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
        REPOSITORY,
    ]
    subprocess.run(build, check=True, timeout=200)
    shutil.rmtree(REPOSITORY / "build")
    [wheel] = Path(tmp_path).glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for command in COMMANDS.values():
        assert f"{command.function.partition(':')[0].replace('.', '/')}.py" in names
    assert "megappo/architecture/shapes/qwen2.5-7b/config.json" in names
    assert "megappo_tools/conversion/running.py" in names

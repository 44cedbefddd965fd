"""A run downloads the models that its config names by their ids on the Hugging Face hub."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hub import COMMIT, serve_model
from planning import REPOSITORY, write_run
from program import Program, logged

NO_REWARD = "reward.function=absent.py:reward"
"""An error, which ends the command before ranks start."""


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """The run's model in two files, with some in other formats."""
    folder = write_run(tmp_path) / "model"
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.safetensors").write_bytes(b"another model")
    return folder


def train(folder: Path, endpoint: str, *overrides: str, **variables: str) -> subprocess.CompletedProcess:
    """Start the command, as far as its check of the config."""
    environment = {"PYTHONPATH": str(REPOSITORY), "HF_HUB_CACHE": str(folder / "cache"), "HF_ENDPOINT": endpoint}
    return subprocess.run(
        [sys.executable, "-m", "megappo", "train", "run.yaml", "model.path=Own/Model", NO_REWARD, *overrides],
        cwd=folder,
        env=os.environ | environment | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_model_is_downloaded_once_and_an_interrupted_download_is_completed(published: Path) -> None:
    folder = published.parent
    kept = {path.name: path.read_bytes() for path in published.iterdir() if path.suffix not in (".bin", "")}
    shutil.move(published, folder / "published")
    with serve_model("Own/Model", folder / "published") as endpoint:
        done = train(folder, endpoint)
        assert done.returncode == 2 and "downloading Own/Model to the cache" in done.stderr
        assert "model.path" not in done.stderr and "absent.py" in done.stderr
        snapshot = folder / "cache" / "models--Own--Model" / "snapshots" / COMMIT
        assert {path.name: path.read_bytes() for path in snapshot.iterdir()} == kept
        assert "downloading" not in train(folder, endpoint).stderr
        (snapshot / "model.safetensors").unlink()
        assert "downloading Own/Model to the cache" in train(folder, endpoint).stderr
        assert {path.name: path.read_bytes() for path in snapshot.iterdir()} == kept
        (snapshot / "model.safetensors.index.json").write_text("{")
        damaged = train(folder, endpoint).stderr
        assert "Traceback" not in damaged and "downloading" not in damaged and "model.safetensors.index.json" in damaged


@pytest.mark.parametrize(
    ("variables", "cause"),
    [
        ({}, "\\x1b[2J no such model"),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE=0"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "ConnectError"),
    ],
    ids=["no such model", "offline", "no network"],
)
def test_a_download_that_fails_is_reported_with_its_cause_and_the_command(
    variables: dict[str, str], cause: str, published: Path
) -> None:
    with serve_model("Own/Other", published) as endpoint:
        done = train(published.parent, endpoint, **variables)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    warning, *rest = [line for line in done.stderr.splitlines() if "Own/Model" in line][1:]
    assert warning.startswith("warning: Own/Model cannot be downloaded: ") and cause in warning
    assert any("model.path: no folder Own/Model" in line and "bin/hf download Own/Model" in line for line in rest)


def test_a_silent_hub_is_not_waited_for_without_end(published: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = train(published.parent, endpoint, HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert done.returncode == 2 and "(HF_HUB_DOWNLOAD_TIMEOUT=1: the hub was silent" in done.stderr


def test_a_path_that_looks_like_an_id_is_not_downloaded(published: Path) -> None:
    done = train(published.parent, "http://127.0.0.1:9", "model.path=model/mine")
    assert "model.path: no folder model/mine" in done.stderr and "download" not in done.stderr.partition("no folder")[0]


@pytest.mark.slow
def test_ranks_wait_for_the_download(config: Path, folder: Path) -> None:
    variables = {"HF_HUB_CACHE": str(folder / "cache")}
    overrides = ("model.path=Own/Model", "trainer.total_steps=1", f"trainer.output_dir={folder / 'run'}")
    with serve_model("Own/Model", config.parent / "model") as endpoint:
        variables["HF_ENDPOINT"] = endpoint
        with Program(folder, config, *overrides, environment=variables) as program:
            assert program.wait() == 0, program.output
            assert program.output.count("downloading Own/Model") == 1
    assert logged(folder / "run")[-1]["step"] == 1

"""Output of inspect_checkpoint.py for runs, checkpoints, components and Hugging Face folders."""

import os
import pickle
import shutil
from pathlib import Path

import pytest
from commands import INSPECT, run
from safetensors import safe_open
from trained_checkpoint import make_checkpoint


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("trained"))


def inspect(folder: Path) -> list[str]:
    done = run(INSPECT, folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_it_starts_from_nothing(step: Path) -> None:
    """The other tests fork it from a process that has already imported the program."""
    done = run(INSPECT, step, before=os.setsid)
    assert (done.returncode, done.stderr) == (0, "") and f"{step}: step 2" in done.stdout


def test_a_run(step: Path) -> None:
    checkpoints = step.parent
    (checkpoints / "step_00000004.partial" / "actor").mkdir(parents=True)
    lines = inspect(checkpoints.parent)
    shutil.rmtree(checkpoints / "step_00000004.partial")
    assert lines[:5] == [
        "step_00000002 (latest)",
        "step_00000004.partial, incomplete",
        "",
        f"{step}: step 2",
        "",
    ]
    assert f"{step / 'actor'}: Megatron; loads in any layout" in lines
    assert f"{step / 'critic'}: Megatron; loads in any layout" in lines
    assert f"{step / 'shared'}: Megatron; loads in any layout" in lines


def test_a_component_whose_tensors_are_not_read(step: Path, tmp_path: Path) -> None:
    folder = tmp_path / "actor"
    shutil.copytree(step / "actor", folder)
    for file in folder.glob("*.distcp"):  # as many bytes, none of them right
        file.write_bytes(bytes(file.stat().st_size))
    lines = inspect(folder)
    # 91 rows of vocabulary are padded to 92 for two ranks: 37,088 + 2 x 32.
    assert lines[1] == "  model: 10 tensors (10 float32), 37,152 elements, 0.14 MiB"
    assert lines[2] == "  optimizer: 30 tensors (30 float32), 111,456 elements, 0.43 MiB"
    found = {line.split()[0]: line.split(maxsplit=2)[1:] for line in lines[3:]}
    assert len(found) == 40
    assert found["embedding.word_embeddings.weight"] == ["float32", "[92, 32]"]
    assert found["decoder.layers.mlp.linear_fc1.weight"] == ["float32", "[4, 96, 32]"]
    assert found["optimizer.state.exp_avg.decoder.final_layernorm.weight"] == ["float32", "[32]"]


def test_a_hugging_face_folder(step: Path) -> None:
    folder = step.parents[2] / "actor"
    lines = inspect(folder)
    assert lines[0] == f"{folder}: Hugging Face, architecture Qwen2ForCausalLM"
    assert lines[1] == "  model: 51 tensors (51 float32), 37,088 elements, 0.14 MiB"
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = list(file.keys())
        expected = {name: ["float32", str(file.get_slice(name).get_shape())] for name in names}
    assert {line.split()[0]: line.split(maxsplit=2)[1:] for line in lines[2:]} == expected


class Attack:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def test_what_cannot_be_read_is_refused_in_one_line(step: Path, tmp_path: Path) -> None:
    def message(folder: Path) -> str:
        done = run(INSPECT, folder)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        return done.stderr

    assert f"no folder {tmp_path / 'actr'}; {tmp_path} has none" in message(tmp_path / "actr")
    assert "holds neither checkpoints of a run, nor" in message(tmp_path)
    folder = tmp_path / "actor"
    shutil.copytree(step / "actor", folder)
    metadata = folder / ".metadata"
    os.truncate(metadata, 1000)
    assert f"{metadata} is damaged" in message(folder)
    metadata.write_bytes(pickle.dumps(Attack(tmp_path / "attacked")))
    assert "posix.mkdir, which describes no tensor: it may be an attack" in message(folder)
    assert not (tmp_path / "attacked").exists()
    metadata.unlink()
    assert "it has no .metadata" in message(folder)

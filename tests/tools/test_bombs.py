"""Nothing that reads a folder of weights, a checkpoint, a data file or a run's folder executes code in it."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from bombs import bombs, is_armed
from commands import CONVERT, INSPECT, REPOSITORY, environment, run
from slow import slow_ones
from tiny_models import hf_folder

from megappo.architecture.parsing import read_architecture
from megappo.config.config_error import ConfigError
from megappo.config.loading import changes_since, load_config
from megappo.config.schema import Config, Data
from megappo.data.prompts import PromptDataset
from megappo.data.tokenizer import end_token_ids, load_tokenizer
from megappo.observe.metrics_file import read_metrics
from megappo.weights.load import critic_architecture
from megappo.weights.safetensors_io import HFFolder

COMPANIONS = (
    *(
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "special_tokens_map.json",
    ),
    *("added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
)
HUGGING_FACE = ("config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", *COMPANIONS)
COMPONENT = (".metadata", "metadata.json", "common.pt", "__0_0.distcp", "config.json")
KINDS = ("pickle", "text pickle", "zip", "legacy")


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "went off"


def bomb(kind: str, marker: Path) -> bytes:
    content = bombs(marker)[kind]
    assert is_armed(content, marker)
    return content


def filled(folder: Path, names: tuple[str, ...], content: bytes) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("kind", slow_ones(KINDS, ("text pickle", "legacy")))
def test_tools_refuse_them_in_one_line(tmp_path: Path, marker: Path, kind: str) -> None:
    content = bomb(kind, marker)
    model = filled(tmp_path / "model", HUGGING_FACE, content)
    component = filled(tmp_path / "component", COMPONENT, content)
    step = tmp_path / "run" / "checkpoints" / "step_00000001"
    for name in ("actor", "critic"):
        filled(step / name, COMPONENT, content)
    filled(step / "more", ("x",), content)
    for path in (step / "state.json", step.parent / "latest", step.parents[1] / "config.yaml"):
        path.write_bytes(content)
    commands: list[tuple[object, ...]] = [(INSPECT, folder) for folder in (model, component, step, step.parent)]
    for command, source in (
        ("hf-to-megatron", model),
        ("megatron-to-hf", component),
        ("megatron-to-hf", step / "actor"),
        ("reshard", component),
        ("reshard", step),
        ("verify", model),
        ("verify", component),
        ("verify", step),
    ):
        target = step if source == step else component if command == "verify" else tmp_path / "new"
        commands.append((CONVERT, command, "--input", source, "--output", target))
    (step / "SHA256SUMS").write_bytes(content)
    commands += [(INSPECT, step), (CONVERT, "reshard", "--input", step, "--output", tmp_path / "new")]
    for tool, *arguments in commands:
        done = run(tool, *arguments)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), (arguments, done)
        assert done.stderr.startswith("error: "), (arguments, done)
        assert not marker.exists(), arguments
    assert not (tmp_path / "new").exists()


def test_plan_refuses_them(tmp_path: Path, marker: Path) -> None:
    content = bomb("pickle", marker)
    model = filled(tmp_path / "model", HUGGING_FACE, content)
    data = filled(tmp_path / "data", ("train.jsonl", "train.parquet"), content)
    step = filled(tmp_path / "run" / "checkpoints" / "step_00000001", ("state.json",), content)
    (step.parent / "latest").write_bytes(content)
    keys = [f"model.path={model}", f"data.train_files={data / 'train.jsonl'}", f"trainer.output_dir={tmp_path / 'run'}"]
    command = [sys.executable, "-m", "megappo", "plan", "configs/quickstart.yaml", *keys]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and not marker.exists()
    assert f"model.path: cannot use {model / 'config.json'}: it is not UTF-8 text" in done.stderr
    assert all(line.startswith("error: ") for line in done.stderr.splitlines())


def prompts_of(file: Path, folder: Path) -> None:
    data = Data(train_files=[str(file)])
    dataset = PromptDataset([str(file)], load_tokenizer(str(folder)), data, 0)
    if lines := dataset.errors([dataset.check(vocab_size=2**31)]):
        raise ConfigError(*lines)


# What reads one file, which is in a folder where all others are as they should be.
READERS: dict[str, Callable[[Path], object]] = {
    "config.json": lambda path: read_architecture(path.parent),
    "config.json of a critic": lambda path: critic_architecture(path.parent),
    "model.safetensors": lambda path: HFFolder(path.parent),
    "model.safetensors.index.json": lambda path: HFFolder(path.parent),
    "generation_config.json": lambda path: end_token_ids(str(path.parent), load_tokenizer(str(path.parent))),
    "tokenizer.json": lambda path: load_tokenizer(str(path.parent)),
    "tokenizer_config.json": lambda path: load_tokenizer(str(path.parent)),
    "train.jsonl": lambda path: prompts_of(path, path.parent),
    "train.parquet": lambda path: prompts_of(path, path.parent),
    "metrics.jsonl": lambda path: read_metrics(path.parent),
    "config.yaml": load_config,
    "config.yaml of a run before": lambda path: changes_since(path, Config.model_construct()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_run_reads_is_refused_by_name(tmp_path: Path, marker: Path, kind: str) -> None:
    content, whole = bomb(kind, marker), hf_folder(tmp_path / "whole", "qwen2")
    write_tokenizer(whole)
    load_tokenizer(str(whole))
    for number, (name, read) in enumerate(READERS.items()):
        path = tmp_path / str(number) / name.split()[0]
        shutil.copytree(whole, path.parent)
        path.write_bytes(content + b"\n{}\n")
        with pytest.raises((ConfigError, ValueError, OSError)) as caught:
            read(path)
        message = "\n".join(getattr(caught.value, "errors", [str(caught.value)]))
        assert path.name in message or str(path.parent) in message, (name, message)
        assert not marker.exists(), name


def test_other_files_beside_a_tokenizer_are_no_danger(tmp_path: Path, marker: Path) -> None:
    whole = hf_folder(tmp_path / "whole", "qwen2")
    write_tokenizer(whole)
    for kind in KINDS:
        for name in COMPANIONS:
            folder = tmp_path / kind / name
            shutil.copytree(whole, folder)
            (folder / name).write_bytes(bombs(marker)[kind])
            try:
                load_tokenizer(str(folder))
            except ConfigError as error:
                assert str(folder) in str(error)
            assert not marker.exists(), (kind, name)


def write_tokenizer(folder: Path) -> None:
    """Write the quickstart's tokenizer."""
    sys.path.insert(0, str(REPOSITORY / "tools"))
    import make_quickstart

    make_quickstart.write_tokenizer(folder)

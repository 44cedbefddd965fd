"""Pipes, devices, giants and nonsense in a run's folder are an error that names the file."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from megappo.batch.rows_file import RowsFile
from megappo.checkpoint.checksums import altered, read_sums
from megappo.checkpoint.folders import candidates, read_state
from megappo.config.text_files import LARGEST_LINES
from megappo.errors import ActionableError
from megappo.observe.kept_table import read_kept
from megappo.observe.metrics_file import read_metrics
from megappo.observe.run_file import read_run
from megappo.observe.samples import read_samples
from megappo.observe.timeline import drop_phases, read_timeline
from megappo.rollouts.journal import Journal


class Reader(NamedTuple):
    """A file of a run, the function that reads it, and content that no run writes."""

    file: str
    read: Callable[[Path], object]
    nonsense: tuple[str, ...] = ()


def in_step(read: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda run: read(run / "checkpoints" / "step_00000003")


def fault_of_latest(run: Path) -> None:
    _, fault = candidates(run / "checkpoints")
    assert fault
    raise ActionableError(fault)


def fault_by_sums(run: Path) -> None:
    [fault] = altered(run / "checkpoints" / "step_00000003", {"config.yaml": "0"}, ["config.yaml"])
    raise ActionableError(fault)


def journal(run: Path) -> Journal:
    return Journal(run, 0, 1, {})


SAMPLE = '{"prompt_index": 0, "sample_index": 0, "ending": "stop", "segments": [%s]}'
JOURNAL = '{}\n{"position": 0, "sample": ' + SAMPLE + "}\n"
READERS = {
    "state": Reader(
        "checkpoints/step_00000003/state.json",
        in_step(read_state),
        (
            '{"step": 7}',
            "[]",
            "{",
            '{"step": 3, "optimizer_steps": {"actor": 1}}',
            '{"step": 3, "kl": {"value": null}}',
        ),
    ),
    "latest": Reader("checkpoints/latest", fault_of_latest, ("\udcff", "step_00000009")),
    "sums": Reader("checkpoints/step_00000003/SHA256SUMS", in_step(read_sums), ("x", "\udcff  x\n")),
    "config": Reader("checkpoints/step_00000003/config.yaml", fault_by_sums),
    "metrics": Reader("metrics.jsonl", read_metrics, ('{"step": 1, "x": []}\n{}',)),
    "run": Reader("run.json", read_run, ('{"status": 1}', '{"planned_gib": {"x": "1"}}', '{"logged_step": "1"}')),
    "timeline": Reader(
        "timeline/rank_00000.jsonl", read_timeline, ('{"step": 1, "phases": [["x", "1", 2]]}\n', '{"step": 1}\n')
    ),
    "journal": Reader(
        "ahead/engine_0_version_00000001.jsonl",
        lambda run: journal(run).read(),
        (
            JOURNAL % '{"prompt": ["x"]}',
            JOURNAL % '{"prompt": [1], "tokens": [1], "choices": ""}',
            '{}\n{"position": "1"}\n',
            '{}\n{"position": 1, "grades": [], "failures": {"x": [[1, 2], "nothing"]}, "is_equal": false}\n',
        ),
    ),
    "choices": Reader(
        "ahead/choices.jsonl",
        lambda run: journal(run).forget_choices(0),
        ('{"step": 1}\n', '{"step": 1, "chosen": ["x"], "left_out": [], "num_draws": 0}\n'),
    ),
    "samples": Reader(
        "rollouts/step_00000001.jsonl",
        lambda run: read_samples(run / "rollouts" / "step_00000001.jsonl"),
        (
            '{"score": 1}\n',
            '{"step": 1, "score": "1"}\n',
            '{"step": 1, "parts": 3}\n',
            '{"step": 1, "finish_reason": 3}\n',
            '{"step": 1, "turns": 5}\n',
            '{"step": 1, "turns": [{"turn": 1, "reward": 0.0}]}\n',
            '{"step": 1, "turns": [{"turn": 1, "text": "x", "reward": "a"}]}\n',
        ),
    ),
    "kept": Reader(
        "rollouts/step_00000001.parquet", lambda run: read_kept(run / "rollouts" / "step_00000001.parquet"), ("PAR1",)
    ),
    "rows": Reader("rows.safetensors", lambda run: RowsFile(run / "rows.safetensors"), ("x",)),
}


def giant(path: Path) -> None:
    path.touch()
    os.truncate(path, LARGEST_LINES + 1)


PLACES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "giant": giant,
}


def refused(reader: Reader, run: Path) -> str:
    with pytest.raises(ActionableError) as caught:
        reader.read(run)
    message = str(caught.value)
    assert Path(reader.file).name in message and len(message) < 1200
    return message


def made(reader: Reader, run: Path) -> Path:
    path = run / reader.file
    path.parent.mkdir(parents=True, exist_ok=True)
    (run / "checkpoints" / "step_00000003").mkdir(parents=True, exist_ok=True)
    return path


@pytest.mark.timeout(60)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_ordinary_file_of_ordinary_size_is_named(name, place, tmp_path):
    if (name, place) == ("rows", "giant"):
        pytest.skip("rows may have any size")
    path = made(READERS[name], tmp_path)
    PLACES[place](path)
    refused(READERS[name], tmp_path)


CASES = [(name, content) for name, reader in READERS.items() for content in reader.nonsense]


@pytest.mark.parametrize(("name", "content"), CASES)
def test_what_no_run_writes_is_named(name, content, tmp_path):
    made(READERS[name], tmp_path).write_text(content, errors="surrogateescape")
    refused(READERS[name], tmp_path)


def test_a_state_is_of_its_folders_step(tmp_path):
    made(READERS["state"], tmp_path).write_text('{"step": 7}')
    assert "state.json is of step 7, not 3; use another checkpoint" in refused(READERS["state"], tmp_path)


def test_a_line_of_zeros_is_read_to_its_limit_alone(tmp_path):
    path = made(READERS["metrics"], tmp_path)
    path.write_text('{"step": 1}\n')
    os.truncate(path, 2**35)
    assert "a line has more than 268,435,456 bytes" in refused(READERS["metrics"], tmp_path)


@pytest.mark.parametrize("place", ["pipe", "line"])
def test_a_damaged_timeline_begins_again(place, tmp_path, capsys):
    lines = [json.dumps({"step": step, "phases": []}) + "\n" for step in (1, 2, 3)]
    sound, damaged = (tmp_path / "timeline" / f"rank_0000{rank}.jsonl" for rank in (0, 1))
    sound.parent.mkdir()
    sound.write_text("".join(lines))
    damaged.write_text("broken\n" + "".join(lines)) if place == "line" else os.mkfifo(damaged)
    drop_phases(tmp_path, 3)
    assert read_timeline(tmp_path) == {1: {0: []}, 2: {0: []}}
    printed = capsys.readouterr().out
    assert printed.startswith(f"WARNING: the timeline begins again: {damaged}") and damaged.name + ".damaged" in printed
    assert (damaged.parent / f"{damaged.name}.damaged").exists()

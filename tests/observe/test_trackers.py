"""Each tracker logs a run that is interrupted, resumes and fails, with the real package and without a network; the
package's own reader, or its own types, return what was logged.

The packages are in no lock, for the reasons in requirements-trackers.txt: the cases are slow, and run in a copy of
.venv with that file installed.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megappo.observe.loggers import LOGGERS, RunEnd, RunInfo, logger_errors, make_tracker
from megappo.observe.metrics import Metric
from megappo.observe.observer import Observer
from megappo.observe.run_file import logged_step_of

RUN_ID = "ab12cd34"
SAMPLE = {"dataset": "sums", "prompt": "1+1=", "label": "2", "score": 1.0, "passed": True}
CONFIG = {"actor": {"optim": {"lr": 1e-6}}, "data": {"train_files": ["a.jsonl"]}}
REWARD = {1: [0.25], 2: [0.5], 3: [0.75], 4: [1.0]}
"""Step -> what is logged there: once in step 3, which the resumed run trains again."""
Logged = dict[str, dict[int, list]]


def log_twice(name: str, folder: Path) -> None:
    histogram = Metric.of(torch.tensor([-1.0, 0.5, 2.0]), "histogram").value

    def log(resume_step: int, steps: list[int], end: RunEnd) -> None:
        logged_step = logged_step_of(folder, resume_step)
        run = RunInfo(
            folder, 4, resume_step, logged_step, RUN_ID, CONFIG, "0123", {"device": "cpu"}, {"actor": "ranks 0-1"}
        )
        observer = Observer(run, {name: make_tracker(name)})
        for step in steps:
            metrics = {"reward/score/mean": step / 4, "val/sums/mean@4": 0.5, "critic/vf_loss": math.nan}
            observer.log(step, {**metrics, "advantages/histogram": histogram})
            observer.samples(step, [{**SAMPLE, "response": f"r{step}"}])
        observer.checkpoint(steps[-1], folder / "checkpoints" / f"step_{steps[-1]:08d}")
        observer.end(end)

    log(0, [1, 2, 3], RunEnd("interrupted", "a signal"))
    log(3, [3, 4], RunEnd("failed", "ValueError: bad"))


def by_name(records: Iterator[dict]) -> Logged:
    """Return name -> step -> values, of records with a step."""
    found: Logged = defaultdict(lambda: defaultdict(list))
    for record in records:
        for name, value in record.items():
            found[name][int(record["step"])].append(value)
    return found


def leveldb_log(path: Path) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, as W&B writes it: after a header of 7 bytes, blocks of 32
    KiB of chunks with checksum (4 bytes), length (2) and kind (1: whole, 2: first, 3: middle, 4: last)."""
    content, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the package
def test_wandb(tmp_path, monkeypatch, capsys):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    log_twice("wandb", tmp_path)
    record_type = wandb.proto.wandb_internal_pb2.Record
    files = sorted(tmp_path.glob(f"wandb/offline-run-*-{RUN_ID}/run-{RUN_ID}.wandb"))
    assert len(files) == 2, "the run and its continuation, with one id"
    of_files = [[record_type.FromString(record) for record in leveldb_log(file)] for file in files]
    history = []
    for record in [*of_files[0], *of_files[1]]:
        items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        history += [items] if "step" in items else []
    logged = by_name(iter(history))
    assert logged["reward/score/mean"] == REWARD
    assert set(logged["val/sums/mean@4"]) == {1, 2, 3, 4}
    assert logged["advantages/histogram/_type"][4] == ["histogram"]
    [run] = {record.run.run_id for records in of_files for record in records if record.HasField("run")}
    assert run == RUN_ID
    config = {item.key: item.value_json for record in of_files[0] for item in record.run.config.update}
    assert json.loads(config["actor"]) == CONFIG["actor"] and json.loads(config["run"])["commit"] == "0123"
    tables = sorted(tmp_path.glob("wandb/**/*.table.json"))
    assert [json.loads(table.read_text())["data"][0][2] for table in tables]
    exits = [record.exit.exit_code for records in of_files for record in records if record.HasField("exit")]
    assert exits == [1, 1] and any(record.HasField("preempting") for record in of_files[0])
    assert "WARNING" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_mlflow(tmp_path, monkeypatch, capsys):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    log_twice("mlflow", tmp_path / "run")
    client = mlflow.MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name("megappo").experiment_id])
    assert run.info.status == "FAILED" and run.data.tags["megappo.run_id"] == RUN_ID
    assert run.data.tags["end"] == "ValueError: bad" and run.data.params["actor.optim.lr"] == "1e-06"
    events = client.get_metric_history(run.info.run_id, "reward/score/mean")
    assert sorted((event.step, event.value) for event in events) == [
        (step, value) for step, values in REWARD.items() for value in values
    ]
    assert {event.step for event in client.get_metric_history(run.info.run_id, "val/sums/mean_at_4")} == {1, 2, 3, 4}
    shown = mlflow.artifacts.load_dict(f"runs:/{run.info.run_id}/samples/step_00000004/val/sums/samples.json")
    assert shown["samples"][0]["response"] == "r4"
    assert "WARNING: the logger" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_swanlab(tmp_path, monkeypatch, capsys):
    pytest.importorskip("swanlab")
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    monkeypatch.setenv("SWANLAB_MODE", "offline")
    log_twice("swanlab", tmp_path)
    records = []
    files = sorted(tmp_path.glob(f"swanlog/run-*-{RUN_ID}/run-{RUN_ID}.swanlab"))
    assert len(files) == 2
    for file in files:
        reader = DataStoreReader()
        reader.open(file)
        records += map(Record.FromString, reader)
    scalars = [record.scalar for record in records if record.HasField("scalar")]
    logged = by_name(iter({"step": one.step, one.key: one.value.number} for one in scalars))
    assert logged["reward/score/mean"] == REWARD
    texts = [text.read_text() for text in sorted(tmp_path.glob("swanlog/*/media/text/*.txt"))]
    assert any("response: r4" in text for text in texts)
    assert "WARNING: the logger" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trackio(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read at the import
    trackio = pytest.importorskip("trackio")
    log_twice("trackio", tmp_path / "run")
    [run] = trackio.Api().runs("megappo")
    assert run.name == f"run-{RUN_ID}" and run.config["actor"] == CONFIG["actor"]
    logged = by_name(iter(trackio.SQLiteStorage.get_logs("megappo", run.name)))
    assert logged["reward/score/mean"] == REWARD
    assert logged["val/sums/samples"][4][0]["_value"][0]["response"] == "r4"
    assert "WARNING: the logger" not in capsys.readouterr().out


def test_a_missing_package_is_an_error_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(LOGGERS, "own", LOGGERS["wandb"]._replace(package="no_such_package"))
    [error] = logger_errors(["tensorboard", "own"])
    assert "own needs the package no_such_package, which is not installed: " in error
    assert error.endswith("bin/python -m pip install no_such_package")
    [error] = logger_errors(["wandbb"])
    assert error == "trainer.loggers: there is no logger 'wandbb': did you mean wandb?"
    [error] = logger_errors(["x"])
    assert error.endswith("name tensorboard, wandb, mlflow, swanlab, trackio, own or FILE.py:CLASS")


OWN = """
from megappo.observe.loggers import Logger
class Sound(Logger):
    pass
class Other:
    pass
"""


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("Sound", OWN, ""),
        ("Other", OWN, "Other is not a subclass of megappo.observe.loggers.Logger"),
        ("Missing", OWN, "has no attribute 'Missing'"),
        ("Sound", "import no_such_module", "No module named 'no_such_module'"),
        ("Sound", None, "no Python file"),
    ],
)
def test_a_class_of_a_file(tmp_path, name, text, error):
    file = tmp_path / "own_loggers.py"
    if text is not None:
        file.write_text(text)
    errors = list(logger_errors([f"{file}:{name}"]))
    assert len(errors) == bool(error) and error in "".join(errors)
    if not error:
        assert type(make_tracker(f"{file}:{name}")).__name__ == name

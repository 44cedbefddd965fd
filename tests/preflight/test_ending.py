"""The last line of a run that has not finished."""

import json

import pytest

from megappo.lab.report.ending import end_abandoned_run, ending_of
from megappo.observe.run_file import RUNNING, read_run


@pytest.fixture
def arguments(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("trainer: {output_dir: elsewhere}\n")
    (tmp_path / "run").mkdir()
    return [str(config), f"trainer.output_dir={tmp_path / 'run'}", "rollout.n=4"]


@pytest.mark.parametrize(
    ("num_steps", "checkpoints", "account"),
    [
        (0, (), "before the first step; nothing is lost"),
        (1, (), "no checkpoint yet; 1 step lost"),
        (49, ("step_00000020", "step_00000040"), "resumes after step 40; 9 steps lost"),
        (40, ("step_00000040",), "resumes after step 40; nothing is lost"),
        (40, ("step_00000040_0003",), "resumes in the middle of step 41; nothing is lost"),
    ],
)
def test_what_is_lost(arguments, tmp_path, num_steps, checkpoints, account):
    lines = [json.dumps({"step": step}) for step in range(num_steps + 1)]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    for name in checkpoints:
        (tmp_path / "run" / "checkpoints" / name).mkdir(parents=True)
    assert not ending_of(arguments, started=0).has_trained, "without a run.json it has not begun"
    run_file = tmp_path / "run" / "run.json"
    run_file.write_text("{}")
    ending = ending_of(arguments, started=0)
    assert ending.account == account
    assert ending.has_trained == (num_steps > 0)
    assert not ending_of(arguments, run_file.stat().st_mtime + 1).has_trained, "that run.json is an earlier run's"


def test_the_reason_is_the_one_that_the_run_has_noted(arguments, tmp_path):
    for status, reason in (("interrupted", "the time limit"), ("running", "")):
        (tmp_path / "run" / "run.json").write_text(json.dumps({"status": status, "message": "the time limit"}))
        assert ending_of(arguments, 0).reason == reason
    (tmp_path / "run" / "run.json").write_text("{")
    assert ending_of(arguments, 0)[:2] == ("before the first step; nothing is lost", "")


@pytest.mark.parametrize("words", [(), ("none.yaml",), ("run.yaml", "trainer.eval_only=true")])
def test_a_run_that_trains_nothing_loses_nothing(arguments, tmp_path, words):
    assert ending_of([str(tmp_path / word) if word.endswith("yaml") else word for word in words], 0) is None


def test_a_folder_below_the_home_folder_is_found(arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    assert ending_of([arguments[0], "trainer.output_dir=~/run"], 0).account == "no checkpoint yet; 1 step lost"


@pytest.mark.parametrize(("code", "status"), [(137, "interrupted"), (255, "failed")])
def test_a_killed_run_is_ended_and_an_earlier_one_left_alone(arguments, tmp_path, code, status):
    run_file = tmp_path / "run" / "run.json"
    run_file.write_text(json.dumps({"status": RUNNING}))
    end_abandoned_run(arguments, run_file.stat().st_mtime + 1, code)
    assert read_run(tmp_path / "run")["status"] == RUNNING, "a run that was refused has not written it"
    end_abandoned_run(arguments, 0, code)
    assert read_run(tmp_path / "run")["status"] == status

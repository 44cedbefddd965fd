"""Loggers get what happens in a run, and trackers cannot end it."""

import json
from contextlib import ExitStack
from threading import Event

import pytest

from megappo.errors import ActionableError
from megappo.lab.report.report import Report
from megappo.observe.loggers import LOGGERS, Logger, RunEnd, RunInfo, Tracker, logger_errors
from megappo.observe.observer import Observer
from megappo.observe.run_file import logged_step_of, read_run, run_id_of
from megappo.runtime.interruption import Interrupted


class Recorded(Logger):
    def __init__(self, failing=()):
        self.failing, self.calls = failing, []

    def on_start(self, run):
        self._note("start", run.total_steps)

    def on_step(self, step, metrics):
        self._note("step", step, dict(metrics))

    def on_samples(self, step, samples):
        self._note("samples", step, samples[0]["response"])

    def on_checkpoint(self, step, path):
        self._note("checkpoint", step, path.name)

    def on_end(self, end):
        self._note("end", end)

    def _note(self, hook, *values):
        self.calls.append((hook, *values))
        if hook in self.failing:
            raise OSError(f"no network in {hook}")


def log_everything(observer, folder):
    for step in (1, 2):
        observer.log(step, {"x": float(step)})
        observer.samples(step, [{"prompt": "p", "response": f"r{step}"}])
    observer.checkpoint(2, folder / "checkpoints" / "step_00000002")


def test_every_logger_gets_all_calls_and_a_failing_one_is_reported_once_and_counted(tmp_path, capsys):
    sound, unsound, never = Recorded(), Recorded(("step", "samples", "end")), Recorded(("start",))
    observer = Observer(RunInfo(tmp_path, 2), {"unsound": unsound, "never": never, "sound": sound})
    log_everything(observer, tmp_path)
    observer.end(RunEnd())
    observer.end(RunEnd("failed"))

    assert never.calls == [("start", 2)]
    expected = [
        ("start", 2),
        ("step", 1, {"x": 1.0, "loggers/failed_calls": 1}),
        ("samples", 1, "r1"),
        ("step", 2, {"x": 2.0, "loggers/failed_calls": 3}),
        ("samples", 2, "r2"),
        ("checkpoint", 2, "step_00000002"),
        ("end", RunEnd()),
    ]
    assert sound.calls == unsound.calls == expected
    printed = capsys.readouterr().out
    assert printed.count("WARNING") == 2
    assert "the logger never failed, and the run continues: OSError: no network in start" in printed
    assert "the logger unsound failed, and the run continues: OSError: no network in step" in printed
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [{"step": step, "x": float(step), "loggers/failed_calls": 2 * step - 1} for step in (1, 2)]


def test_metrics_that_cannot_be_written_are_an_error(tmp_path):
    observer = Observer(RunInfo(tmp_path, 2))
    with pytest.raises(ValueError, match="not a number"):
        observer.log(1, {"x": "not a number"})
    observer.end(RunEnd("failed"))


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (None, RunEnd("finished")),
        (Interrupted("the time limit"), RunEnd("interrupted", "the time limit")),
        (ActionableError("no room: make some"), RunEnd("failed", "no room: make some")),
        (ZeroDivisionError("by zero"), RunEnd("failed", "ZeroDivisionError: by zero")),
    ],
)
def test_the_error_that_ends_a_run_is_passed_on_and_kept(error, end, tmp_path, capsys):
    tracker = Recorded()
    with ExitStack() as outer:
        if error is not None:
            outer.enter_context(pytest.raises(type(error)))
        with Observer(RunInfo(tmp_path, 2, run_id="abc"), {"report": Report(), "tracker": tracker}):
            assert read_run(tmp_path)["status"] == "running"
            if error is not None:
                raise error
    assert tracker.calls[-1] == ("end", end)
    facts = read_run(tmp_path)
    assert (facts["status"], facts["message"], facts["run_id"]) == (end.status, end.message, "abc")
    assert f'"status":"{end.status}"' in (tmp_path / "report.html").read_text()


def test_a_resumed_run_keeps_its_id_and_a_new_one_gets_another(tmp_path):
    assert len(run_id_of(tmp_path, 3)) == 8, "a folder of an older version"
    Observer(RunInfo(tmp_path, 2, run_id="abc")).end(RunEnd("interrupted"))
    assert run_id_of(tmp_path, 3) == "abc" != run_id_of(tmp_path, 0)


def test_a_step_that_is_trained_again_is_logged_again_only_where_it_replaces_the_first(tmp_path, monkeypatch):
    def log(resume_step, steps, is_killed):
        trackers = {"service": Recorded(), "own.py:Own": Recorded()}
        run = RunInfo(tmp_path, 9, resume_step, logged_step_of(tmp_path, resume_step))
        observer = Observer(run, trackers)
        for step in steps:
            observer.log(step, {"x": 1.0})
        if not is_killed:
            observer.end(RunEnd("interrupted"))
        return [[call[1] for call in tracker.calls if call[0] == "step"] for tracker in trackers.values()]

    monkeypatch.setitem(LOGGERS, "service", Tracker(Recorded, "a_package"))
    assert log(0, [1, 2, 3, 4, 5], is_killed=False) == [[1, 2, 3, 4, 5]] * 2
    assert log(3, [3], is_killed=True) == [[], [3]]
    assert log(3, [3, 4, 5, 6], is_killed=True) == [[6], [3, 4, 5, 6]]
    assert log(6, [6, 7], is_killed=False) == [[7], [6, 7]]
    assert log(0, [1, 2], is_killed=False) == [[1, 2]] * 2


def test_an_unknown_logger_is_an_error():
    assert list(logger_errors(["tensorboard"])) == []
    [error] = logger_errors(["tensorbord"])
    assert error == "trainer.loggers: there is no logger 'tensorbord': did you mean tensorboard?"
    (console,) = logger_errors(["console"])
    assert console == "trainer.loggers: there is no logger 'console': drop it, as each step is printed"
    [text] = logger_errors(["wandb,tensorboard"])
    assert text == "trainer.loggers: there is no logger 'wandb,tensorboard': write a list, [wandb,tensorboard]"


class Hanging(Recorded):
    """Hangs in one hook until it is released."""

    def __init__(self, hook):
        super().__init__()
        self.hook, self.released = hook, Event()

    def _note(self, hook, *values):
        super()._note(hook, *values)
        if hook == self.hook:
            self.released.wait()


@pytest.mark.parametrize("hook", ["start", "step", "end"])
def test_a_tracker_that_hangs_is_named_and_left_out(hook, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("megappo.observe.observer.CALL_SECONDS", 1.5)
    hanging, sound = Hanging(hook), Recorded()
    observer = Observer(RunInfo(tmp_path, 2), {"hanging": hanging, "sound": sound})
    log_everything(observer, tmp_path)
    observer.end(RunEnd())
    printed = capsys.readouterr().out
    fault = "WARNING: the logger hanging failed, and the run continues: it has not returned in time"
    assert printed.count(fault) == 1 and printed.splitlines()[-1] == "finished"
    assert hanging.calls[-1][0] == hook and len([call for call in hanging.calls if call[0] == hook]) == 1
    assert [call[:2] for call in sound.calls if call[0] == "step"] == [("step", 1), ("step", 2)]
    hanging.released.set()

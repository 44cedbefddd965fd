import inspect
import json

from report_pages import content_of

from megappo.lab.report.report import Report
from megappo.observe.loggers import Outlook, RunEnd, RunInfo
from megappo.observe.metrics_file import read_metrics
from megappo.observe.observer import NullObserver, Observer
from megappo.observe.run_file import has_finished
from megappo.observe.run_summary import summary

STEP = {
    "reward/score/mean": 0.25,
    "actor/entropy": 1.5,
    "rollout/tokens_per_second": 1234.6,
    "timing_s/step": 2.0,
    "timing_s/rollout": 1.5,
    "timing_s/other": 0.5,
}


INTERRUPTED = RunEnd("interrupted", "a signal")


def observer_in(folder, total_steps, resume_step=0):
    return Observer(RunInfo(folder, total_steps, resume_step), outlook=Outlook(loggers={"report": Report()}))


def test_a_resumed_run_leaves_every_step_once(tmp_path, capsys):
    observer = observer_in(tmp_path, 4)
    for step in range(4):
        observer.log(step, STEP)
        observer.samples(step, [{"prompt": "p", "response": f"first {step}"}])
    observer.end(INTERRUPTED)

    observer = observer_in(tmp_path, 4, resume_step=3)
    observer.samples(3, [{"prompt": "p", "response": "second 3"}])
    observer.samples(3, [{"prompt": "q", "response": "second set"}])
    observer.end(INTERRUPTED)
    observer.end(INTERRUPTED)

    files = {path.name: path.read_text().splitlines() for path in (tmp_path / "rollouts").iterdir()}
    assert sorted(files) == [f"step_{step:08d}.jsonl" for step in range(4)]
    assert [json.loads(line)["response"] for line in files["step_00000003.jsonl"]] == ["second 3", "second set"]
    assert [json.loads(line)["response"] for line in files["step_00000002.jsonl"]] == ["first 2"]


def test_the_report_of_every_end_shows_its_status(tmp_path, capsys):
    for end in (INTERRUPTED, RunEnd("failed", "no </script> here"), RunEnd()):
        observer = observer_in(tmp_path, 4)
        assert not (tmp_path / "report.html").exists(), "an earlier report is removed at the start"
        observer.end(end)
        [run] = content_of(tmp_path / "report.html")["runs"]
        assert (run["status"], run["message"]) == (end.status, end.message)
        assert has_finished(tmp_path) == (end.status == "finished")


def test_a_report_that_cannot_be_written_ends_no_run(tmp_path, capsys):
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_00000001.parquet").write_text("cut short")
    observer = observer_in(tmp_path, 4)
    observer.log(1, STEP)
    observer.end(RunEnd())
    printed = capsys.readouterr().out
    assert "WARNING: the logger report failed, and the run continues: " in printed
    assert "mean reward  0.250" in printed and not (tmp_path / "report.html").exists()


def test_the_summary_lists_an_evaluation_and_what_the_run_itself_has_exported(tmp_path):
    for name in ("hf_actor", "evaluation.json"):
        (tmp_path / name).mkdir()
    expected = [f"evaluation  {tmp_path}/evaluation.json", f"HF actor    {tmp_path}/hf_actor"]
    for exports in ("true", "false"):  # false: it went on from an end that did
        (tmp_path / "config.yaml").write_text(f"trainer: {{export_hf: {exports}}}\n")
        assert summary(tmp_path, read_metrics(tmp_path)).splitlines() == expected[: 1 + (exports == "true")]


def test_the_summary_and_the_report_compare_the_first_and_last_evaluation(tmp_path, capsys):
    observer = observer_in(tmp_path, 2)
    for step, (of_a, of_b) in {0: (0.2, 0.4), 1: (None, None), 2: (0.9, 1.0)}.items():
        metrics = STEP | {"reward/score/mean": 0.5 * step - 0.25} if step else {}
        for name, value in {"a": of_a, "b": of_b}.items() if of_a is not None else ():
            metrics |= {f"val/{name}/{metric}": value for metric in ("score/mean", "mean@1", "pass@1")}
        observer.log(step, metrics)
    observer.samples(2, [{"response": "x"}])
    capsys.readouterr()
    observer.end(RunEnd())

    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "finished"
    rows = dict(line.split("  ", 1) for line in lines)
    assert rows["held-out score"].strip() == "0.300 (step 0) -> 0.950 (step 2)"
    assert rows["mean reward"].strip() == "0.250 (step 1) -> 0.750 (step 2)"
    assert rows["files"].strip() == f"{tmp_path}: metrics.jsonl, rollouts"
    assert rows["report"].strip() == str(tmp_path / "report.html")
    assert "checkpoints" not in rows

    [run] = content_of(tmp_path / "report.html")["runs"]
    assert run["steps"] == [[0, 0], [1, 1], [2, 2]] and run["seconds"] == 4.0
    assert run["metrics"]["val/a/mean@1"] == [0.2, None, 0.9]
    assert run["metrics"]["reward/score/mean"] == [None, 0.25, 0.75]


def test_each_data_set_has_its_curve_its_numbers_and_its_responses(tmp_path, capsys):
    observer = observer_in(tmp_path, 2)
    numbers = {"score/mean": 0.25, "mean@4": 0.25, "mean@4/ci95": 0.5, "pass@1": 0.25, "pass@4": 0.5, "maj@4": 0.75}
    for step in (0, 2):
        of_sets = {f"val/aime_24/{name}": value for name, value in numbers.items()} | {"val/b/mean@1": 1.0}
        observer.log(step, of_sets)
    sample = {"dataset": "aime_24", "prompt": "1 < 2?", "label": "<b>", "scores": [1.0, 0.0]}
    passed = sample | {"response": "x" * 30_000, "passed": True}
    observer.samples(2, [passed, sample | {"response": "&", "passed": False}])
    observer.samples(2, [{"dataset": "b", "prompt": "p", "response": "r\u2028\x85"}])
    printed = capsys.readouterr().out
    assert "1 < 2? -> &" in printed and "passed" not in printed
    observer.end(RunEnd())
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines()[:-1])
    assert rows["aime_24"].strip() == "mean@4 0.250 +- 0.500, pass@4 0.500, maj@4 0.750"
    assert rows["b"].strip() == "mean@1 1.000" and "steps" not in rows, "it has not trained"

    [run] = content_of(tmp_path / "report.html")["runs"]
    first, second, other = run["samples"]
    assert (first["passed"], second["passed"]) == (True, False) and second["scores"] == [1.0, 0.0]
    assert second["prompt"] == "1 < 2?" and second["label"] == "<b>" and second["response"] == "&"
    assert other["response"] == "r\u2028\x85" and "passed" not in other
    assert first["response"].endswith("x ... (22,000 more characters)")


def test_a_run_without_evaluation_still_gets_its_report(tmp_path, capsys):
    observer = observer_in(tmp_path, 1)
    observer.log(1, {"timing_s/step": 1.0})
    observer.end(RunEnd())
    assert "held-out" not in capsys.readouterr().out
    assert content_of(tmp_path / "report.html")["runs"][0]["metrics"] == {"timing_s/step": [1.0]}


def test_the_silent_observer_has_the_same_methods_and_leaves_nothing(tmp_path, capsys):
    def interface(cls):
        functions = {name: f for name, f in vars(cls).items() if not name.startswith("_") and callable(f)}
        return {name: inspect.signature(function) for name, function in functions.items()}

    silent, loud = interface(NullObserver), interface(Observer)
    assert silent.keys() == loud.keys()
    for name, signature in loud.items():
        silent[name].bind(*signature.parameters)
    observer = NullObserver()
    assert observer.stop_reason == ""
    observer.log(1, STEP)
    observer.samples(1, [{"response": "x"}])
    observer.message("text")
    observer.end(RunEnd())
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr() == ("", "")

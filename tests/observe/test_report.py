"""The report of one run, and of several: its structure, what it shows, and what it lets nobody do."""

import base64
import fnmatch
import hashlib
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from report_pages import PHASES, Tags, content_of, kept, write_kept, write_run

from megappo.commands import report_command
from megappo.config.config_error import ConfigError
from megappo.lab.report.report import ASSETS, short_names, write_report
from megappo.lab.report.report_data import curves

LIBRARY_CHECKSUM = "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"
ROOT = Path(__file__).parents[2]
OUTER = ("html", "head", "meta", "title", "body")
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\u2028 & \"'`${1} <!--"


def test_a_page_is_self_contained_and_runs_its_own_scripts_only(tmp_path):
    tags = Tags(write_report(write_run(tmp_path / "run", 3)).read_text("utf-8")).found
    assert not [attributes for _, attributes, _ in tags if {"src", "href", "onload", "onclick"} & attributes.keys()]
    assert {tag for tag, _, _ in tags} == {*OUTER, "style", "noscript", "p", "pre", "div", "script"}
    policy = next(attributes["content"] for _, attributes, _ in tags if attributes.get("http-equiv"))
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy and "http" not in policy
    scripts = [text for tag, attributes, text in tags if tag == "script" and not attributes]
    styles = [text for tag, _, text in tags if tag == "style"]
    assert (len(scripts), len(styles)) == (2, 1)
    for text in scripts + styles:
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in policy


def test_hostile_texts_stay_texts(tmp_path):
    run = write_run(tmp_path / "<b>run &amp; 'co'", 3, model={"path": HOSTILE})
    usual = [tag for tag, _, _ in Tags(write_report(write_run(tmp_path / "usual", 3)).read_text("utf-8")).found]
    (run / "run.json").write_text(json.dumps({"status": HOSTILE, "message": HOSTILE, "hardware": {HOSTILE: HOSTILE}}))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, HOSTILE: 1.0, f"val/{HOSTILE}/mean@1": 0.5}) + "\n")
    sample = {"step": 4, "dataset": HOSTILE, "prompt": HOSTILE, "response": "a\ud800b", "label": {HOSTILE: 1}}
    (run / "rollouts" / "step_00000004.jsonl").write_text(json.dumps(sample) + "\n")
    write_kept(run, 4, [kept(4, 0, random.Random(0), prompt=HOSTILE, texts=[HOSTILE] * 5)])
    path = write_report(run)
    tags = Tags(path.read_text("utf-8")).found
    assert [tag for tag, _, _ in tags] == usual
    assert [text for tag, _, text in tags if tag == "title"] == [f"{tmp_path.name}/<b>run &amp; 'co'"]
    [shown] = content_of(path)["runs"]
    assert (shown["status"], shown["message"], shown["hardware"]) == (HOSTILE, HOSTILE, {HOSTILE: HOSTILE})
    assert shown["metrics"][HOSTILE] == [None] * 4 + [1.0]
    assert sample in shown["samples"] and HOSTILE in [one["prompt"] for one in shown["samples"] if "texts" in one]
    assert ["model.path", json.dumps(HOSTILE, ensure_ascii=False), "none"] in shown["differences"]


def test_numbers_that_json_lacks_are_shown_as_texts(tmp_path):
    run = write_run(tmp_path / "run", 3)
    row = kept(4, 0, random.Random(0), prompt="odd", values=[float("nan"), float("-inf"), 0.5, 1.0, 2.0])
    write_kept(run, 4, [row, kept(4, 1, random.Random(1), score=float("nan"))])
    label = {"step": 5, "dataset": "d", "prompt": "p", "response": "r", "label": {"limits": [float("inf")]}}
    (run / "rollouts" / "step_00000005.jsonl").write_text(json.dumps(label) + "\n")
    [shown] = content_of(write_report(run))["runs"]
    [values] = [one["values"] for one in shown["samples"] if one["prompt"] == "odd"]
    assert values == ["NaN", "-Infinity", 0.5, 1.0, 2.0]
    assert [one["label"] for one in shown["samples"] if one["step"] == 5] == [{"limits": ["Infinity"]}]
    assert "NaN" in [one["score"] for one in shown["samples"] if one["step"] == 4]


def test_the_scripts_never_parse_texts_as_html():
    for path in ASSETS.glob("*.js"):
        if path.name != "uPlot.iife.min.js":
            source = path.read_text("utf-8")
            assert not re.search(r"(inner|outer|Adjacent)HTML|document\.write|eval\(|Function\(", source)


def test_the_library_is_the_pinned_one():
    library = (ASSETS / "uPlot.iife.min.js").read_bytes()
    assert b"(v1.6.32)" in library[:100] and b"MIT License" in (ASSETS / "uPlot.LICENSE").read_bytes()
    assert hashlib.sha256(library).hexdigest() == LIBRARY_CHECKSUM


def test_every_metric_of_a_chart_is_documented():
    text = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    written = re.sub(r"<(file|phase|name|n|k)>", "*", " ".join(re.findall(r"`([^`\n]+)`", text)))
    known = {name.rstrip(",") for name in written.split()}
    charts = yaml.safe_load((ROOT / "megappo/observe/charts.yaml").read_text("utf-8"))
    patterns = [line for group in charts.values() for chart in group for line in chart["lines"].values()]
    assert len(patterns) > 20
    unknown = []
    for pattern in patterns:
        of_spread = re.sub(r"/(mean|max|min|std)$", "/*", pattern)
        other_model = pattern.replace("critic/", "actor/")
        if not any(fnmatch.fnmatch(other, name) for name in known for other in (pattern, of_spread, other_model)):
            unknown.append(pattern)
    assert unknown == []


def test_a_point_of_a_long_run_has_the_lowest_mean_and_highest_value_of_its_steps():
    steps = [{"step": step, "a": 1.0, **({"val": float(step)} if step % 100 == 1 else {})} for step in range(2500)]
    steps[5] |= {"a": 1001.0, "b": None}
    steps[6]["a"] = None
    shown = curves(steps)
    assert (shown["size"], len(shown["steps"])) == (4, 625)
    assert shown["steps"][1] == (4, 7) and shown["steps"][-1] == (2496, 2499)
    assert shown["metrics"]["a"][:2] == [[1.0, 1.0, 1.0, 4.0], [1.0, 334.3333, 1001.0, 3.0]]
    assert shown["metrics"]["val"][:2] == [1.0, None] and not any(shown["metrics"]["b"])
    assert shown["ends"] == {"a": [(0, 1.0), (2499, 1.0)], "val": [(1, 1.0), (2401, 2401.0)], "b": []}
    assert curves(steps[:1001])["size"] == 1 and curves(steps[:1])["ends"]["a"] == [(0, 1.0), (0, 1.0)]


@pytest.mark.parametrize(
    ("scores", "threshold", "passed"),
    [
        ([0.0, 1.0, -1.0], 1.0, [False, True, False]),
        ([0.0, 0.4, 1.0], 1.0, [None] * 3),
        ([1.0, 7.0, 10.0], 1.0, [None] * 3),
        ([0.0, 0.4, 0.9], 0.5, [False, False, True]),
    ],
)
def test_only_scores_that_are_right_or_wrong_get_ticks(tmp_path, scores, threshold, passed):
    run = write_run(tmp_path / "run", 4, rollout={"val_pass_threshold": threshold})
    write_kept(run, 4, [kept(4, 0, random.Random(0), score=one, passed=one >= threshold) for one in scores])
    samples = content_of(write_report(run))["runs"][0]["samples"]
    assert [one.get("passed") for one in samples if one["step"] == 4] == passed


def test_kept_rollouts_are_shown_with_the_numbers_of_their_tokens_the_worst_among_them(tmp_path):
    run = write_run(tmp_path / "run", 4)
    rows = [kept(4, row, random.Random(row), score=1.0) for row in range(100)]
    rows[90] |= {"score": -1.0, "ref_log_probs": None, "values": [0.123456, None, 1.0, 1.0, 1.0], "passed": False}
    write_kept(run, 4, rows)
    samples = [one for one in content_of(write_report(run))["runs"][0]["samples"] if one["step"] == 4]
    assert len(samples) == 24
    [worst] = [one for one in samples if one["score"] < 0]
    assert worst["prompt"] == "90+2=" and worst["parts"] == {"length": 5.0} and worst["passed"] is False
    assert worst["values"][:2] == [0.1235, None] and "ref_log_probs" not in worst and "tokens" not in worst


def test_a_page_has_room_for_the_last_and_the_first_step_before_others(tmp_path):
    run = write_run(tmp_path / "run", 4)
    for step in range(9):
        line = json.dumps({"step": step, "prompt": "p", "response": str(step) * 7_000}) + "\n"
        (run / "rollouts" / f"step_{step:08d}.jsonl").write_text(line * 60)
    path = write_report(run)
    shown = {one["step"] for one in content_of(path)["runs"][0]["samples"] if "texts" not in one}
    assert shown == {0, 4, 5, 6, 7, 8} and path.stat().st_size < 3_000_000


def test_1000_steps_of_8_ranks(tmp_path):
    run = write_run(tmp_path / "run", 1000, num_ranks=8)
    start = time.process_time()
    path = write_report(run)
    assert time.process_time() - start < 5
    assert path.stat().st_size < 6_000_000


def test_runs_that_differ_by_their_seed_alone_are_alike(tmp_path, capsys):
    runs = [write_run(tmp_path / f"seed{seed}" / "run", 4, seed=seed) for seed in range(3)]
    runs.append(write_run(tmp_path / "other" / "run", 4, seed=1, actor={"optim": {"lr": 0.5}}))
    output = tmp_path / "page.html"
    assert report_command.compare([*map(str, runs), "--output", str(output)]) == 0
    assert capsys.readouterr().out == f"wrote {output}\n"
    shown = content_of(output)["runs"]
    assert [run["name"] for run in shown] == ["seed0/run", "seed1/run", "seed2/run", "other/run"]
    first, second, third, other = [run["alike"] for run in shown]
    assert first == second == third != other
    assert ["actor.optim.lr", "0.5", "1e-06"] in shown[3]["differences"]
    assert ["trainer.seed", "2", "0"] in shown[2]["differences"]


def test_names_are_as_short_as_they_may_be():
    assert short_names([Path("/a/run"), Path("/b/run")]) == ["a/run", "b/run"]
    assert short_names([Path("/a/x"), Path("/a/y")]) == ["x", "y"]
    assert short_names([Path("/a/x"), Path("/a/x")]) == ["x", "x"]


def test_the_commands_refuse_what_is_no_run(tmp_path, capsys):
    run, empty = write_run(tmp_path / "run", 2), tmp_path / "empty" / "folder"
    empty.mkdir(parents=True)
    for main, arguments, error in [
        (report_command.report, [tmp_path], f"{tmp_path} has no metrics.jsonl: did you mean {run}?"),
        (report_command.report, [run / "timeline"], f"timeline has no metrics.jsonl: did you mean {run}?"),
        (report_command.report, [empty], f"{empty} has no metrics.jsonl: name the output folder"),
        (report_command.compare, [run], "expected two runs or more; for one: megappo report RUN"),
        (report_command.compare, [run, tmp_path / "x"], f"no folder {tmp_path / 'x'} "),
        (report_command.compare, [tmp_path / "x"], f"no folder {tmp_path / 'x'} "),
        (
            report_command.compare,
            [run, run, "--output", tmp_path / "y" / "z.html"],
            f"there is no folder {tmp_path / 'y'}: ",
        ),
    ]:
        with pytest.raises(SystemExit, match="2"):
            main([str(argument) for argument in arguments])
        assert error in capsys.readouterr().err
    (run / "metrics.jsonl").write_text("broken\n{}\n")
    with pytest.raises(ConfigError, match="metrics.jsonl, line 1 .*broken.* is not what a run writes: it is not valid"):
        report_command.report([str(run)])


def test_usage_errors_need_nothing_heavy():
    source = "import sys, megappo.commands.report_command; print({'torch', 'pyarrow', 'yaml'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_timeline_shows_the_last_steps(tmp_path):
    run = write_run(tmp_path / "run", 50, num_ranks=3)
    for rank in range(3):
        line = {"step": 51, "phases": [["rollout/sync", 1.0, 2.0], ["rollout", 1.7e9 + 102, 3.00004]]}
        with (run / "timeline" / f"rank_{rank:05d}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n" + '{"step": 52, "pha')
    timeline = content_of(write_report(run))["runs"][0]["timeline"]
    assert [int(step) for step in timeline] == list(range(12, 52))
    assert timeline["51"] == {str(rank): line["phases"] for rank in range(3)}
    assert [phase for phase, _, _ in timeline["12"]["0"]] == list(PHASES)


def test_a_large_run_shows_some_of_its_ranks(tmp_path):
    run = write_run(tmp_path / "run", 2, num_ranks=130)
    timeline = content_of(write_report(run))["runs"][0]["timeline"]
    assert list(timeline["1"]) == [str(rank) for rank in range(0, 130, 3)]

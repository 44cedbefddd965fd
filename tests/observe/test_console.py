"""The lines of a run: columns, numbers, the remaining time, and responses."""

import io
import re

from program import REPOSITORY
from rich.console import Console as Terminal

from megappo.config.loading import load_config
from megappo.lab.report.health import Health
from megappo.observe.console import COLUMNS, Console, RemainingTime, format_number
from megappo.observe.loggers import RunInfo
from megappo.observe.samples import LINE_CHARACTERS, format_samples
from megappo.runtime.status import STATUS, format_seconds

STEP = {
    "reward/score/mean": 0.25,
    "actor/entropy": 1.5,
    "actor/grad_norm": 123456789.0,
    "rollout/tokens_per_second": 1234.6,
    "timing_s/step": 2.0,
}


def printed(folder, steps, total_steps=100, **trainer):
    """Return the lines that a console prints for steps."""
    out = io.StringIO()
    console = Console(out)
    console.reads = Health({}).reads
    console.on_start(RunInfo(folder, total_steps, config={"trainer": trainer}))
    for step, metrics in steps.items():
        console.on_step(step, metrics)
    return out.getvalue().splitlines()


def test_lines_are_aligned_and_the_header_comes_back_every_64(tmp_path):
    steps = {step: STEP | ({"val/sums/score/mean": 0.5} if step % 10 == 0 else {}) for step in range(1, 82)}
    rows = printed(tmp_path, steps)
    assert len({len(row) for row in rows}) == 1
    assert [number for number, row in enumerate(rows) if "reward" in row] == [0, 65]
    cells = dict(zip(rows[0].split(), rows[10].split(), strict=True))
    assert cells["step"] == "10/100" and cells["val"] == "0.500" and cells["tok/s"] == "1235"
    assert cells["ppo_kl"] == "-" and cells["eta"] == "0:03:00"
    assert len(cells) == len(COLUMNS) + 2


def test_the_default_columns_are_those_that_the_console_knows():
    config = load_config(REPOSITORY / "configs" / "quickstart.yaml")
    assert list(config.trainer.console_fields) == list(COLUMNS)


def test_columns_are_chosen_by_title_or_by_metric(tmp_path):
    header, row = printed(tmp_path, {7: STEP}, console_fields=["entropy", "actor/grad_norm", "critic/lr"])
    assert header.split() == ["step", "entropy", "actor/grad_norm", "critic/lr", "eta"]
    assert row.split() == ["7/100", "1.500", "1.2e+08", "-", "0:03:06"]
    assert len(header) == len(row)


def test_wide_numbers_are_in_scientific_form():
    values = {"0.250": 0.25, "-1.2e+06": -1234567.0, "9999.000": 9999.0, "1.0e+04": 10000.0, "nan": float("nan")}
    assert {format_number(value, ".3f"): value for value in values.values()}.keys() == values.keys()


def test_scores_have_four_digits_at_most(tmp_path):
    scores = {1: 0.25, 2: 1234.5678, 3: 12.3456, 4: -98765.4, 5: 1e9}
    _, *rows = printed(tmp_path, {step: {"reward/score/mean": score} for step, score in scores.items()})
    assert [row.split()[1] for row in rows] == ["0.250", "1235", "12.35", "-9.9e+04", "1e+09"]


def test_the_remaining_time_does_not_jump_after_an_evaluation():
    """100 steps of 2 s, an evaluation of 30 s after every 10th and a save of 4 s before every 21st."""
    remaining = RemainingTime(100, {"evaluate": 10, "save": 20})
    estimates = {}
    for step in range(1, 101):
        evaluate = 30.0 if step % 10 == 0 else 0.0
        save = 4.0 if step % 20 == 1 and step > 1 else 0.0
        remaining.add({"timing_s/step": 2 + evaluate + save, "timing_s/evaluate": evaluate, "timing_s/save": save})
        estimates[step] = remaining.after(step)
    for step in range(21, 101):
        expected = 2 * (100 - step) + 30 * (10 - step // 10) + 4 * (5 - step // 20)
        assert estimates[step] == expected, step


def test_a_first_step_that_compiles_does_not_count_for_the_rest():
    remaining = RemainingTime(10, {})
    assert remaining.after(0) is None
    for seconds in (300.0, 1.0, 1.0):
        remaining.add({"timing_s/step": seconds})
    assert remaining.after(3) == 7.0


def test_times_are_written_as_hours_minutes_and_seconds():
    times = {0: "0:00:00", 59.2: "0:01:00", 3661: "1:01:01", 360000: "100:00:00"}
    assert {seconds: format_seconds(seconds) for seconds in times} == times


def test_samples_share_lines_where_they_fit_and_cannot_break_the_terminal():
    short = [{"prompt": f"{i}+1=", "response": "2\n\x1b[31m", "label": "3", "score": 0.0} for i in range(4)]
    first, second = format_samples(short).splitlines()
    assert first.startswith("  0+1= -> 2\\n\\x1b[31m (label 3, score 0)  1+1= -> 2")
    assert second.startswith("  3+1= -> ")
    long = {"prompt": "why? " * 100, "response": "x" * 500 + "so: 4", "score": 1.0}
    lines = format_samples([short[0], long]).splitlines()
    assert len(lines) == 4 and max(map(len, lines)) <= LINE_CHARACTERS
    assert lines[2].startswith("  -> xxx") and lines[2].endswith("xso: 4") and lines[3] == "  (score 1)"


def test_an_episode_has_a_line_for_each_turn():
    turns = [{"turn": 1, "text": "43*68"}, {"turn": 0, "text": "2924\n"}, {"turn": 2, "text": "=2924"}]
    episode = {"prompt": "43*68=", "response": "43*682924=2924", "score": 1 / 3, "turns": turns}
    assert format_samples([episode]).splitlines() == [
        "  43*68=",
        "  -> 43*68",
        "  <- 2924\\n",
        "  -> =2924",
        "  (score 0.3333)",
    ]


def test_a_branch_of_an_episode_is_indented():
    turns = [{"turn": 1, "text": "main"}, {"turn": 3, "text": "merged"}]
    turns.append({"turn": 0, "text": "given", "begins": "branch", "follows": 1, "depth": 1})
    turns.append({"turn": 2, "text": "helped", "begins": None, "follows": None, "depth": 1})
    assert format_samples([{"prompt": "go", "turns": turns}]).splitlines()[1:-1] == [
        "  -> main",
        "  -> merged",
        "    <- (branch after turn 1) given",
        "    -> helped",
    ]


def test_messages_cannot_command_the_terminal(tmp_path):
    out = io.StringIO()
    Console(out).text("WARNING: the logger \x1b[2Jx failed\nagain\r")
    assert out.getvalue() == "WARNING: the logger \\x1b[2Jx failed\nagain\\r\n"


def test_the_first_samples_of_an_evaluation_are_printed_once_and_again_if_they_change(tmp_path):
    out = io.StringIO()
    console = Console(out)
    console.on_start(RunInfo(tmp_path, 4))
    for step in (0, 2, 3):
        for dataset in "ab":
            response = str(min(step, 2))
            console.on_samples(step, [{"prompt": f"{dataset}{i}", "response": response} for i in range(4)])
    assert out.getvalue().splitlines() == ["  a0 -> 0  a1 -> 0", "  a0 -> 2  a1 -> 2"]


def test_a_terminal_shows_unhealthy_numbers_in_colour_and_a_log_does_not(tmp_path, monkeypatch):
    """The cells of the metrics that a rule reads which holds in the step."""
    steps = {7: STEP | {"health/no_reward_signal": 1.0, "health/entropy_collapse": 0.0}}
    plain = printed(tmp_path, steps)
    monkeypatch.setattr(STATUS, "_terminal", Terminal(force_terminal=True, color_system="standard"))
    header, row = printed(tmp_path, steps)
    assert header == plain[0] and re.sub(r"\x1b\[[\d;]*m", "", row) == plain[1]
    assert re.findall(r"\x1b\[1;31m *([^\x1b]*)\x1b\[0m", row) == ["0.250"]

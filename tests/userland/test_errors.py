"""Failures of some rows that leave the others alone, and the rows that an error names."""

import re
import time
from pathlib import Path

import pytest
from reward_pools import load, rows_of
from waiting import wait_until

from megappo.rollouts.responses import failure_report
from megappo.userland.rewards import RewardError, Scoring, load_reward
from megappo.userland.signatures import Row

HARMFUL = """
import os, time
def f(solution_str, ground_truth):
    if ground_truth == "raises": raise KeyError("no such answer")
    if ground_truth == "hangs": time.sleep(54321)
    if ground_truth == "dies": os._exit(3)
    if ground_truth == "nonsense": return "a text"
    time.sleep(0.005)
    return float(solution_str)
"""
HARMS = ("raises", "hangs", "dies", "nonsense")


def rows(*labels: object) -> list[Row]:
    """The response of each is its number."""
    return [Row(f"p{i}", str(i), label, {}, f"record {10 + i}") for i, label in enumerate(labels)]


def scored(scoring: Scoring, of_rows: list[Row]) -> list[list[float]]:
    scoring.add(of_rows)
    return [one.scores for one in scoring.results()]


def test_rows_that_fail_cost_nothing_but_their_time_limit(tmp_path: Path):
    """Each of four kinds twice among 200 rows: the others have their scores."""
    labels = [HARMS[i // 10 % 4] if i % 10 == 3 and i < 80 else "well" for i in range(200)]
    with load(tmp_path, HARMFUL, num_workers=2, timeout_seconds=1.5, on_error="zero") as pool:
        start, scoring = time.monotonic(), pool.begin()
        found = scored(scoring, rows(*labels))
        took = time.monotonic() - start
        assert found == [[float(i)] if label == "well" else [] for i, label in enumerate(labels)]
        assert (scoring.num_errors, scoring.num_timeouts) == (6, 2)
        assert "reward.py:f raised KeyError: 'no such answer'\n" in scoring.failure
        assert "it was scoring response '3' to prompt 'p3' (record 13)" in scoring.failure
        reported: set[str] = set()
        assert failure_report(scoring.failure, reported) == scoring.failure
        first, *_ = scoring.failure.splitlines()
        again = failure_report(f"{first} again\nplace", reported)
        assert again == f"{first} again (the first one is reported above in full)"
        assert "\nplace" in failure_report(first.replace("KeyError", "ValueError") + "\nplace", reported)
        assert took < 8 * 1.5, "only the two that hang last as long as their limit"
        again = pool.begin()
        assert scored(again, rows("well", "well")) == [[0.0], [1.0]] and not again.failure


LISTS = """
import os, time
def f(responses, labels):
    if "hangs" in labels: time.sleep(54321)
    if "dies" in labels: os._exit(3)
    if "raises" in labels: raise KeyError("no such answer")
    if "wrong" in labels: return [None if label == "wrong" else 1.0 for label in labels]
    if "nonsense" in labels: return [float("nan")] * len(labels)
    return [float(response) + 100 * (len(labels) == 1) for response in responses]
"""


TOGETHER = "def f(responses):\n    return [{1: 1.0}[len(responses)]]\n"


@pytest.mark.parametrize("harm", ["hangs", "dies", "nonsense"])
def test_of_rows_in_one_call_each_is_asked_about_alone(tmp_path: Path, harm: str):
    with load(tmp_path, LISTS, num_workers=2, timeout_seconds=1.0, on_error="zero") as pool:
        scoring = pool.begin()
        assert scored(scoring, rows(0, 0, 0, 0, harm, 0)) == [[0.0], [1.0], [2.0], [103.0], [], [105.0]]
        assert (scoring.num_errors, scoring.num_timeouts) == ((0, 1) if harm == "hangs" else (1, 0))
        assert "it was scoring response '4' to prompt 'p4' (record 14)" in scoring.failure


def test_a_function_of_lists_that_fails_for_all_rows_is_given_up(tmp_path: Path):
    """After one call and three rows, not after twenty more; one that fails at once is called with every row."""
    with load(tmp_path, LISTS, timeout_seconds=0.4, on_error="zero") as pool:
        start, scoring = time.monotonic(), pool.begin()
        assert scored(scoring, rows(*["hangs"] * 20)) == [[]] * 20 and scoring.num_timeouts == 20
        assert time.monotonic() - start < 8, "four time limits, and as many workers to start"
        scoring = pool.begin()
        assert scored(scoring, rows(*["nonsense"] * 9, "well")) == [[]] * 9 + [[109.0]]


@pytest.mark.parametrize(
    ("body", "harm", "named"),
    [
        (HARMFUL, "nonsense", "response '1' to prompt 'p1' (record 11)"),
        (HARMFUL, "raises", "response '1' to prompt 'p1' (record 11)"),
        (LISTS, "nonsense", "response '0' to prompt 'p0' (record 10)"),
        (LISTS, "raises", "response '1' to prompt 'p1' (record 11)"),
        (LISTS, "wrong", "response '1' to prompt 'p1' (record 11)"),
        (LISTS, "dies", "2 responses, of which the first is '0'"),
        (TOGETHER, "well", "2 responses, of which the first is '0'"),
    ],
)
def test_an_error_that_is_raised_names_the_row(tmp_path: Path, body: str, harm: str, named: str):
    """In a call of several rows it is the row that fails alone, if one does. No frame of the worker is shown."""
    pool = load(tmp_path, body)
    with pytest.raises(RewardError, match=rf"\nit was scoring {re.escape(named)}") as caught:
        scored(pool.begin(), rows("well", harm))
    assert "worker.py" not in str(caught.value)
    assert str(caught.value).splitlines()[-1].endswith("set reward.on_error=zero, which scores these responses 0")


def test_what_is_known_so_far_is_an_error_once_the_function_has_failed(tmp_path: Path):
    pool = load(tmp_path, HARMFUL)
    scoring = pool.begin()
    scoring.add(rows("nonsense", "well"))
    with pytest.raises(RewardError, match="returned "):
        while scoring.known(range(2)) is None:
            time.sleep(0.01)


def test_rows_may_be_added_after_the_function_has_failed_and_have_no_results(tmp_path: Path):
    pool = load(tmp_path, HARMFUL)
    failed, other = pool.begin(), pool.begin()
    with pytest.raises(RewardError, match="returned "):
        scored(failed, rows("nonsense"))
    other.add(rows("well"))
    with pytest.raises(RewardError, match="is closed"):
        other.results()


def test_a_long_text_is_cut(tmp_path: Path):
    pool = load(tmp_path, "def f(responses):\n    return 1\n")
    with pytest.raises(RewardError, match=rf"response '{'x' * 200}'\.\.\. \(5000 characters\) to prompt 'p' \(r\)"):
        scored(pool.begin(), [Row("p", "x" * 5000, None, {}, "r")])


def test_async_rows_that_hang_do_not_hold_the_others(tmp_path: Path):
    """The worker itself continues: nothing is restarted."""
    body = """
        import asyncio, os
        async def f(solution_str, ground_truth):
            if ground_truth == "raises": raise TimeoutError("its own")
            if ground_truth == "hangs": await asyncio.sleep(54321)
            return os.getpid()
    """
    with load(tmp_path, body, timeout_seconds=1.0, on_error="zero") as pool:
        start, scoring = time.monotonic(), pool.begin()
        found = scored(scoring, rows("hangs", *["well"] * 30, "raises", "hangs"))
        assert time.monotonic() - start < 4
        assert (scoring.num_errors, scoring.num_timeouts) == (1, 2)
        assert [len(one) for one in found] == [0, *[1] * 30, 0, 0]
        assert len({pid for one in found for pid in one}) == 1
        assert "took longer than 1 seconds" in scoring.failure


def test_an_async_function_that_blocks_its_process_is_stopped(tmp_path: Path):
    body = """
        import time
        async def f(solution_str, ground_truth):
            if ground_truth == "hangs": time.sleep(54321)
            return float(solution_str)
    """
    with load(tmp_path, body, timeout_seconds=0.5, on_error="zero") as pool:
        scoring = pool.begin()
        assert scored(scoring, rows("well", "hangs", "well")) == [[0.0], [], [2.0]]
        assert scoring.num_timeouts == 1


def wait_until_scored(scoring: Scoring) -> None:
    """Wait until the first function has scored all rows."""
    wait_until(lambda: all(first.outcome is not None for first, *_ in scoring._pending))


def test_rows_are_scored_as_they_come_and_functions_of_lists_get_them_all(tmp_path: Path):
    (tmp_path / "reward.py").write_text(
        "def f(solution_str, ground_truth):\n    return float(solution_str)\n"
        "def ranked(responses):\n    return [sorted(responses).index(one) for one in responses]\n"
    )
    specs = {f"{tmp_path}/reward.py:f": 1.0, f"{tmp_path}/reward.py:ranked": 10.0}
    with load_reward(specs, num_workers=1, timeout_seconds=20) as pool:
        first, second = pool.begin(), pool.begin()
        for scoring, responses in ((first, "31"), (second, "42"), (first, "20")):
            scoring.add([Row("p", response, None, {}) for response in responses])
            wait_until_scored(scoring)
        assert [one.scores for one in second.results()] == [[4.0, 10.0], [2.0, 0.0]]
        assert [one.scores for one in first.results()] == [[3.0, 30.0], [1.0, 10.0], [2.0, 20.0], [0.0, 0.0]]


def test_a_batch_size_has_functions_of_lists_called_as_rows_come(tmp_path: Path):
    with load(tmp_path, "def f(responses):\n    return [len(responses)] * len(responses)\n", batch_size=3) as pool:
        scoring = pool.begin()
        scoring.add(rows(*range(7)))
        wait_until_scored(scoring)
        assert [one.scores for one in scoring.results()] == [[3.0]] * 6 + [[1.0]]


OPTIONS = """
def f(responses, *, limit, words=(), **columns):
    assert "limit" not in columns
    return [limit + len(words) + len(columns)] * len(responses)
def by_row(solution_str, ground_truth, limit=0):
    return limit
"""


def test_options_are_given_to_their_function_alone(tmp_path: Path):
    (tmp_path / "reward.py").write_text(OPTIONS)
    specs = {f"{tmp_path}/reward.py:f": 1.0, f"{tmp_path}/reward.py:by_row": 1.0}
    options = {f"{tmp_path}/reward.py:f": {"limit": 5, "words": ["a", "b"]}}
    with load_reward(specs, num_workers=1, timeout_seconds=20, options=options) as pool:
        assert "limit" not in pool.takes.needed
        columns = [{"limit": 3, "level": 4}]
        assert [one.scores for one in pool.score(rows_of(["p"], ["r"], [0], columns))] == [[7.0 + 3, 0.0]]


@pytest.mark.parametrize("name", ["length", "solution_str"])
def test_an_option_that_it_does_not_take_is_refused(tmp_path: Path, name: str):
    (tmp_path / "reward.py").write_text(OPTIONS)
    spec = f"{tmp_path}/reward.py:by_row"
    with pytest.raises(
        RewardError,
        match=f"takes no option '{name}' of reward.options; its parameters are solution_str, ground_truth, limit",
    ):
        load_reward(spec, num_workers=1, timeout_seconds=20, options={spec: {name: 1}})

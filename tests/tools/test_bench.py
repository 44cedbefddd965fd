"""The benchmarks that take seconds run at small sizes, print their rows and write them."""

import importlib.util
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import psutil
import pytest
from commands import run

BENCHMARKS = Path(__file__).parents[2] / "tools" / "bench"
SMALL = {
    "gae": ["--rows", "70", "--tokens", "64", "--repeats", "1"],
    "balance": ["--rows", "64", "--ranks", "4", "--max-tokens", "6000", "--repeats", "1"],
    "groups": ["--ranks", "1024", "--repeats", "1"],
    "exchange": ["--ranks", "2", "4", "--rows", "4", "--repeats", "1"],
    "rewards": ["--rows", "200", "--repeats", "1"],
    "agents": ["--sessions", "50"],
}
FAST = ("gae", "rewards", "agents")


@pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SMALL if name not in FAST)]
)
def test_a_benchmark_reports_its_rows(name: str, tmp_path: Path) -> None:
    arguments = [*SMALL[name], "--json", tmp_path / "rows.json"]
    result = run(BENCHMARKS / f"{name}.py", *arguments, torchrun=True, launched=name == "gae")
    assert result.returncode == 0, result.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows and all(row["ratio"] > 0 and f"| {row['name']} |" in result.stdout for row in rows)


def loaded(name: str) -> ModuleType:
    """Return a benchmark's module."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_learning_is_compared_in_a_table_and_a_plot() -> None:
    learning = loaded("learning")
    scores = {("clip", 0): [90.0, 94.0], ("clip", 4): [70.0, 70.0], ("dis", 0): [91.0, 91.0], ("dis", 4): [88.0, 90.0]}
    rows = learning.table(scores, ["clip", "dis"], [0, 4]).splitlines()
    assert rows[2:] == ["| 0 | 92.0 +- 2.0 | 91.0 +- 0.0 |", "| 4 | 70.0 +- 0.0 | 89.0 +- 1.0 |"]
    drawn = ElementTree.fromstring(learning.plot(scores, ["clip", "dis"], [0, 4]))
    names = [element.tag.rpartition("}")[2] for element in drawn]
    assert names.count("circle") == 8 and names.count("polyline") == 2
    assert learning.held_out({"val/sums/score/mean": 0.5, "val/sums/score/max": 1.0, "reward/score/mean": 0.1}) == [0.5]


def test_credit_is_compared_after_all_steps_and_after_equal_seconds() -> None:
    credit = loaded("credit")

    def run(seconds: float, *right: float) -> list[dict[str, float]]:
        return [{"episode/part/right": one, "timing_s/step": seconds} for one in right]

    slow, fast = run(2.0, *[0.0] * 5, *[3.0] * 5), run(1.0, *[1.5] * 10)
    rows = credit.table({"slow": [slow, slow], "fast": [fast, run(1.0, *[0.75] * 10)]}).splitlines()
    assert rows[0] == "| method | after all steps | after 10 s | seconds of a step |"
    assert rows[2:] == ["| slow | 100 +- 0 | 0 +- 0 | 2.0 |", "| fast | 38 +- 12 | 38 +- 12 | 1.0 |"]
    drawn = ElementTree.fromstring(credit.plot({"slow": [slow], "fast": [fast]}))
    lines = [one.attrib["points"].split() for one in drawn if one.tag.endswith("polyline")]
    assert [len(line) for line in lines] == [6, 6]
    heights = [float(point.partition(",")[2]) for point in lines[0]]
    assert heights == sorted(heights, reverse=True) and heights[0] > heights[-1]


START = f"""
import sys
sys.path[:0] = [{str(BENCHMARKS)!r}]
from child_run import run_child
run_child([sys.executable, "-c", "import time; print('started', flush=True); time.sleep(60)"])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_benchmark_that_is_ended_leaves_no_run(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", START], stdout=subprocess.PIPE) as benchmark:
        assert benchmark.stdout.readline() == b"started\n"
        [child] = psutil.Process(benchmark.pid).children()
        benchmark.send_signal(number)
        assert psutil.wait_procs([child], timeout=10)[1] == []


@pytest.mark.slow
def test_a_resume_reads_the_checkpoint_once_over_all_ranks(tmp_path: Path) -> None:
    arguments = ["--resume", "--megabytes", "128", "--repeats", "1"]
    result = run(BENCHMARKS / "checkpoint.py", *arguments, torchrun=True, ranks=2)
    assert result.returncode == 0, result.stderr
    size, read = (int(re.search(pattern, result.stdout)[1]) for pattern in (r"^(\d+) MiB", r"\nread (\d+) MiB: "))
    assert size > 100 and read == pytest.approx(size, rel=0.1)


@pytest.mark.parametrize("name", ["gae", pytest.param("update", marks=pytest.mark.slow)])
def test_a_benchmark_outside_torchrun_shows_how_to_start_it(name: str) -> None:
    result = run(BENCHMARKS / f"{name}.py", torchrun=True)
    assert result.returncode == 1 and "start it under megappo.torchrun" in result.stderr

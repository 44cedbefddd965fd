"""Reward functions in worker processes: scores, every way a user's function can fail, and that nothing stays behind."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from reward_pools import load, rows_of, score, scores, scores_of

from megappo.userland.rewards import RewardError, load_reward
from megappo.userland.spec import parse_spec

ROOT = Path(__file__).resolve().parents[2]


def test_built_in_runs_in_workers():
    with load_reward("exact_match", num_workers=2, timeout_seconds=20) as pool:
        assert scores_of(pool.score(rows_of(["a", "b", "c"], ["1 ", "2", "3"], ["1", 3, 3]))) == [[1.0], [0.0], [1.0]]


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 8])
def test_scores_keep_their_order_over_workers(tmp_path: Path, num_workers: int, count: int):
    body = """
        def f(prompts, responses, labels):
            assert [p[1:] for p in prompts] == [r[1:] for r in responses] == [str(n) for n in labels]
            return tuple(n / 2 for n in labels)
    """
    with load(tmp_path, body, num_workers) as pool:
        assert score(pool, count) == [n / 2 for n in range(count)]
        assert score(pool, count) == [n / 2 for n in range(count)]


@pytest.mark.parametrize("count", [0, 1, 2, 8])
def test_a_response_may_have_several_scores(tmp_path: Path, count: int):
    body = """
        def f(prompts, responses, labels):
            return [(n, [True, 0.5][n % 2], -1e30) for n in labels]
    """
    with load(tmp_path, body, num_workers=3) as pool:
        assert scores(pool, count) == [[n, [1.0, 0.5][n % 2], -1e30] for n in range(count)]


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_they_may_be_an_array_of_a_library(tmp_path: Path, library: str):
    with load(tmp_path, f"import {library}\ndef f(responses): return {library}.ones((3, 2))\n") as pool:
        assert scores(pool) == [[1.0, 1.0]] * 3


def test_many_responses_with_as_many_scores_as_may_be_arrive(tmp_path: Path):
    body = "def f(prompts, responses, labels):\n    return [[-2 / 3 * 1e-30] * 64] * len(labels)\n"
    with load(tmp_path, body) as pool:
        assert scores(pool, 3000) == [[-2 / 3 * 1e-30] * 64] * 3000


def test_workers_share_the_rows_and_work_at_the_same_time(tmp_path: Path):
    body = """
        import os, time
        from pathlib import Path
        def f(prompts, responses, labels):
            Path(__file__).with_name(f"{os.getpid()}.begun").touch()
            while len(list(Path(__file__).parent.glob("*.begun"))) < 3:
                time.sleep(0.01)
            return [os.getpid()] * len(prompts)
    """
    with load(tmp_path, body, num_workers=3) as pool:
        pids = score(pool, 7)
    assert sorted(pids.count(pid) for pid in set(pids)) == [2, 2, 3]


def test_the_file_may_import_its_neighbour_print_and_return_numpy_numbers(tmp_path: Path, capfd):
    (tmp_path / "neighbour.py").write_text("import numpy\ndef g(n):\n    return numpy.full(n, 0.5, numpy.float32)\n")
    body = """
        from neighbour import g
        def f(prompts, responses, labels):
            print("hello from f", flush=True)
            return g(len(prompts))
    """
    with load(tmp_path, body) as pool:
        assert score(pool) == [0.5, 0.5, 0.5]
    assert "hello from f" in capfd.readouterr().out


def test_workers_start_without_torch_or_megatron(tmp_path: Path):
    body = """
        import sys
        def f(prompts, responses, labels):
            heavy = {"torch", "megatron", "transformers", "numpy", "pydantic"} & set(sys.modules)
            assert not heavy, heavy
            return [0] * len(prompts)
    """
    with load(tmp_path, body) as pool:
        assert score(pool) == [0, 0, 0]


BROKEN = {
    "raises": ("    raise KeyError('no answer')", r"raised KeyError: 'no answer'\n(?s:.*)reward.py\", line 2, in f"),
    "exits": ("    raise SystemExit(3)", "raised SystemExit: 3"),
    "too few": ("    return [1.0, 2.0]", "returned 2 values for 3 responses"),
    "too many": ("    return [1.0] * 4", "returned 4 values for 3 responses"),
    "nothing": ("    pass", "returned None; expected a list of 3 numbers"),
    "one number": ("    return 1.0", "returned 1.0; expected a list of 3 numbers"),
    "a string": ("    return 'abc'", "returned 'abc'; expected a list"),
    "a dict": ("    return dict.fromkeys('abc', 1)", "returned {'a': 1, .*; expected a list"),
    "strings": (
        "    return ['1', '2', '3']",
        r"returned '1' \(value 0\): expected a finite number that fits into a float32 as score",
    ),
    "None inside": ("    return [1, None, 1]", r"returned None \(value 1\): expected a finite number"),
    "NaN": ("    return [0, float('nan'), 0]", r"returned nan \(value 1\): expected a finite number"),
    "a set": ("    return {1, 2, 3}", "returned something that is no JSON: {1, 2, 3} is set"),
    "a generator": (
        "    return (0 for _ in responses)",
        "returned something that is no JSON: <generator .* is generator",
    ),
    "a wrong length": (
        "    class Scores(list):\n        __len__ = lambda self: 3\n    return Scores([1.0])",
        "returned 1 values for 3 responses",
    ),
    "too large": ("    return [0, 1e39, 0]", r"returned 1e\+39 \(value 1\): expected a finite number that fits into a"),
    "an integer beyond all floats": (
        "    return [0, 10**400, 0]",
        r"\(value 1\): expected a finite number that fits into a",
    ),
    "another number of scores": (
        "    return [[1, 2], [1, 2], [1, 2, 3]]",
        r"returned \[1, 2, 3\] \(value 2\): expected 2 scores, as many as for the first response",
    ),
    "a number among lists": (
        "    return [[1, 2], 3, [1, 2]]",
        r"returned 3 \(value 1\): expected 2 scores, as many as for the first response",
    ),
    "no scores": ("    return [[]] * 3", r"returned \[\] \(value 0\): expected 1 to 64 scores, found 0"),
    "too many scores": ("    return [[0] * 65] * 3", r"\(value 0\): expected 1 to 64 scores, found 65"),
    "a nested list": (
        "    return [[1, [2]]] * 3",
        r"returned \[1, \[2\]\] \(value 0\): expected a finite number .* as score, found \[2\]",
    ),
    "NaN among scores": (
        "    return [[0, 1], [0, float('nan')], [0, 1]]",
        r"returned \[0, nan\] \(value 1\): expected a finite number .*, found nan",
    ),
    "a sum too large": (
        "    return [[3e38, 3e38]] * 3",
        r"\(value 0\): expected a finite number that fits into a float32 as the sum of its scores, found 6e\+38",
    ),
    "infinity": ("    return [0, 0, float('inf')]", r"returned inf \(value 2\): expected a finite number"),
    "dies": ("    import os; os._exit(5)", r"ended its process \(exit code 5\)"),
    "is killed": ("    import os; os.kill(os.getpid(), 9)", r"ended its process \(killed by SIGKILL\)"),
}


@pytest.mark.parametrize(("body", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_function_gives_one_error_that_names_it_and_the_remedy(tmp_path: Path, body: str, message: str):
    pool = load(tmp_path, f"def f(prompts, responses, labels):\n{body}\n")
    with pytest.raises(RewardError, match=message) as caught:
        score(pool)
    assert str(caught.value).startswith(f"reward function {tmp_path}/reward.py:f ")
    assert str(caught.value).splitlines()[-1].startswith("fix it, ")
    with pytest.raises(RewardError, match="is closed"):
        score(pool)


HANGS = {
    "sleeps": "import time\n    time.sleep(54321)",
    "holds the interpreter": "import re\n    re.match(r'(a+)+$', 'a' * 60 + 'b')",
    "waits for its own process": "import os\n    os.system('sleep 54321')",
    "ignores signals": "import signal\n    signal.signal(15, signal.SIG_IGN)\n    while True: pass",
}


@pytest.mark.parametrize("hang", HANGS.values(), ids=HANGS)
def test_a_hanging_function_is_stopped_with_all_it_started(tmp_path: Path, hang: str):
    body = f"def f(prompts, responses, labels):\n    if 1 not in labels: return [0] * len(labels)\n    {hang}\n"
    pool = load(tmp_path, body, num_workers=3, timeout_seconds=1.0)  # one of three workers hangs
    start = time.monotonic()
    with pytest.raises(RewardError, match="took longer than 1 seconds and was stopped") as late:
        score(pool)
    assert time.monotonic() - start < 5
    assert str(late.value).splitlines()[-1].startswith("fix it, change its limits (reward.timeout_seconds=1, ")


LOAD_ERRORS = {
    "no such function": ("def g(): pass", "does not exist: the file defines g\n"),
    "imported functions": ("from json import loads\nfrom enum import Enum\ndef g(): pass", "the file defines g\n"),
    "nothing defined": ("x = 1", "does not exist: the file defines no function"),
    "not callable": ("f = 1", "does not exist: the file defines no function"),
    "does not parse": ("def f(:", r"(?s)raised SyntaxError(?!.*importlib)"),
    "import fails": ("import nonexistent_module", "raised ModuleNotFoundError: No module named 'nonexistent_module'"),
    "exits on import": ("import os; os._exit(7)", r"ended its process \(exit code 7\)"),
}


@pytest.mark.parametrize(("body", "message"), LOAD_ERRORS.values(), ids=LOAD_ERRORS)
def test_a_file_that_cannot_be_loaded_is_an_error_at_once(tmp_path: Path, body: str, message: str):
    with pytest.raises(RewardError, match=message):
        load(tmp_path, body)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("exact", "expected exact_match, regex_match, .*, FILE.py:FUNCTION or package.module:FUNCTION"),
        ("reward.py", "name the function in the file, too: reward.py:FUNCTION"),
        ("folder/reward.txt:f", "expected exact_match, "),
        (":f", "expected exact_match, "),
        ("reward.py:not a name", "expected exact_match, "),
        ("nowhere.py:f", "no file nowhere.py"),
        ("megappo.userland.graders.code:code", "megappo has no module .*; expected exact_match, .* code, "),
    ],
)
def test_a_malformed_name_is_refused_without_starting_anything(spec: str, message: str):
    with pytest.raises(ValueError, match=message):
        parse_spec(spec)


def test_a_module_is_imported_with_its_package_by_the_workers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "my_rewards"
    (package / "maths").mkdir(parents=True)
    (package / "__init__.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write('.')\n")
    (package / "maths" / "numbers.py").write_text(
        "from ..scale import SCALE\ndef f(prompts, responses, labels):\n    return [SCALE * n for n in labels]\n"
    )
    (package / "scale.py").write_text("SCALE = 3\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = "my_rewards.maths.numbers:f"
    assert parse_spec(spec).file == str(package / "maths" / "numbers.py")
    assert not (tmp_path / "imported").exists()
    with load_reward(spec, num_workers=2, timeout_seconds=20) as pool:
        assert score(pool) == [0.0, 3.0, 6.0]
    assert (tmp_path / "imported").read_text() == ".."
    with pytest.raises(RewardError, match=r"my_rewards.scale:f does not exist: the file defines no function"):
        load_reward("my_rewards.scale:f", num_workers=1, timeout_seconds=20)
    with pytest.raises(RewardError, match="raised ModuleNotFoundError: No module named 'my_rewards.nowhere'"):
        load_reward("my_rewards.nowhere:f", num_workers=1, timeout_seconds=20)


def test_close_ends_the_workers_and_what_they_started_and_may_be_repeated(tmp_path: Path):
    body = """
        import subprocess
        def f(prompts, responses, labels):
            return [subprocess.Popen(["sleep", "54321"]).pid] * len(prompts)
    """
    before = psutil.Process().children(recursive=True)
    pool = load(tmp_path, body, num_workers=2)
    started = {int(pid) for pid in score(pool)}
    children = [child for child in psutil.Process().children(recursive=True) if child not in before]
    assert started <= {child.pid for child in children}
    pool.close()
    pool.close()
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive


PARENT = """
import sys
from megappo.userland.rewards import load_reward
from megappo.userland.signatures import Row
pool = load_reward(sys.argv[1], num_workers=2, timeout_seconds=1000)
print("ready", flush=True)
pool.score([Row("", "", 0, {})] * 2)
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
def test_workers_die_with_their_parent_even_while_they_hold_the_interpreter(tmp_path: Path, ending: signal.Signals):
    file = tmp_path / "reward.py"
    file.write_text(f"def f(prompts, responses, labels):\n    {HANGS['holds the interpreter']}\n")
    command = [sys.executable, "-c", PARENT, f"{file}:f"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=os.environ) as parent:
        assert parent.stdout.readline() == b"ready\n"
        time.sleep(0.5)
        processes = psutil.Process(parent.pid).children(recursive=True)
        try:
            parent.send_signal(ending)
            parent.wait(60)
            _, alive = psutil.wait_procs(processes, timeout=30)
        finally:
            for process in (parent, *processes):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
    assert len(processes) == 4, "two workers, each with its keeper"
    assert not alive

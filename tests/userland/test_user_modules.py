"""Users' files as modules: under their own names, their helpers preferred to installed packages, separate from other
folders' helpers, and importable in processes that they spawn."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from reward_pools import rows_of
from reward_pools import scores_of as firsts
from slow import slow_ones

from megappo.userland.rewards import load_reward


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    return folder


def score(*specs: str, count: int = 2) -> list[list[float]]:
    with load_reward(dict.fromkeys(specs, 1), num_workers=1, timeout_seconds=60) as pool:
        rows = ["p"] * count, ["r"] * count, ["1"] * count
        pool.score(rows_of(*rows))  # functions take turns: what one has left must not reach another
        return firsts(pool.score(rows_of(*rows)))


EAGER = "from helper import weight\ndef f(responses):\n    return [weight] * len(responses)\n"
LAZY = "def f(responses):\n    from helper import weight\n    return [weight] * len(responses)\n"
PACKAGE = "def f(responses):\n    import helpers.inner as one\n    return [one.weight] * len(responses)\n"


@pytest.mark.parametrize("text", [EAGER, LAZY])
def test_helpers_of_one_name_stay_apart(tmp_path: Path, text: str):
    specs = [f"{write(tmp_path / name, same=text, helper=f'weight = {i}.0')}/same.py:f" for i, name in enumerate("abc")]
    assert score(*specs) == [[0.0, 1.0, 2.0]] * 2
    assert score(*reversed(specs)) == [[2.0, 1.0, 0.0]] * 2


def test_so_do_packages_and_folders_without_an_init(tmp_path: Path):
    for i, name in enumerate("ab"):
        write(tmp_path / name, mine=PACKAGE)
        write(tmp_path / name / "helpers", inner=f"weight = {i}.0")
    (tmp_path / "a" / "helpers" / "__init__.py").touch()
    assert score(*(f"{tmp_path}/{name}/mine.py:f" for name in "ab")) == [[0.0, 1.0]] * 2


def test_two_files_of_a_folder_share_its_modules(tmp_path: Path):
    text = "from helper import calls\ndef f(responses):\n    calls.append(1)\n    return [len(calls)] * 2\n"
    write(tmp_path, one=text, two=text, helper="calls = []")
    assert score(f"{tmp_path}/one.py:f", f"{tmp_path}/two.py:f") == [[3.0, 4.0]] * 2


def test_helpers_come_before_what_is_installed_but_not_before_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    installed = write(tmp_path / "installed", helper="weight = 9.0", reward="raise OSError('installed')")
    monkeypatch.setenv("PYTHONPATH", str(installed))
    text = "import statistics, token\nfrom helper import weight\n"
    text += "def f(responses):\n    import random, copy\n    return [copy.copy(weight)] * len(responses)\n"
    hostile = dict.fromkeys(("statistics", "token", "copy", "random", "types"), "raise OSError('hidden')")
    folder = write(tmp_path / "own", reward=text, helper="weight = 1.0", **hostile)
    assert score(f"{folder}/reward.py:f") == [[1.0]] * 2


NAMES = ("reward spawn", "math forkserver", "statistics spawn", "v1.2 spawn")
MORE = ("math spawn", "copy spawn", "token spawn", "json spawn", "my-reward spawn", "__main__ spawn")


@pytest.mark.parametrize("case", slow_ones((*NAMES, *MORE), MORE))
def test_a_file_of_any_name_may_use_processes_that_do_not_fork(tmp_path: Path, case: str):
    name, how = case.split()
    text = f"""
        import math, multiprocessing
        from concurrent.futures import ProcessPoolExecutor
        from helper import Number
        def one(number):
            import statistics, copy
            return Number(math.sqrt(number.value))
        def f(responses):
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("{how}")) as pool:
                return [one.value for one in pool.map(one, [Number(4.0)] * len(responses))]
    """
    helper = "class Number:\n    def __init__(self, value):\n        self.value = value\n"
    folder = write(tmp_path, helper=helper)
    (folder / f"{name}.py").write_text(textwrap.dedent(text))
    with load_reward(f"{folder}/{name}.py:f", num_workers=1, timeout_seconds=60) as pool:
        assert firsts(pool.score(rows_of(["p"], ["r"], ["1"]))) == [[2.0]]


def test_modules_have_their_own_names(tmp_path: Path):
    text = "import reward, logging\ndef f(responses):\n    assert reward.f is f and f.__module__ == 'reward'\n"
    folder = write(tmp_path, reward=text + "    return [1.0] * len(responses)\n")
    assert score(f"{folder}/reward.py:f") == [[1.0]] * 2


def test_a_package_of_the_working_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path / "mine", own=EAGER, __init__="")
    write(tmp_path, helper="weight = 3.0")
    monkeypatch.chdir(tmp_path)
    assert score("mine.own:f") == [[3.0]] * 2


EXTENSIONS = """
import multiprocessing, sys
from megappo.config.loading import run_extensions
if __name__ == "__main__":
    assert run_extensions({"trainer": {"extensions": sys.argv[1:]}}) == []
    from megappo.config.methods import LENGTH_PENALTIES
    import first, second
    print(first.weight, second.weight, first.lazy(), second.yaml.__file__ == sys.modules["yaml"].__file__)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(first.lazy))
"""


def test_extensions_too_and_they_hide_nothing(tmp_path: Path):
    """Their modules stay importable, also inside functions and in processes that are spawned."""
    text = "import yaml\nfrom helper import weight\ndef lazy():\n    import only\n    return only.name\n"
    write(tmp_path / "a", first=text, helper="weight = 1", only="name = 'only of a'")
    write(tmp_path / "b", second=text, helper="weight = 2", yaml="assert __name__ == 'yaml:py'")
    script = tmp_path / "script.py"
    script.write_text(EXTENSIONS)
    files = [tmp_path / "a" / "first.py", tmp_path / "b" / "second.py", tmp_path / "b" / "yaml.py"]
    done = subprocess.run([sys.executable, script, *files], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["1 2 only of a True", "only of a"], done.stderr

"""Environment variables have the same effect on every process, and files in the working folder shadow no module."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from planning import errors_of, start_plan, write_run
from slow import slow_ones

from megappo.engines.launch import inherited_environment
from megappo.runtime.interruption import deadline
from megappo.runtime.machine import for_python, proxy_for, visible_devices
from megappo.userland.rewards import load_reward
from megappo.userland.signatures import Row
from megappo.userland.worker_process import worker_variables

ROOT = Path(__file__).parents[2]
HIDING = ("math", "token", "copy", "statistics", "random", "json", "httpx", "yaml", "pydantic")
NEAR = ("127.0.0.1", "localhost", "127.9.9.9", "[::1]", "10.1.2.3", "node7", "172.20.0.1", "127.1", "100.64.0.1")
DEVICES = {
    None: None,
    "": [],
    "-1": [],
    "NoDevFiles": [],
    "all": [],
    "0": ["0"],
    "3, 5 ,7": ["3", "5", "7"],
    "0,-1,1": ["0"],
    "0,,1": ["0"],
    "1,": ["1"],
    "GPU-8932f937-d72c,GPU-0a": ["GPU-8932f937-d72c", "GPU-0a"],
    "MIG-a1,MIG-b2": ["MIG-a1"],
    "MIG-GPU-8932f937/1/0": ["MIG-GPU-8932f937/1/0"],
}


@pytest.mark.parametrize(("named", "devices"), DEVICES.items())
def test_visible_devices_are_those_that_cuda_sees(named, devices):
    assert visible_devices({} if named is None else {"CUDA_VISIBLE_DEVICES": named}) == devices


def test_the_launch_scripts_count_the_same():
    script = (ROOT / "launch" / "gpus.sh").read_text()
    count = script[script.index("num_gpus() {") : script.index("\n}\n") + 3] + "num_gpus"
    for named, devices in DEVICES.items():
        if named is not None:
            done = subprocess.run(
                ["bash", "-c", count], env=os.environ | {"CUDA_VISIBLE_DEVICES": named}, capture_output=True, text=True
            )
            assert (done.stdout, done.stderr) == (f"{len(devices)}\n", ""), named


@pytest.fixture
def no_proxies(monkeypatch):
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    proxy_for.cache_clear()
    yield
    proxy_for.cache_clear()


@pytest.mark.parametrize(
    ("url", "variables", "proxy"),
    [
        ("http://judge.example.invalid/v1", {"http_proxy": "http://p:1"}, "http://p:1"),
        ("http://8.8.8.8:80/v1", {"HTTP_PROXY": "p:1"}, "http://p:1"),
        ("https://8.8.8.8/v1", {"http_proxy": "http://p:1"}, None),
        ("https://8.8.8.8/v1", {"all_proxy": "socks5://p:1"}, "socks5://p:1"),
        ("http://8.8.8.8/v1", {"http_proxy": "http://p:1", "no_proxy": "8.8.8.8"}, None),
        ("http://a.example.invalid:81/v1", {"http_proxy": "http://p:1", "NO_PROXY": ".example.invalid"}, None),
        *((f"http://{host}:81/v1", {"http_proxy": "http://p:1", "all_proxy": "socks5://p:1"}, None) for host in NEAR),
        ("http://172.40.0.1/v1", {"http_proxy": "http://p:1"}, "http://p:1"),
    ],
)
def test_no_proxy_leads_to_this_machine_or_its_cluster(no_proxies, monkeypatch, url, variables, proxy):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert proxy_for(url) == proxy


@pytest.mark.parametrize(
    "variables_of", [lambda: worker_variables(os.environ, ()), lambda: inherited_environment(Path("/t"))]
)
@pytest.mark.parametrize(("given", "direct"), [("", []), ("a.example,10.0.0.0/8", ["a.example", "10.0.0.0/8"])])
def test_workers_and_engines_reach_loopback_without_a_proxy(no_proxies, monkeypatch, variables_of, given, direct):
    """HTTP clients inside workers and engines read these variables: SGLang sends itself a request when it starts."""
    monkeypatch.setenv("http_proxy", "http://p:1")
    monkeypatch.setenv("NO_PROXY", given)
    found = variables_of()
    assert found["no_proxy"] == found["NO_PROXY"]
    assert found["no_proxy"].split(",") == [*direct, "localhost", "127.0.0.1", "::1"]


def test_no_proxy_at_all_stays():
    assert for_python({"no_proxy": "*"})["no_proxy"] == "*"


def test_an_empty_part_of_the_path_is_not_the_working_folder():
    assert for_python({"PYTHONPATH": ":/a::/b:"})["PYTHONPATH"] == f"{ROOT}:/a:/b"


@pytest.mark.parametrize("name", ["SLURM_JOB_END_TIME", "SLURM_JOB_START_TIME"])
def test_a_time_that_is_none_is_named(monkeypatch, name):
    monkeypatch.setenv(name, "Unknown")
    with pytest.raises(ValueError, match=f"the variable {name} is 'Unknown', expected seconds since 1970: unset it"):
        deadline(10.0 if "START" in name else None, 1.0)
    monkeypatch.setenv(name, "")
    deadline(10.0 if "START" in name else None, 1.0)


def hide(folder: Path) -> Path:
    for name in HIDING:
        (folder / f"{name}.py").write_text(f"raise OSError('{name}.py of the working folder')\n")
    return folder


def test_the_working_folder_hides_nothing_of_a_command(tmp_path):
    """The dry run, its worker of the reward function, the trial of a program, and a process that the function spawns,
    in a folder with files that are called as modules are; the reward function's own is one of them."""
    write_run(hide(tmp_path))
    text = "def grade(responses):\n    import random, json, copy\n    return [len(one) / 9 for one in responses]\n"
    (tmp_path / "math.py").write_text(text)
    done = start_plan(tmp_path, "run.yaml", "reward.function=math.py:grade")
    assert errors_of(done) == [] and "math.py:grade: the response" in done.stdout


def test_nor_of_the_trial_of_a_program(tmp_path, monkeypatch):
    monkeypatch.chdir(hide(tmp_path))
    (tmp_path / "token.py").write_text("raise OSError\n")
    with load_reward("code", num_workers=1, timeout_seconds=60, options={"code": {"unprotected": True}}) as pool:
        response = "```python\nimport statistics, random\nprint(1)\n```"
        [one] = pool.score([Row("p", response, '{"inputs": [""], "outputs": ["1"]}', {})])
    assert one.scores == [1.0]


def test_scripts_of_people_find_their_neighbours(tmp_path, monkeypatch):
    """A worker's own children are started as Python starts anything."""
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    (tmp_path / "script.py").write_text("import beside; print(beside.value)\n")
    (tmp_path / "beside.py").write_text("value = 0.25\n")
    (tmp_path / "reward.py").write_text(
        "import subprocess, sys\ndef f(responses):\n"
        f"    done = subprocess.run([sys.executable, '{tmp_path}/script.py'], capture_output=True, text=True)\n"
        "    return [float(done.stdout)] * len(responses)\n"
    )
    with load_reward(f"{tmp_path}/reward.py:f", num_workers=1, timeout_seconds=60) as pool:
        assert [one.scores for one in pool.score([Row("p", "r", "1", {})])] == [[0.25]]


ENTRIES = (" serve", " doctor limits", " plan --keys", ".train no.yaml", ".torchrun --help", "-P  serve")
"""Each follows `python -m megappo` in a command line."""


@pytest.mark.parametrize("command", slow_ones(ENTRIES, ENTRIES[1:]))
def test_commands_start_in_any_folder(tmp_path, command):
    hide(tmp_path)
    words = f"megappo{command.removeprefix('-P ')}".split()
    options = ["-P"] if command.startswith("-P") else []
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, *options, "-m", *words],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "Traceback" not in done.stderr and "of the working folder" not in done.stderr, done.stderr


def test_a_program_of_others_keeps_its_folder(tmp_path):
    """It imports this package, and is no command of it."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").write_text("import megappo\n")
    (tmp_path / "theirs" / "run.py").write_text(
        "import os, beside; print(beside.value, os.environ.get('PYTHONSAFEPATH'))\n"
    )
    (tmp_path / "beside.py").write_text("value = 1\n")
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "theirs.run"], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "1 None\n", done.stderr


@pytest.mark.parametrize(
    ("command", "variables", "message"),
    [
        (
            "torchrun --standalone --nproc-per-node 1 -m megappo.train no.yaml",
            {"PET_NNODES": "2"},
            ["error: --standalone and --max-restarts are for one node, and --nnodes is 2: unset PET_NNODES"],
        ),
        (
            "train no.yaml",
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "head", "MASTER_PORT": "23456"},
            ["which sets LOCAL_RANK, LOCAL_WORLD_SIZE: start it with megappo train CONFIG"],
        ),
        pytest.param(
            "train no.yaml", {"SLURM_PROCID": "0"}, ["under SLURM with launch/slurm.sbatch"], marks=pytest.mark.slow
        ),
    ],
)
def test_the_variables_of_another_launcher_are_named(tmp_path, command, variables, message):
    name, *words = command.split()
    given = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"} | variables
    done = subprocess.run(
        [sys.executable, "-m", f"megappo.{name}", *words],
        cwd=tmp_path,
        env=given,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert all(part in done.stderr for part in message), done.stderr

"""Processes that are stopped (SIGSTOP): noticed within their limit, and all gone soon after the end of their owner."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from megappo.runtime import launcher
from megappo.runtime.keeper import ask_to_end
from megappo.userland.environments import EnvironmentPool
from megappo.userland.episode_pool import EpisodeLost
from megappo.userland.rewards import RewardError, load_reward
from megappo.userland.signatures import Row

ROOT = Path(__file__).resolve().parents[2]
USER_CODE = """
import os, subprocess, time

def start():
    subprocess.Popen(["sleep", "54321"], start_new_session=True)

def f(prompts, responses, labels):
    start()
    while not os.path.exists(labels[0]):
        time.sleep(0.01)
    return [0.0] * len(labels)

class Env:
    columns = ()
    def reset(self, row):
        start()
    def step(self, message):
        time.sleep(0.3)
        return None, 0.0, True
"""
GONE_SECONDS = 10.0


@pytest.fixture
def user_code(tmp_path: Path) -> Path:
    file = tmp_path / "user_code.py"
    file.write_text(USER_CODE)
    return file


def descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@contextmanager
def all_gone() -> Iterator[None]:
    """Check that all processes started inside end soon after it."""
    before = descendants()
    started: list[psutil.Process] = []
    try:
        yield
        started += [process for process in descendants() if process not in before]
    finally:
        _, alive = psutil.wait_procs([one for one in descendants() if one not in before], GONE_SECONDS)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
    assert not alive


def stop(pool_processes: list[psutil.Process], kind: str) -> None:
    """Stop a keeper, or its worker."""
    [keeper] = [process for process in pool_processes if "megappo.runtime.keeper" in process.cmdline()]
    [worker] = [process for process in keeper.children() if "megappo.runtime.keeper" not in process.cmdline()]
    (keeper if kind == "keeper" else worker).suspend()


@pytest.mark.parametrize("kind", ["worker", "keeper"])
@pytest.mark.parametrize("moment", ["idle", "at work"])
def test_a_reward_function(user_code: Path, kind: str, moment: str):
    with all_gone():
        before = descendants()
        with load_reward(f"{user_code}:f", num_workers=1, timeout_seconds=1.5) as pool:
            done, go = Row("p", "r", str(user_code), {}), user_code.with_name("go")
            pool.score([done])
            started = [process for process in descendants() if process not in before]
            assert len(started) == 3, "a keeper, a worker, and what it has started"
            scoring = pool.begin()
            if moment == "at work":
                scoring.add([Row("p", "r", str(go), {})])
                scoring.end()
                time.sleep(0.2)
            stop(started, kind)
            go.touch()
            begun = time.monotonic()
            if kind == "worker":
                with pytest.raises(RewardError, match="took longer than 1.5 seconds"):
                    scoring.results() if moment == "at work" else pool.score([done])
            else:
                assert pool.score([done])[0].scores == [0.0], "its worker works on"
            assert time.monotonic() - begun < 5
        assert time.monotonic() - begun < 10


@pytest.mark.parametrize("kind", ["worker", "keeper"])
def test_an_environment(user_code: Path, kind: str):
    async def episode(pool: EnvironmentPool, started: list[psutil.Process]) -> None:
        async with pool.session() as environment:
            await environment.reset({})
            stop(started, kind)
            await environment.step({"content": "x", "token_ids": [1]})

    with all_gone():
        before = descendants()
        with EnvironmentPool("Env", [str(user_code), "Env"], num_workers=1, timeout_seconds=0.5) as pool:
            started = [process for process in descendants() if process not in before]
            begun = time.monotonic()
            if kind == "worker":
                with pytest.raises(EpisodeLost, match="took longer than 0.5 seconds and was stopped"):
                    asyncio.run(episode(pool, started))
            else:
                asyncio.run(episode(pool, started))
            assert time.monotonic() - begun < 10


def test_a_rank(monkeypatch, capfd):
    """The launcher reports it once each time that it is stopped: a run of one rank has nobody else to notice it."""
    with subprocess.Popen(["sleep", "54321"]) as rank, subprocess.Popen(["true"]) as ended:
        agent = object.__new__(launcher.Agent)
        agent._paused = set()
        monkeypatch.setattr(agent, "_processes", lambda: {0: rank, 1: ended})
        monkeypatch.setattr(agent, "_named", lambda local: f"rank {local}")
        ended.wait()

        def watch() -> int:
            for _ in range(10):
                agent._warn_of_stopped()
                time.sleep(0.05)
            return capfd.readouterr().err.count("rank 0 is stopped (SIGSTOP), and the run waits for it: ")

        try:
            assert watch() == 0
            for _ in range(2):
                rank.send_signal(signal.SIGSTOP)
                assert (watch(), watch()) == (1, 0)
                rank.send_signal(signal.SIGCONT)
                assert watch() == 0
        finally:
            rank.kill()


OWNER = """
import subprocess, sys, os, time
command = [sys.executable, "-m", "megappo.runtime.keeper", str(os.getpid()), sys.executable, "-c", sys.argv[1]]
process = subprocess.Popen(command, start_new_session=True)
sys.stdin.read()
"""
COMMAND = """
import subprocess, time
for _ in range(2):
    subprocess.Popen(["sleep", "54321"], start_new_session=True)
print("there", flush=True)
time.sleep(54321)
"""


@pytest.mark.parametrize("stopped", ["the keeper", "the command", "all", "the owner"])
@pytest.mark.parametrize(
    "ending", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), None], ids=str
)
def test_a_keeper_whose_owner_ends(stopped: str, ending: signal.Signals | None):
    command = [sys.executable, "-c", OWNER, COMMAND]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with all_gone(), subprocess.Popen(command, cwd=ROOT, **pipes) as owner:
        assert owner.stdout.readline() == b"there\n"
        started = psutil.Process(owner.pid).children(recursive=True)
        assert len(started) == 4
        keeper, *others = started
        kept = {"the keeper": [keeper], "the command": others, "all": started, "the owner": []}[stopped]
        for process in kept:
            process.suspend()
        if stopped == "the owner":
            psutil.Process(owner.pid).suspend()
        if ending is None:
            owner.stdin.close()
            psutil.Process(owner.pid).resume()
        else:
            owner.send_signal(ending)
            owner.send_signal(signal.SIGCONT)
        owner.wait(10)
        _, alive = psutil.wait_procs(started, GONE_SECONDS)
        for process in alive:
            process.kill()
        assert not alive


def test_a_keeper_that_somebody_stops_and_lets_go_on_keeps_on():
    command = [sys.executable, "-m", "megappo.runtime.keeper", str(os.getpid()), sys.executable, "-c", COMMAND]
    with all_gone(), subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as keeper:
        assert keeper.stdout.readline() == b"there\n"
        for _ in range(3):
            subprocess.run(["sh", "-c", f"kill -STOP {keeper.pid}; sleep 0.1; kill -CONT {keeper.pid}"], check=True)
        time.sleep(0.3)
        assert keeper.poll() is None and len(psutil.Process(keeper.pid).children()) == 1
        psutil.Process(keeper.pid).suspend()
        ask_to_end(keeper)
        assert keeper.wait(10) == 128 + signal.SIGTERM

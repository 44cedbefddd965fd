"""Ranks, launchers and nodes that end without a message of their own: one line reports each, in time, and no process
stays behind."""

import functools
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ports import free_port
from waiting import wait_until

from megappo.runtime import platform
from megappo.runtime.interruption import LAUNCHER_STARTED

REPOSITORY = Path(__file__).parents[2]
RANK = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist

signal.signal(signal.SIGINT, signal.SIG_DFL)

def stop(): os.kill(os.getpid(), signal.SIGSTOP)
def slip(): return {}["no such key"]
def dream(): time.sleep(1000)
def fill(): os.write(os.open("/dev/full", os.O_WRONLY), b"x")
def watch():
    from megappo.runtime.watchdog import Watchdog
    Watchdog(store, rank, world_size, 2.0)
def greet(): os.write(1, f"rank {rank} is there\\n".encode())
def generate():
    from megappo.runtime.heartbeat import heartbeat
    with heartbeat.waiting(): time.sleep(5)
def save():
    def end(*_):
        while not os.path.exists(f"{__file__}.{rank}"): time.sleep(0.05)
        os._exit(75)
    signal.signal(signal.SIGUSR1, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
def evaluate():
    from megappo.runtime.interruption import INTERRUPTION
    INTERRUPTION.never_saves()
    INTERRUPTION.listen()
def ignore():
    for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    time.sleep(60)

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store, _, _ = next(dist.rendezvous("env://"))
store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
seconds = 100 if "all=watch" in sys.argv else 4
dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=seconds))
dist.barrier()
os.write(1, f"rank {rank} is there\\n".encode())  # as one piece
try:
    for word in sys.argv[1:]:  # RANK=WHAT, or all=WHAT
        who, what = word.split("=")
        if who in (str(rank), "all"):
            globals()[what]()
    while True:
        dist.all_reduce(torch.ones(1))
        time.sleep(0.1)
except Exception as error:
    from megappo.runtime.failure import report  # not before: it takes seconds
    os._exit(report(error, store, rank))
"""
CAN_SAVE = """
import runpy
from megappo.runtime.launcher import Agent
Agent.ranks_can_save = True
runpy.run_module("megappo.torchrun", run_name="__main__")
"""
"""A launcher that takes its ranks for a run's."""
HOST = socket.gethostname()

pytestmark = pytest.mark.timeout(120)


class Launcher:
    """megappo.torchrun with ranks that wait for each other and do what the test's arguments name."""

    def __init__(self, folder: Path, *arguments: str, name: str = "launcher", can_save: bool = False):
        self.temporary, self.output_file = folder / "tmp", folder / f"{name}.txt"
        self.temporary.mkdir(exist_ok=True)
        script = folder / "rank.py"
        script.write_text(RANK)
        options, words = [a for a in arguments if "=" not in a], [a for a in arguments if "=" in a]
        with self.output_file.open("w") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    *(("-c", CAN_SAVE) if can_save else ("-m", "megappo.torchrun")),
                    *options,
                    str(script),
                    *words,
                ],
                cwd=REPOSITORY,
                env=os.environ | {"TMPDIR": str(self.temporary), "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=functools.partial(signal.signal, signal.SIGHUP, signal.SIG_DFL),  # nohup has it ignored
            )

    @property
    def lines(self) -> list[str]:
        """Return the printed lines without the ranks' greetings."""
        return [line for line in self.output_file.read_text().splitlines() if not line.endswith("is there")]

    @property
    def ranks(self) -> list[psutil.Process]:
        """The ranks' processes, in order."""
        children = psutil.Process(self.process.pid).children()
        return sorted(children, key=lambda process: int(process.environ()["RANK"]))

    def wait_for_ranks(self, number: int = 2) -> list[psutil.Process]:
        wait_until(lambda: self.output_file.read_text().count("is there\n") == number)
        return self.ranks

    def wait(self, seconds: float = 40.0) -> int:
        """The exit code; nothing may be left in the temporary folder."""
        code = self.process.wait(seconds)
        assert not list(self.temporary.iterdir()), self.output_file.read_text()
        return code


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    """Starts launchers, and sees to it that nothing of them is left."""
    started: list[Launcher] = []

    def start(*arguments: str, **options: Any) -> Launcher:
        started.append(Launcher(tmp_path, *arguments, **options))
        return started[-1]

    yield start
    for launcher in started:
        if launcher.process.poll() is None:
            for process in (*psutil.Process(launcher.process.pid).children(), launcher.process):
                process.kill()
            launcher.process.wait()


ONE_NODE = ("--standalone", "--nproc-per-node", "2", "--shutdown-timeout", "1")


def node(number: int, port: int) -> tuple[str, ...]:
    """Options of one of two nodes, one rank each, on this machine."""
    where = ("--nnodes", "2", "--node-rank", str(number), "--master-addr", "127.0.0.1", "--master-port", str(port))
    return (*where, "--nproc-per-node", "1", "--shutdown-timeout", "1")


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(s, marks=slow) for s in (signal.SIGKILL, signal.SIGUSR1, signal.SIGABRT))],
)
def test_a_signal_to_a_single_rank(launch, number):
    launcher = launch(*ONE_NODE)
    ended = launcher.wait_for_ranks()[1]
    ended.send_signal(number)
    assert launcher.wait() == 1
    [line] = launcher.lines
    assert line.startswith(f"error: rank 1 (pid {ended.pid}, {HOST}) was ended by {number.name}")
    assert ("out of memory" in line) == (number == signal.SIGKILL)


def test_a_rank_that_is_killed_with_a_restart_left(launch):
    launcher = launch(*ONE_NODE, "--max-restarts", "1")
    killed = launcher.wait_for_ranks()[1]
    started = killed.environ()[LAUNCHER_STARTED]
    killed.kill()
    again = launcher.wait_for_ranks(4)[0]
    assert again.environ()[LAUNCHER_STARTED] == started, "from then on the time limit counts"
    again.kill()
    assert launcher.wait() == 1
    first, restart, second = launcher.lines
    assert first.startswith(f"error: rank 1 (pid {killed.pid}, {HOST}) was ended by SIGKILL")
    assert restart == "starting all ranks again; --max-restarts leaves 0 more"
    assert second.startswith(f"error: rank 0 (pid {again.pid}, {HOST}) was ended by SIGKILL")


def test_restarts_are_refused_on_several_nodes(launch):
    launcher = launch(*node(0, free_port()), "--max-restarts", "1")
    assert launcher.wait() == 2
    [line] = launcher.lines
    assert line.startswith("error: --standalone and --max-restarts are for one node")


def test_the_traceback_of_any_rank_comes_first(launch):
    launcher = launch("--standalone", "--nproc-per-node", "3", "--shutdown-timeout", "1", "2=slip")
    began = time.monotonic()
    assert launcher.wait() == 1
    assert time.monotonic() - began < 60
    first, *frames, last = launcher.lines
    assert first == "error (rank 2): Traceback (most recent call last):"
    assert last == "KeyError: 'no such key'" and all(line.startswith("  ") for line in frames)


@pytest.mark.parametrize("fault", ["dream", pytest.param("stop", marks=slow)])
def test_a_rank_that_hangs_is_found_while_others_wait_for_it(launch, fault):
    launcher = launch("--standalone", "--nproc-per-node", "3", "--shutdown-timeout", "1", "all=watch", f"1={fault}")
    hanging = launcher.wait_for_ranks(3)[1].pid
    began = time.monotonic()
    assert launcher.wait() == 1
    assert time.monotonic() - began < 40
    first, second, *rest = launcher.lines
    assert first == ("error: no rank has made progress for 2 s (trainer.hang_timeout_seconds): check rank 1 first")
    place = "does not answer: it was stopped" if fault == "stop" else "is in the set-up and waits for no other rank:"
    assert second.startswith(f"rank 1 (pid {hanging}, {HOST}) {place}")
    assert sum("time.sleep(1000)" in line for line in rest) == (fault == "dream")
    [others] = [line for line in rest if line.startswith("ranks 0, 2, as rank 0 (pid ")]
    assert "waits in all_reduce (torch/distributed/distributed_c10d.py line " in others
    assert sum("dist.all_reduce(torch.ones(1))" in line for line in rest) == 1
    assert [line.startswith("error: rank 1 (pid ") for line in rest].count(True) == (fault == "stop")


def test_a_rank_that_waits_for_an_engine_does_not_hang(launch):
    launcher = launch(*ONE_NODE, "all=watch", "1=generate", "1=fill")
    assert launcher.wait() == 1
    [line] = launcher.lines
    assert line.startswith("error (rank 1): No space left on device")


def test_a_full_disk_on_one_rank_while_another_does_not_listen(launch):
    launcher = launch(*ONE_NODE, "0=ignore", "1=fill")
    assert launcher.wait() == 1
    full, killed = launcher.lines
    assert full.startswith("error (rank 1): No space left on device: in fill, ")
    assert "make room on that disk" in full
    assert killed.startswith("error: rank 0 (pid ")
    assert "did not end within 1 s of being stopped, and was killed" in killed and "memory" not in killed


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT])
def test_a_signal_to_the_launcher(launch, number):
    launcher = launch(*ONE_NODE)
    launcher.wait_for_ranks()
    launcher.process.send_signal(number)
    assert launcher.wait() == 128 + number
    assert launcher.lines == [f"ended by {number.name}"]


def test_further_signals_while_the_ranks_save_what_the_first_asked_for(launch, tmp_path):
    """As Slurm may send them: SIGUSR1 in two ways, SIGTERM as soon as the launcher of another node has ended."""
    launcher = launch(*ONE_NODE, "all=save", can_save=True)
    first, second = launcher.wait_for_ranks()
    wait_until(lambda: has_signal("SigCgt", first) and has_signal("SigCgt", second))
    launcher.process.send_signal(signal.SIGUSR1)
    time.sleep(0.2)
    launcher.process.send_signal(signal.SIGUSR1)
    (tmp_path / "rank.py.0").touch()
    wait_until(lambda: not first.is_running() or first.status() == psutil.STATUS_ZOMBIE)
    time.sleep(0.3)  # for the launcher to see it
    launcher.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert second.is_running()
    (tmp_path / "rank.py.1").touch()
    assert launcher.wait() == 75
    assert launcher.lines == ["ended by SIGUSR1: start it again to resume"]


def test_ranks_that_have_saved_nothing_are_not_to_be_restarted(launch):
    launcher = launch(*ONE_NODE, "all=evaluate", can_save=True)
    ranks = launcher.wait_for_ranks()
    wait_until(lambda: all(has_signal("SigCgt", rank) for rank in ranks))
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.wait() == 128 + signal.SIGTERM
    assert launcher.lines == ["ended by SIGTERM"]


def has_signal(mask: str, process: psutil.Process) -> bool:
    """Return True if SIGUSR1 is in a mask of a process: SigCgt of handled signals, SigIgn of ignored ones."""
    [found] = re.findall(rf"{mask}:\s+(\w+)", Path(f"/proc/{process.pid}/status").read_text())
    return bool(int(found, 16) >> (signal.SIGUSR1 - 1) & 1)


def test_ctrl_c_twice(launch):
    launcher = launch(*ONE_NODE, "1=ignore")
    ignoring = launcher.wait_for_ranks()[1]
    wait_until(lambda: has_signal("SigIgn", ignoring))
    launcher.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.wait() == 128 + signal.SIGINT
    killed, last = launcher.lines
    assert last == "ended by SIGINT"
    assert killed.startswith("error: rank 1 (pid ") and "was killed" in killed


def test_ctrl_c_while_other_nodes_are_waited_for(launch):
    port = free_port()
    launcher = launch(*node(0, port))
    wait_until(lambda: any(c.laddr.port == port for c in psutil.Process(launcher.process.pid).net_connections()))
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.wait() == 128 + signal.SIGINT
    assert launcher.lines == ["ended by SIGINT"]


def two_nodes(launch: Callable[..., Launcher]) -> tuple[Launcher, Launcher]:
    port = free_port()
    first, second = launch(*node(0, port), name="first"), launch(*node(1, port), name="second")
    first.wait_for_ranks(1)
    second.wait_for_ranks(1)
    return first, second


def test_a_rank_that_is_killed_on_another_node(launch):
    first, second = two_nodes(launch)
    launchers = [psutil.Process(node.process.pid) for node in (first, second)]
    served = [c.laddr.ip for p in launchers for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
    assert served == ["127.0.0.1"], "the head's store, where it is named"
    [killed] = second.ranks
    killed.kill()
    assert (first.wait(), second.wait()) == (1, 1)
    [line] = second.lines
    assert line.startswith(f"error: rank 1 (pid {killed.pid}, {HOST}) was ended by SIGKILL")
    assert first.lines == [f"error: node 1 ({HOST}, rank 1): rank 1 (pid {killed.pid}, {HOST}) was ended by SIGKILL"]


@slow  # a killed rank of a node ends the other nodes in the same way, only sooner
@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_is_killed(launch, lost):
    nodes = two_nodes(launch)
    for process in (nodes[lost].process, *nodes[lost].ranks):
        process.send_signal(signal.SIGKILL)
    left = nodes[1 - lost]
    assert left.wait(60) == 1
    [line] = left.lines
    assert line.startswith(f"error: node {lost} ({HOST}, rank {lost}) has ")


def printed(*command: str) -> str:
    """Return the output of a command whose shell allows it 256 open files."""
    shell = ["bash", "-c", 'ulimit -Sn 256; exec "$@"', "-", sys.executable, "-m", *command]
    return subprocess.run(shell, cwd=REPOSITORY, capture_output=True, text=True, timeout=100).stdout


def test_ranks_may_open_as_many_files_as_the_hard_limit_allows():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    options = ("--standalone", "--nproc-per-node", "1", "--no-python")
    assert printed("megappo.torchrun", *options, "bash", "-c", "ulimit -n").strip() == str(hard)


@slow
def test_ranks_of_plain_torchrun_may_too(tmp_path):
    extension = tmp_path / "limits.py"
    extension.write_text("import resource\nprint('limits', *resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)\n")
    options = ("--standalone", "--nproc-per-node", "1", "-m", "megappo.train", "configs/quickstart.yaml")
    output = printed("torch.distributed.run", *options, f"trainer.extensions=[{extension}]", "model.path=no")
    [line] = [line for line in output.splitlines() if line.startswith("limits ")]
    _, soft, hard = line.split()
    assert soft == hard


@pytest.mark.parametrize("threads", [None, "3"])
def test_ranks_and_engines_share_the_cores(threads, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    script = tmp_path / "threads.py"
    line = "(os.environ['OMP_NUM_THREADS'] + ' ' + os.environ.get('MEGAPPO_ENGINE_CORES', 'none') + '\\n').encode()"
    script.write_text(f"import os; os.write(1, {line})")
    command = ("megappo.torchrun", "--standalone", "--nproc-per-node", "2", script)
    cores = platform.num_cores()
    assert printed(*command).split() == 2 * ([threads, "none"] if threads else [str(max(1, cores // 2)), str(cores)])


TAKES_MEMORY = """
import os, resource, torch
for number in range(30):
    if number == 20:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
os.write(1, f"{faults} {os.environ['MALLOC_MMAP_MAX_']}".encode())
"""
"""64 MiB, many times; the 163,840 pages of the last ten are all new ones, unless the earlier ones' are used again. The
first may each leave too little for the next, as something small is put into a part of it."""


@pytest.mark.parametrize("given", [None, pytest.param("1000", marks=slow)])
def test_ranks_reuse_memory_that_they_have_freed(given, tmp_path, monkeypatch):
    monkeypatch.delenv("MALLOC_MMAP_MAX_", raising=False)
    if given is not None:
        monkeypatch.setenv("MALLOC_MMAP_MAX_", given)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    script = tmp_path / "takes_memory.py"
    script.write_text(TAKES_MEMORY)
    faults, found = printed("megappo.torchrun", "--standalone", "--nproc-per-node", "1", script).split()
    if given is None:
        assert int(faults) < 163_840 / 2
    else:
        assert found == given

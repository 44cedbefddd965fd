"""The engine's process: what it refuses, and that nothing is left of it, whoever dies first."""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from ports import free_port
from waiting import wait_until

from megappo.config.schema import Rollout
from megappo.engines import launch
from megappo.engines.client import EngineError, EngineFault, SamplingParams
from megappo.engines.process import Engine

OWNER = """
import sys, time
from pathlib import Path
from megappo.config.schema import Rollout
from megappo.engines.process import Engine
settings = Rollout(max_total_tokens=1024)
engine = Engine(sys.argv[1], settings, "fp32", index=0, gpu_ids=[], log_path=Path(sys.argv[2]), seed=0)
engine.start()
print(engine._process.pid, flush=True)
engine.wait_ready()
print(engine._temporary, flush=True)
time.sleep(600)
"""


def build(checkpoint: Path, tmp_path: Path, *, index: int = 0, node_arguments=None, **rollout) -> Engine:
    settings = Rollout(max_total_tokens=1024, **rollout)
    log_path = tmp_path / f"engine_{index}.log"
    return Engine(
        *(checkpoint, settings, "fp32"),
        index=index,
        gpu_ids=[],
        log_path=log_path,
        seed=0,
        node_arguments=node_arguments,
    )


def session_pids(leader: int) -> list[int]:
    """Processes of a session that still run (zombies do not)."""
    found = subprocess.run(["ps", "-o", "pid=,stat=", "-s", str(leader)], capture_output=True, text=True).stdout
    return [int(line.split()[0]) for line in found.splitlines() if not line.split()[1].startswith("Z")]


def test_a_taken_port_is_refused_at_once(checkpoint, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(EngineError, match=f"port {port} .* is not free .* set rollout.port to another"):
            build(checkpoint, tmp_path, port=port).start()


def test_sockets_have_names_that_are_short_enough(tmp_path, monkeypatch):
    long = tmp_path / ("job-" * 15)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    ended = subprocess.Popen(["true"])
    ended.wait()
    stale = Path("/tmp", f"{launch.TRACES_PREFIX}{ended.pid}-left_over")
    stale.mkdir()
    folder = launch.temporary_folder()
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(tempfile.mktemp(dir=folder))
    finally:
        shutil.rmtree(folder)
    launch.remove_stale_traces()
    assert not stale.exists()


def test_shared_memory_without_a_folder_is_removed_unless_its_owner_lives():
    ended = subprocess.Popen(["true"])
    ended.wait()
    names = (f"{launch.TRACES_PREFIX}{ended.pid}-a_b", f"{launch.TRACES_PREFIX}{os.getpid()}-a_b", "another_server")
    paths = [Path(f"/dev/shm/sglang_loads_{name}_0123.shm") for name in names]
    try:
        for path in paths:
            path.write_bytes(b"loads")
        launch.remove_stale_traces()
        assert [path.exists() for path in paths] == [False, True, True]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def test_without_sglang_the_error_names_the_remedy(checkpoint, tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sglang" else find_spec(name))
    with pytest.raises(EngineError, match="SGLang.* is not installed: run launch/setup.sh"):
        build(checkpoint, tmp_path)


def test_a_start_that_takes_too_long_ends_with_the_remedy(checkpoint, tmp_path):
    engine = build(checkpoint, tmp_path, start_timeout_seconds=0.5)
    engine.start()
    leader = engine._process.pid
    with pytest.raises(EngineError, match=r"within 0.5 s: raise rollout.start_timeout_seconds"):
        engine.wait_ready()
    wait_until(lambda: not session_pids(leader))
    engine.log_path.write_text("".join(f"line {i}\n" for i in range(100)))
    explained = engine.explain(EngineFault("it does not answer"))
    assert (
        explained.startswith(f"it does not answer; {engine.log_path} ends:\nline 75\n") and explained[-7:] == "line 99"
    )
    assert engine.explain(EngineFault(explained)) == explained, "once"


def test_the_key_is_not_visible_to_other_users(engine):
    leader = engine._process.pid
    for pid in session_pids(leader):
        assert engine._api_key not in Path(f"/proc/{pid}/cmdline").read_text()
    log = engine.log_path.read_text()
    assert "'api_key': '***'" in log and engine._api_key not in log, "it has logged its arguments without the key"
    assert engine.log_path.stat().st_mode & 0o077 == 0
    listening = subprocess.run(["grep", "-h", " 0A ", "/proc/net/tcp"], capture_output=True, text=True).stdout
    [address] = [line.split()[1] for line in listening.splitlines() if line.split()[1].endswith(f":{engine.port:04X}")]
    assert address.startswith("0100007F:")  # 127.0.0.1


def test_an_idle_engine_leaves_the_cores_to_the_trainer(engine):
    def cpu_seconds() -> float:
        stats = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in pids]
        return sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")

    pids = session_pids(engine._process.pid)
    assert len(pids) >= 3
    before = cpu_seconds()
    time.sleep(3)
    assert cpu_seconds() - before < 0.3


@pytest.mark.slow  # tests/sync/test_weight_update.py has an engine of two processes on one node
def test_an_engine_of_two_nodes_serves_on_the_first(checkpoint, tmp_path):
    meeting = f"127.0.0.1:{free_port()}"
    parts = [
        build(
            checkpoint,
            tmp_path,
            index=node,
            node_arguments={"nnodes": 2, "node_rank": node, "dist_init_addr": meeting},
            tensor_parallel=2,
        )
        for node in range(2)
    ]
    try:
        for part in parts:
            part.start()
        first, _ = [part.wait_ready() for part in parts]
        assert len(first.generate([[5]], SamplingParams(2))[0].tokens) == 2
    finally:
        for part in parts:
            part.stop()


@pytest.mark.slow  # the next test has one that fails later
def test_a_scheduler_that_fails_while_it_starts_leaves_nothing(checkpoint, tmp_path):
    broken = tmp_path / "model"
    shutil.copytree(checkpoint, broken)
    (broken / "model.safetensors").write_bytes(b"")
    engine = build(broken, tmp_path)
    engine.start()
    made: set[Path] = set()
    try:
        while engine._process.poll() is None:
            made |= set(shared_memory(engine._temporary))
            time.sleep(0.02)
    finally:
        engine.stop()
    assert made and not any(path.exists() for path in made)
    assert not engine._temporary.exists()


def shared_memory(temporary: Path) -> list[Path]:
    """Shared-memory files of an engine, which are named after its temporary folder."""
    return list(Path("/dev/shm").glob(f"sgl*{temporary.name}*"))


def test_a_crash_is_reported_and_leaves_nothing_but_the_owner(checkpoint, tmp_path):
    engine = build(checkpoint, tmp_path)
    engine.start()
    try:
        client = engine.wait_ready()
        leader, temporary = engine._process.pid, engine._temporary
        memory = shared_memory(temporary)
        scheduler = next(p for p in session_pids(leader) if "scheduler" in Path(f"/proc/{p}/cmdline").read_text())
        os.kill(scheduler, signal.SIGKILL)
        with pytest.raises(EngineError, match=f"engine ended .*{engine.log_path} ends:"):
            client.generate([[5]], SamplingParams(1))
        wait_until(lambda: not session_pids(leader))
        engine.restart()
        assert len(client.generate([[5]], SamplingParams(2))[0].tokens) == 2, "restarted, it serves its clients"
        assert "crashed with exit code -9" in engine.log_path.read_text(), "its log keeps what it held before"
        os.killpg(engine._process.pid, signal.SIGSTOP)
        stopped = session_pids(engine._process.pid)
    finally:
        engine.stop()
    assert stopped and not any(Path(f"/proc/{pid}").exists() for pid in stopped), "it ends though it was stopped"
    assert not temporary.exists()
    assert memory and not any(path.exists() for path in memory)


def test_restarted_it_takes_as_much_of_the_gpu_as_before(checkpoint, tmp_path, monkeypatch):
    started: list[float] = []

    def start_keeper(settings, *more):
        started.append(settings["server_args"]["mem_fraction_static"])
        return subprocess.Popen(["sleep", "60"])

    monkeypatch.setattr(launch, "start_keeper", start_keeper)
    monkeypatch.setattr(Engine, "wait_ready", lambda self: None)
    settings = Rollout(mem_fraction_static=0.4)
    engine = Engine(checkpoint, settings, "fp32", index=0, gpu_ids=["0"], log_path=tmp_path / "engine.log", seed=0)
    engine.start()
    for free in (0.8, 0.5, 0.3):
        monkeypatch.setattr("megappo.runtime.platform.free_gpu_share", lambda free=free: free)
        engine.restart()
    engine.stop()
    assert started == pytest.approx([0.4, 0.5, 0.8, 0.95])


@pytest.mark.parametrize(
    "to_keeper", [None, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGKILL, signal.SIGSTOP))]
)
def test_all_of_it_dies_with_a_killed_owner(checkpoint, tmp_path, to_keeper):
    command = [sys.executable, "-c", OWNER, str(checkpoint), str(tmp_path / "engine.log")]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        keeper = int(owner.stdout.readline())
        temporary = Path(owner.stdout.readline().strip())
        assert len(session_pids(keeper)) >= 3
        memory = shared_memory(temporary)
        if to_keeper:
            os.kill(keeper, to_keeper)
    finally:
        owner.kill()
        owner.wait()
    wait_until(lambda: not session_pids(keeper))
    if to_keeper == signal.SIGKILL:  # nobody was left to clean up: the next start does
        assert temporary.exists()
        fresh = build(checkpoint, tmp_path)
        fresh.start()
        fresh.stop()
    assert not temporary.exists()
    assert memory and not any(path.exists() for path in memory)

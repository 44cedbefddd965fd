"""Runs whose engine crashes or hangs in the middle of a rollout: it is restarted, and the run continues."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from ports import free_port
from program import ONE_RANK_EACH, Program, has_logged, logged

from megappo.engines.process import API_KEY

pytestmark = pytest.mark.timeout(300)
ONE_BY_ONE = (  # rollouts that last for some seconds
    *("rollout.max_running_requests=4", "rollout.max_response_length=20", "data.train_batch_size=48"),
    *("trainer.total_steps=4", "trainer.eval_interval=0", "trainer.save_interval=0", "trainer.export_hf=false"),
)


def scheduler(owner: psutil.Process) -> psutil.Process:
    """Return the scheduler process of the engine that a process owns."""
    [found] = [process for process in owner.children(recursive=True) if "scheduler" in process.name()]
    return found


def harmed(folder: Path, config: Path, *arguments: str, harm: Callable[[psutil.Process], None]) -> list[dict]:
    """Return the steps of a run whose first engine is harmed in the third rollout."""
    run = folder / "run"
    with Program(folder, config, f"trainer.output_dir={run}", *ONE_BY_ONE, *arguments) as program:
        program.wait_until(lambda: has_logged(run, 2))
        harm(program.ranks[0])
        assert program.wait() == 0, program.output
    assert "WARNING: engine 0 has failed (1 of 3 times in a row; rollout.max_engine_restarts)" in program.output
    steps = logged(run)
    assert [metrics["step"] for metrics in steps] == [1, 2, 3, 4]
    assert [metrics["rollout/engine_restarts"] for metrics in steps] == [0, 0, 1, 0]
    assert all(metrics["rollout/log_prob_diff/mean"] < 1e-4 for metrics in steps)
    assert steps[2]["timing_s/rollout/sync"] > 0
    return steps


def kill_scheduler(owner: psutil.Process) -> None:
    scheduler(owner).kill()


def stop_scheduler(owner: psutil.Process) -> None:
    scheduler(owner).send_signal(signal.SIGSTOP)


@pytest.mark.slow  # tests/rollouts and tests/trainer have failing engines and the retries on other engines
@pytest.mark.parametrize("transport", ["auto", "broadcast"])
def test_a_crash(transport, config, folder):
    """The other engine, which gets its weights by broadcast, keeps generating and joins a new group afterwards."""
    ways = ("placement.rollout=all", f"rollout.sync.transport={transport}")
    harmed(folder, config, *ONE_RANK_EACH, *ways, harm=kill_scheduler)


@pytest.mark.slow  # tests/rollouts has its requests, test_transports.py weights by broadcast
def test_an_engine_that_somebody_else_started(config, folder):
    """It gets its weights by broadcast, and the run never ends it, not even when it fails."""
    port = str(free_port())
    serve = [sys.executable, "-m", "megappo", "serve", config.parent / "model", "--max-total-tokens", "4096"]
    command = [*serve, "--port", port, "--api-key", "its key"]
    with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}) as server:
        url, run = f"http://127.0.0.1:{port}", folder / "run"
        arguments = (f"trainer.output_dir={run}", f"rollout.engines=[{url}]", *ONE_BY_ONE)
        try:
            with Program(folder, config, *arguments, environment={API_KEY: "its key"}) as program:
                program.wait_until(lambda: has_logged(run, 2))
                assert server.poll() is None and not (run / "engines").exists()
                kill_scheduler(psutil.Process(server.pid))
                assert program.wait() == 1
        finally:
            server.terminate()
    assert all(metrics["rollout/log_prob_diff/mean"] < 1e-4 for metrics in logged(run))
    assert all(metrics["sync/bytes"] > 0 for metrics in logged(run))
    expected = f"error (rank 0): {url} of rollout.engines has failed: start it again, then the run"
    error, last = program.output.splitlines()[-2:]
    assert error == expected and last.startswith("the run failed: resumes ")


def stop_server(owner: psutil.Process) -> None:
    """Stop the engine's HTTP server, which has started its other processes."""
    scheduler(owner).parent().send_signal(signal.SIGSTOP)


def stop_keeper(owner: psutil.Process) -> None:
    """The server fails while its keeper is stopped and cannot react."""
    server = scheduler(owner).parent()
    server.parent().send_signal(signal.SIGSTOP)
    server.send_signal(signal.SIGSTOP)


@pytest.mark.slow
@pytest.mark.parametrize("harm", [stop_scheduler, stop_server, stop_keeper])
def test_a_hang(harm, config, folder):
    harmed(folder, config, "rollout.server_args.watchdog_timeout=20", harm=harm)


OUTSIDE = """
import os, time

import psutil

from megappo.{module} import {owner}

original, calls = {owner}.{method}, []


def once_the_engine_is_harmed(self, *arguments, **more):
    calls.append(os.getenv("RANK"))
    if len(calls) == {call} and calls[0] == "0":
        for process in psutil.Process().children(recursive=True):
            if "scheduler" in process.name():
                process.{harm}()
        time.sleep({seconds})
    return original(self, *arguments, **more)


{owner}.{method} = once_the_engine_is_harmed
"""
WHEN = {
    "in the first sync": {"module": "sync.sync", "owner": "WeightSync", "method": "__call__", "call": 1},
    # The third rollout: engines also sleep once while the models are built.
    "after a rollout": {
        **{"module": "trainer.inference", "owner": "InferenceEngines", "method": "sleep"},
        **{"call": 4, "seconds": 5},
    },
    "in a sync": {"module": "sync.ipc", "owner": "HandleSender", "method": "send"},
    "before a probe": {"module": "trainer.inference", "owner": "Probe", "method": "__call__"},
    "in the first broadcast": {"module": "sync.broadcast", "owner": "BroadcastReceiver", "method": "open", "call": 1},
    "in a broadcast": {"module": "sync.broadcast", "owner": "BroadcastReceiver", "method": "send", "call": 8},
    "in a broadcast of stages": {"module": "sync.broadcast", "owner": "BroadcastReceiver", "method": "send", "call": 8},
    "as it reads from disk": {"module": "sync.disk", "owner": "DiskReader", "method": "close"},
}
WAYS = {when: "broadcast" for when in WHEN if "broadcast" in when} | {"as it reads from disk": "disk"}
"""With another engine, and several buckets, which both ranks gather."""
STAGES = (
    *("placement.actor=1-2", "placement.critic=1-2", "placement.rollout=0,3"),
    *("actor.parallel.tensor=1", "actor.parallel.pipeline=2"),
)
HANGS_AFTER = "rollout.server_args.watchdog_timeout=15"


def harmful(folder: Path, when: str, harm: str) -> str:
    """Write an extension that harms the first engine."""
    (folder / "harm.py").write_text(OUTSIDE.format(**{"call": 3, "seconds": 0} | WHEN[when], harm=harm))
    return f"trainer.extensions={folder / 'harm.py'}"


@pytest.mark.slow  # tests/rollout and tests/trainer have what is done of an engine that fails then
@pytest.mark.parametrize("harm", ["kill", "suspend"])
@pytest.mark.parametrize("when", WHEN)
def test_a_crash_or_a_hang_outside_a_rollout(when, harm, config, folder):
    places = (harmful(folder, when, harm), f"trainer.output_dir={folder / 'run'}")
    others = ("placement.rollout=all", "rollout.sync.bucket_bytes=20000", f"rollout.sync.transport={WAYS.get(when)}")
    limits = (HANGS_AFTER, "rollout.request_timeout_seconds=20")  # the second limits a read from a disk
    others, ranks = ((*others, *STAGES), "4") if "stages" in when else (others, "2")
    arguments = (*places, *ONE_BY_ONE, *limits, *(others if when in WAYS else ()))
    with Program(folder, config, *arguments, options=("--nproc-per-node", ranks)) as program:
        assert program.wait() == 0, program.output
    assert "WARNING: engine 0 has failed (1 of 3 times in a row" in program.output
    steps = logged(folder / "run")
    assert [metrics["step"] for metrics in steps] == [1, 2, 3, 4]
    restarts = sum(metrics["rollout/engine_restarts"] for metrics in steps)
    assert restarts == 1 or (restarts == 2 and "broadcast" in when), "what waits in a broadcast fails with it"
    assert all(metrics["rollout/log_prob_diff/mean"] < 1e-4 for metrics in steps)


@pytest.mark.slow  # as above
def test_a_run_whose_engine_is_lost_for_good_saves_before_it_ends(config, folder):
    run = folder / "run"
    arguments = (f"trainer.output_dir={run}", *ONE_BY_ONE, "rollout.max_engine_restarts=0")
    with Program(folder / "1", config, *arguments, harmful(folder, "after a rollout", "kill")) as program:
        assert program.wait() == 1
    errors = [line for line in program.output.splitlines() if line.startswith("error")]
    assert len(errors) == 1 and "error (rank 0): the SGLang engine ended" in errors[0]
    saved = (run / "checkpoints" / "latest").read_text().strip()
    assert saved.startswith("step_00000002_"), "in the middle of the third: only the sync is left of it"
    with Program(folder / "2", config, *arguments) as program:
        assert program.wait() == 0, program.output
    assert [metrics["step"] for metrics in logged(run)] == [1, 2, 3, 4]

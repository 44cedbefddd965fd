"""Runs whose engine crashes or hangs in the middle of a rollout: it is started anew, and the run goes on."""

import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from program import Program, logged

pytestmark = pytest.mark.timeout(300)
ONE_BY_ONE = (  # rollouts that last for some seconds
    *("rollout.max_running_requests=4", "rollout.max_response_length=20", "data.train_batch_size=48"),
    *("trainer.total_steps=4", "trainer.eval_interval=0", "trainer.save_interval=0", "trainer.export_hf=false"),
)
ONE_RANK_EACH = (
    *("placement.actor=0", "placement.critic=0", "actor.parallel.tensor=1", "critic.parallel.pipeline=1"),
    "placement.rollout=all",
)


def engine_processes(rank: psutil.Process) -> list[psutil.Process]:
    """Those of the engine that a rank owns which compute and serve."""
    return [p for p in rank.children(recursive=True) if "sglang" in p.name() or "scheduler" in " ".join(p.cmdline())]


def harmed(folder: Path, config: Path, *arguments: str, harm: Callable[[psutil.Process], None]) -> list[dict]:
    """The steps of a run whose first engine meets harm in the third rollout."""
    run = folder / "run"
    with Program(folder, config, f"trainer.output_dir={run}", *ONE_BY_ONE, *arguments) as program:
        program.wait_until(lambda: " 2/4" in program.output)
        harm(program.ranks[0])
        assert program.wait() == 0, program.output
    assert "WARNING: engine 0 is started anew (1 of 3 times in a row; rollout.max_engine_restarts)" in program.output
    steps = logged(run)
    assert [metrics["step"] for metrics in steps] == [1, 2, 3, 4]
    assert [metrics["rollout/engine_restarts"] for metrics in steps] == [0, 0, 1, 0]
    assert all(metrics["rollout/log_prob_diff/mean"] < 1e-4 for metrics in steps)
    assert steps[2]["timing_s/rollout/sync"] > 0
    return steps


def kill_scheduler(rank: psutil.Process) -> None:
    found = [p for p in engine_processes(rank) if "scheduler" in p.name() + " ".join(p.cmdline())]
    print(found)
    found[0].kill()


def stop_scheduler(rank: psutil.Process) -> None:
    found = [p for p in engine_processes(rank) if "scheduler" in p.name() + " ".join(p.cmdline())]
    found[0].send_signal(signal.SIGSTOP)


def test_a_crash(config, folder):
    """The other engine, which gets its weights by broadcast, writes on meanwhile and joins a new group afterwards."""
    harmed(folder, config, *ONE_RANK_EACH, harm=kill_scheduler)


@pytest.mark.slow
def test_a_hang(config, folder):
    harmed(folder, config, "rollout.server_args.watchdog_timeout=20", harm=stop_scheduler)

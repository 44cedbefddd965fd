"""Two nodes with addresses of their own, one launcher and one rank each, started as a user starts them.

Without engines, on recorded rollouts and a CPU, they train bitwise as one launcher with two ranks does; other tests
have an engine that spans both.
"""

import fcntl
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from commands import assert_equal, tensors_of
from network import INTERFACE, NODES, address
from program import Program, has_logged, logged, trained_on
from tiny_run import reached

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
HOST = socket.gethostname()
Start = Callable[..., list[Program]]
OWN_MEMORY = ("unshare", "--mount", "bash", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "-")
"""Runs a command where no shared memory is another node's; it becomes that command."""
ENGINE_ON_BOTH = (
    *("placement.rollout=0-1", "rollout.tensor_parallel=2", "rollout.sync.bucket_bytes=20000"),
    *("trainer.eval_interval=0", "trainer.save_interval=0", "trainer.export_hf=false"),
)


def settings(out: Path, run: Path) -> tuple[str, ...]:
    """Return the overrides of a run on the rollouts recorded by `run`."""
    return (f"trainer.output_dir={out}", f"trainer.replay_rollouts={run / 'record'}", "trainer.eval_interval=0")


@pytest.fixture(scope="module")
def alone(config, run, tmp_path_factory) -> Path:
    """Return the output folder of an uninterrupted run of the same config by one launcher with as many ranks."""
    folder = tmp_path_factory.mktemp("alone")
    with Program(folder, config, *settings(folder / "out", run)) as program:
        assert program.wait() == 0, program.output
    return folder / "out"


@pytest.fixture
def nodes(network, config, folder) -> Iterator[Start]:
    """Return a function that starts both nodes with overrides, each time under another name."""
    variables = {"NNODES": "2", "NPROC": "1", "MASTER_ADDR": address(0), "GLOO_SOCKET_IFNAME": INTERFACE}
    with ExitStack() as programs:

        def both(name: str, *words: str) -> list[Program]:
            return [
                programs.enter_context(
                    Program(
                        folder / f"{name}{node}",
                        config,
                        *words,
                        environment={**variables, "CUDA_VISIBLE_DEVICES": "", "NODE_RANK": str(node)},
                        prefix=(*network.prefix(node), *OWN_MEMORY),
                        command=("bash", "launch/torchrun_node.sh"),
                    )
                )
                for node in NODES
            ]

        yield both


@pytest.fixture
def start(nodes, run, folder) -> Start:
    """Return a function that starts both nodes on the rollouts recorded by `run`, with the output folder out/."""
    return lambda name: nodes(name, *settings(folder / "out", run))


def codes(nodes: list[Program], seconds: float = 180.0) -> list[int]:
    """Return the exit codes of launchers, which must all end within that time."""
    deadline = time.monotonic() + seconds
    return [node.wait(deadline - time.monotonic()) for node in nodes]


def outputs(nodes: list[Program]) -> str:
    return "\n".join(f"--- node {number}\n{node.output}" for number, node in enumerate(nodes))


def check_same(out: Path, alone: Path) -> None:
    """Compare all logged metrics and the final weights."""
    found = trained_on(out)
    assert len(found) == 10 and {"actor/pg_loss", "critic/vf_loss"} <= found[0].keys()
    assert found == trained_on(alone)
    assert_equal(tensors_of(out / "hf_actor"), tensors_of(alone / "hf_actor"))


def test_two_nodes_train_as_one_does(start, network, alone, folder):
    nodes = start("node")
    nodes[0].wait_until(lambda: reached(folder / "out", 2))
    for node in NODES:
        assert network.listening(node) == {address(node)}
    assert codes(nodes) == [0, 0], outputs(nodes)
    check_same(folder / "out", alone)


@pytest.mark.parametrize("terminated", NODES)
def test_terminating_one_node_ends_both_with_all_saved(start, alone, folder, terminated):
    nodes = start("first")
    nodes[0].wait_until(lambda: reached(folder / "out", 4))
    nodes[terminated].process.terminate()
    assert codes(nodes, 60) == [75, 75], outputs(nodes)
    assert "; nothing is lost. To resume: " in nodes[0].output
    assert "error" not in outputs(nodes)
    assert not reached(folder / "out", 10)
    assert codes(start("second")) == [0, 0]
    check_same(folder / "out", alone)


def test_a_config_error_on_the_head_ends_the_other(start, folder):
    """The dry run could not detect it: another run has locked the folder since."""
    (folder / "out").mkdir()
    nodes = start("node")
    nodes[0].wait_until(lambda: bool(nodes[0].ranks))
    with (folder / "out" / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert codes(nodes, 60) == [2, 1], outputs(nodes)
    assert f"{folder / 'out'} is in use by a run" in nodes[0].output
    assert f"error: node 0 ({HOST}, rank 0): rank 0 (pid " in nodes[1].output and "failed (2)" in nodes[1].output


@pytest.mark.parametrize("pulled", NODES)
def test_a_cable_that_is_pulled_ends_both(start, network, folder, pulled):
    nodes = start("node")
    nodes[0].wait_until(lambda: reached(folder / "out", 3))
    network.pull_cable(pulled)
    assert codes(nodes, 60) == [1, 1], outputs(nodes)
    for node, other in zip(nodes, reversed(NODES), strict=True):
        assert f"error: node {other} ({HOST}, rank {other}) has not answered for " in node.output


@pytest.mark.parametrize("transport", ["auto", "broadcast"])
def test_an_engine_on_both_nodes_follows_the_actor(nodes, folder, transport):
    """After the first sync its checksums are the checksums of model.path: each part has all of its weights."""
    words = (f"trainer.output_dir={folder / 'out'}", *ENGINE_ON_BOTH, f"rollout.sync.transport={transport}")
    both = nodes("node", *words, "trainer.total_steps=3")
    assert codes(both, 300) == [0, 0], outputs(both)
    steps = logged(folder / "out")
    assert [metrics["step"] for metrics in steps] == [1, 2, 3]
    assert all(metrics["sync/bytes"] > 50_000 for metrics in steps)
    assert all(metrics["rollout/log_prob_diff/mean"] < 1e-4 for metrics in steps)
    assert all(metrics["sync/log_prob_diff/max"] < 1e-4 for metrics in steps)
    assert {log.name for log in (folder / "out" / "engines").iterdir()} == {"engine_0.log", "engine_0_node_1.log"}


@pytest.mark.parametrize("harmed", NODES)
def test_an_engine_that_loses_a_process_is_restarted(nodes, folder, harmed):
    words = (f"trainer.output_dir={folder / 'out'}", *ENGINE_ON_BOTH, "rollout.max_running_requests=4")
    both = nodes("node", *words, "rollout.max_response_length=20", "trainer.total_steps=3")
    both[0].wait_until(lambda: has_logged(folder / "out", 1), 300)
    [rank] = both[harmed].ranks
    [scheduler] = [process for process in rank.children(recursive=True) if "scheduler" in process.name()]
    scheduler.kill()
    assert codes(both, 300) == [0, 0], outputs(both)
    assert "WARNING: engine 0 has failed (1 of 3 times in a row" in both[0].output
    steps = logged(folder / "out")
    assert [metrics["rollout/engine_restarts"] for metrics in steps] == [0, 1, 0]
    assert all(metrics["rollout/log_prob_diff/mean"] < 1e-4 for metrics in steps)

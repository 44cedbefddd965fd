"""The pool of ranks that tests run on: a call meets nothing of those before it, and none is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from spawn import POOL, run_ranks
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout

SUPPORT = Path(__file__).parents[1] / "support"


def _leave_things(rank: int, world_size: int, folder: Path) -> None:
    dist.new_group([rank], use_local_synchronization=True)
    build_groups({"actor": Layout(tuple(range(world_size)))}, seed=1)
    torch.manual_seed(5)
    torch.set_num_threads(2)
    os.environ["LEFT_BEHIND"] = "by a test"
    os.chdir(folder)


def _find_nothing(rank: int, world_size: int, random: torch.Tensor, folder: str) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(rank), str(world_size))
    assert not parallel_state.model_parallel_is_initialized() and parallel_state._GLOBAL_MEMORY_BUFFER is None
    assert not get_cuda_rng_tracker().get_states()
    assert torch.equal(torch.get_rng_state(), random) and torch.get_num_threads() == 1
    assert "LEFT_BEHIND" not in os.environ and os.getcwd() == folder


def _save_random(rank: int, world_size: int, path: Path) -> None:
    if rank == 0:
        torch.save(torch.get_rng_state(), path)


def test_a_call_meets_nothing_of_the_one_before(tmp_path: Path) -> None:
    POOL.clear()  # its ranks would give way to fresh ones after so many calls
    run_ranks(2, _save_random, tmp_path / "random.pt")
    before = [rank.process.pid for rank in POOL.ranks]
    run_ranks(2, _leave_things, tmp_path)
    for world_size in (1, 3):
        run_ranks(world_size, _find_nothing, torch.load(tmp_path / "random.pt"), os.getcwd())
    assert [rank.process.pid for rank in POOL.ranks][: len(before)] == before


def _fails_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("the marker of rank 1")
    dist.barrier()


def _fails_the_test(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError):
        pass


def _dies(rank: int, world_size: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hangs(rank: int, world_size: int) -> None:
    time.sleep(60)


@pytest.mark.parametrize(
    ("function", "timeout", "error", "message"),
    [
        (_fails_on_rank_1, 60, ProcessRaisedException, "rank 1 failed (?s:.*)the marker of rank 1"),
        (_fails_the_test, 60, ProcessRaisedException, "DID NOT RAISE"),
        (_dies, 60, ProcessExitedException, "rank [01] was ended by SIGKILL"),
        (_hangs, 1, TimeoutError, r"ranks \[0, 1\] did not finish"),
    ],
)
def test_ranks_that_fail_are_reported_and_make_no_further_call(
    function: Callable[..., None], timeout: float, error: type[Exception], message: str
) -> None:
    run_ranks(2, _nothing)
    before = [psutil.Process(rank.process.pid) for rank in POOL.ranks]
    with pytest.raises(error, match=message):
        run_ranks(2, function, timeout=timeout)
    assert not POOL.ranks and not any(process.is_running() for process in before)
    run_ranks(2, _nothing)


OTHER_ENDINGS = (None, signal.SIGKILL)


def _nothing(rank: int, world_size: int) -> None:
    pass


OWNER = """
import sys, time

sys.path.insert(0, sys.argv[1])

if __name__ == "__main__":
    import spawn

    spawn.POOL.ranks = [spawn.Rank(number) for number in (0, 1)]
    print(*(rank.process.pid for rank in spawn.POOL.ranks), flush=True)  # whoever reads it may end this process at once
    time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, *(pytest.param(n, marks=pytest.mark.slow) for n in OTHER_ENDINGS)])
def test_no_rank_outlives_the_process_that_calls_it(number: signal.Signals | None, tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    command = [sys.executable, script, SUPPORT, "0" if number is None else "60"]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    ranks = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
    if number is not None:
        os.killpg(owner.pid, number) if number == signal.SIGINT else owner.send_signal(number)
    try:
        owner.communicate(timeout=60)
        assert len(ranks) == 2
        assert not psutil.wait_procs(ranks, timeout=10)[1]
    finally:
        for process in (owner, *ranks):
            with suppress(psutil.NoSuchProcess):
                process.kill()

"""Real gloo ranks for tests: `run_ranks(2, function)` calls `function(rank, world_size)` in two processes."""

import atexit
import multiprocessing
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from multiprocessing.connection import wait
from typing import Any

import rank_process
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

import megappo.runtime.platform

# Ranks are forked from a server that has imported the program (and so made megatron-core usable) once, and what their
# oracles need. A process that has touched CUDA cannot be forked.
START_METHOD = "spawn" if megappo.runtime.platform.has_cuda() else "forkserver"
multiprocessing.set_forkserver_preload(["megappo.trainer.main", "transformers.models.auto.modeling_auto"])
MOST_CALLS = 50
"""Number of calls after which ranks are replaced by fresh ones, so that leftovers of tests do not pile up."""


ENDING_SECONDS = 0.5
"""Time that it may take to notice a process that has ended."""


def run_ranks(world_size: int, function: Callable[..., None], *args: Any, timeout: float = 120) -> None:
    """Call `function(rank, world_size, *args)` on `world_size` processes, the ranks of a new default process group.

    `function` stands at the top level of a test module and `args` are picklable. The processes live on and make calls
    of other tests, unless this one fails; none outlives the test run.

    Raises:
        ProcessRaisedException: the first failing rank's traceback.
        ProcessExitedException: the first rank that ended.
        TimeoutError: the ranks did not finish within `timeout` seconds.
    """
    module = sys.modules[function.__module__]
    with tempfile.TemporaryDirectory() as folder:
        # Pickled here: unpickling needs the test module, which no path leads to.
        call = pickle.dumps((function, args))
        POOL.call(world_size, (world_size, folder, timeout, module.__name__, module.__file__, call), timeout)


class Rank:
    """A process that runs one call after another."""

    def __init__(self, number: int):
        context = multiprocessing.get_context(START_METHOD)
        self.number = number
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=rank_process.serve, args=(number, theirs))
        self.process.start()
        theirs.close()

    def check(self) -> None:
        """Its answer to a call.

        Raises:
            ProcessRaisedException, ProcessExitedException: the call failed.
        """
        try:
            if not self.process.is_alive() and not self.connection.poll():  # what it has started may hold its end
                raise EOFError
            error = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            raise _exited(self.number, self.process) from None
        if error is not None:
            message = f"rank {self.number} failed with the following error:\n{error}"
            raise ProcessRaisedException(message, self.number, self.process.pid)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _exited(number: int, process: Any) -> ProcessExitedException:
    code = process.exitcode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return ProcessExitedException(f"rank {number} {how}", number, process.pid, code)


class Pool:
    """The ranks of this process's tests. A failure in one of them ends them all."""

    def __init__(self) -> None:
        self.ranks: list[Rank] = []
        self.num_calls = 0

    def call(self, world_size: int, call: tuple[Any, ...], timeout: float) -> None:
        if self.num_calls == MOST_CALLS:
            self.clear()
        self.num_calls += 1
        try:
            self.ranks += [Rank(number) for number in range(len(self.ranks), world_size)]
            for rank in self.ranks[:world_size]:
                rank.connection.send(call)
            _await(self.ranks[:world_size], timeout)
        except BaseException:
            self.clear()
            raise

    def clear(self) -> None:
        for rank in self.ranks:
            rank.kill()
        self.ranks, self.num_calls = [], 0


def _await(ranks: list[Rank], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    working = list(ranks)
    while working:
        signs = {sign: rank for rank in working for sign in (rank.connection, rank.process.sentinel)}
        ready = wait(list(signs), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = [rank.number for rank in working]
            raise TimeoutError(f"ranks {late} did not finish within {timeout} seconds")
        for rank in dict.fromkeys(signs[sign] for sign in ready):
            working.remove(rank)
            try:
                rank.check()
            except ProcessRaisedException:
                _raise_if_ended(working)  # which is the cause then
                raise


def _raise_if_ended(ranks: Collection[Rank]) -> None:
    wait([rank.process.sentinel for rank in ranks], timeout=ENDING_SECONDS)
    for rank in ranks:
        if not rank.process.is_alive():
            raise _exited(rank.number, rank.process)


POOL = Pool()
atexit.register(POOL.clear)

"""torchrun's agent, which starts and watches a node's ranks; this one reports which rank ended first, and how.

Launchers of several nodes send each other heartbeats and last reports through the run's store.
"""

import math
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

import psutil
from torch.distributed import DistError, Store
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException

from megappo.errors import EXIT_CONFIG, EXIT_UNHEALTHY
from megappo.runtime import interruption
from megappo.runtime.failure import name_ranks
from megappo.runtime.interruption import (
    ASKING,
    EXIT_AGAIN,
    EXIT_LOST_RANK,
    EXIT_UNSAVED,
    LAUNCHER,
    LAUNCHER_STARTED,
    ending_signals,
)
from megappo.runtime.status import STATUS

BEAT_SECONDS = 2.0
LOST_SECONDS = 30.0
"""A node that has sent no heartbeat for so long is lost."""
FAREWELL_SECONDS = 5.0
"""Time that a launcher waits at its end for the store or, if it serves the store, for the others to read it."""


class OtherNodeError(RuntimeError):
    """Another node ended first."""


class StartAgain(RuntimeError):
    """All ranks have saved what they had, before the run's end. The message is the signal's name, or ""."""


class Agent(LocalElasticAgent):
    """Ends all ranks of its node as soon as one has ended, or another node has.

    Attributes:
        ranks_can_save: the ranks are a run's, so that the first of ASKING is passed on to them, and they save and end.
    """

    ranks_can_save = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._nodes: Nodes | None = None
        self._ended: dict[int, int] = {}  # exit codes of local ranks that ended before any was stopped
        self._paused: set[int] = set()  # local ranks that SIGSTOP has stopped
        self._stopped_by = ""  # the signal by which the ranks were stopped
        self._first_saved = math.inf  # when the first rank had
        os.environ[LAUNCHER] = str(os.getpid())
        os.environ[LAUNCHER_STARTED] = str(time.time())

    def run(self, role: str = "default") -> RunResult:
        """Run the ranks to their end, and report what went wrong if no rank can.

        The result's failures name only ranks that failed by themselves.

        Raises:
            OtherNodeError, SignalException: what ended them.
            StartAgain: they have saved what they had.
        """
        try:
            result = super().run(role)
            codes = self._codes().values()
            if result.is_failed() and self._stopped_by and EXIT_UNSAVED in codes:
                raise _ended_by(signal.Signals[self._stopped_by])
        except (SignalException, OtherNodeError) as error:
            self._report_stuck()
            self._leave(str(error))
            raise
        if result.is_failed():
            self._report()
            first = {self._rank(local) for local in self._failed() or self._ended}
            result.failures = {rank: failure for rank, failure in result.failures.items() if rank in first}
        elif EXIT_AGAIN in codes:
            raise StartAgain(self._stopped_by)
        return result

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._ended = {}
        for number in ending_signals():
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(-1)  # from here on there are ranks to be ended
        held_back = {interruption.SIGNAL} if self.ranks_can_save else set()
        signal.pthread_sigmask(signal.SIG_BLOCK, held_back)  # as the ranks have it, until they can handle it
        STATUS.stop()  # from here on rank 0 shows what the run does
        pids = super()._start_workers(worker_group)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, held_back)
        if self._stopped_by:
            self._ask_to_save()
        if worker_group.group_world_size > 1 and self._nodes is None:
            ranks = name_ranks([worker.global_rank for worker in worker_group.workers])
            name = f"node {worker_group.group_rank} ({socket.gethostname()}, {ranks})"
            self._nodes = Nodes(worker_group.store, worker_group.group_rank, worker_group.group_world_size, name)
        return pids

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Start all ranks again, as --max-restarts allows. torchrun calls it when one has failed."""
        self._report()
        print(f"starting all ranks again; --max-restarts leaves {self._remaining_restarts} more", file=sys.stderr)
        super()._restart_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._warn_of_stopped()
        by_rank = self._codes()
        codes = set(by_rank.values())
        if EXIT_AGAIN in codes and codes <= {0, EXIT_AGAIN, None}:
            self._first_saved = min(self._first_saved, time.monotonic())
            if None not in codes:
                ranks = [worker.global_rank for worker in worker_group.workers]
                return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))
            if time.monotonic() - self._first_saved < self._shutdown_timeout:
                return RunResult(state=WorkerState.HEALTHY)
        self._ended = {local: code for local, code in by_rank.items() if code}
        if self._ended:
            self._pcontext.close(signal.SIGTERM, self._shutdown_timeout)  # torchrun would give them 30 s
            if self._stopped_by or {EXIT_CONFIG, EXIT_AGAIN, EXIT_UNHEALTHY} & codes:
                self._remaining_restarts = 0  # the run is to end, or will not work the next time either
        elif None in codes:
            if self._nodes is not None and (verdict := self._nodes.verdict()):
                raise OtherNodeError(verdict)
            return RunResult(state=WorkerState.HEALTHY)
        else:  # rank 0 shows nothing any more, and torchrun takes up to two seconds where the machine has other work
            STATUS.start("end of the launcher", writes_heartbeats=False)
        return super()._monitor_workers(worker_group)

    def _warn_of_stopped(self) -> None:
        """Warn of each rank that SIGSTOP has stopped: if all are, no watchdog of a rank can."""
        running = {local: process.pid for local, process in self._processes().items() if process.returncode is None}
        paused = {local for local, pid in running.items() if psutil.Process(pid).status() == psutil.STATUS_STOPPED}
        for local in paused - self._paused:
            print(
                f"WARNING: {self._named(local)} is stopped (SIGSTOP), and the run waits for it: continue it with "
                f"kill -CONT {running[local]}, or end the run with Ctrl-C",
                file=sys.stderr,
            )
        self._paused = paused

    def _report(self) -> None:
        """Report the ranks that failed without an error message."""
        self._report_stuck()
        failed = self._failed()
        reason = ""
        if not failed:
            verdict = self._nodes.wait_for_verdict() if self._nodes is not None else ""
            rank = self._named(next(iter(self._ended)))
            reason = verdict or f"{rank} lost the connection to another rank, and none has reported why"
            print(f"error: {reason}", file=sys.stderr)
        for local, code in failed.items():
            if code < 0:
                hint = ": perhaps the machine was out of memory (see dmesg)" if code == -signal.SIGKILL else ""
                print(f"error: {self._named(local)} {_how(code)}{hint}", file=sys.stderr)
            reason = reason or f"{self._named(local)} {_how(code)}"
        self._leave(reason)

    def _report_stuck(self) -> None:
        for local, code in self._codes().items():
            if code == -signal.SIGKILL and local not in self._ended:
                print(
                    f"error: {self._named(local)} did not end within {self._shutdown_timeout} s of being stopped, and "
                    "was killed: it was stopped, or hung",
                    file=sys.stderr,
                )

    def _leave(self, reason: str) -> None:
        if self._nodes is not None:
            self._nodes.leave(reason)

    def _failed(self) -> dict[int, int]:
        """Return the exit codes of the ranks that failed by themselves, by local rank."""
        return {local: code for local, code in self._ended.items() if code != EXIT_LOST_RANK}

    def _processes(self) -> dict[int, Any]:
        """Return the ranks' processes by local rank."""
        handlers = self._pcontext.subprocess_handlers if self._pcontext is not None else {}
        return {local: handler.proc for local, handler in handlers.items()}

    def _codes(self) -> dict[int, int | None]:
        """Return the exit codes of the ranks that have ended, by local rank; None of the others."""
        return {local: process.poll() for local, process in self._processes().items()}

    def _rank(self, local: int) -> int:
        return self._worker_group.workers[local].global_rank

    def _named(self, local: int) -> str:
        return f"rank {self._rank(local)} (pid {self._processes()[local].pid}, {socket.gethostname()})"

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.ranks_can_save and number in ASKING:
            if not self._stopped_by:
                self._stopped_by = signal.Signals(number).name
                self._ask_to_save()
                return
            # Slurm may send the one in several ways; and once a rank has saved, all have, and end by themselves.
            if number == signal.SIGUSR1 or EXIT_AGAIN in self._codes().values():
                return
        for other in ending_signals():
            signal.signal(other, signal.SIG_IGN)  # a second one would interrupt the ending of the ranks
        raise _ended_by(signal.Signals(number))

    def _ask_to_save(self) -> None:
        for process in self._processes().values():
            process.send_signal(interruption.SIGNAL)  # not to one that has ended


def _ended_by(number: signal.Signals) -> SignalException:
    return SignalException(f"ended by {number.name}", number)


def _name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _how(code: int) -> str:
    return f"failed ({code})" if code > 0 else f"was ended by {_name(-code)}"


def _lost(node: str) -> str:
    return f"{node} has not answered for {LOST_SECONDS:g} s: it was killed or cut off"


class Nodes:
    """Heartbeats to the other nodes of a run, and from the next one. The first node that ends reports why to all.

    Args:
        store: the run's; served by node 0, and gone with it.
        node: number of this node.
        name: what to call it in messages.
    """

    def __init__(self, store: Store, node: int, num_nodes: int, name: str):
        self._store = store.clone()  # the launcher holds its own connection while it waits for the others' end
        self._node = node
        self._num_nodes = num_nodes
        self._name = name
        self._head = "node 0"
        self._verdict = ""
        self._answered = math.inf  # when the store last did; not before all nodes have met
        threading.Thread(target=self._watch, name="nodes", daemon=True).start()

    def verdict(self) -> str:
        """Return why the run cannot continue because of another node; "" while nothing is known."""
        if not self._verdict and time.monotonic() - self._answered > LOST_SECONDS:
            return _lost(self._head)
        return self._verdict

    def wait_for_verdict(self) -> str:
        """Return the same after a rank here has lost another: wait for the verdict as long as there may be one."""
        deadline = time.monotonic() + LOST_SECONDS + 2 * BEAT_SECONDS
        while not self.verdict() and time.monotonic() < deadline:
            time.sleep(BEAT_SECONDS / 10)
        return self.verdict()

    def leave(self, reason: str) -> None:
        """Report to the others why this node ends, unless another has ended before."""
        account = f"{self._name}: {reason}"
        farewell = threading.Thread(
            target=self._publish,
            name="farewell",
            args=[account],
            daemon=True,
        )
        farewell.start()
        farewell.join(FAREWELL_SECONDS)  # a store that was cut off would not answer for minutes

    def _publish(self, account: str) -> None:
        with suppress(DistError):
            self._store.compare_set("ended", "", account)
            gone = self._store.add("gone", 1)
            while self._node == 0 and gone < self._num_nodes:
                time.sleep(BEAT_SECONDS / 10)
                gone = self._store.add("gone", 0)

    def _watch(self) -> None:
        try:
            self._store.set(f"name/{self._node}", self._name)
            self._head = self._store.get("name/0").decode()
            following = (self._node + 1) % self._num_nodes
            name = self._store.get(f"name/{following}").decode()
            beats = 0
            last_beat = time.monotonic()
            while not self._verdict:
                self._answered = time.monotonic()
                time.sleep(BEAT_SECONDS)
                self._store.add(f"beats/{self._node}", 1)
                count = self._store.add(f"beats/{following}", 0)
                if count != beats:
                    beats = count
                    last_beat = time.monotonic()
                if self._store.check(["ended"]):
                    self._verdict = self._store.get("ended").decode()
                elif time.monotonic() - last_beat > LOST_SECONDS:
                    self._verdict = self._store.compare_set("ended", "", _lost(name)).decode()
        except DistError:
            self._verdict = f"{self._head} has ended or cannot be reached"

"""torchrun's agent, which starts and watches a node's ranks; this one reports which rank ended first, and how."""

import math
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException

from megappo.errors import EXIT_CONFIG
from megappo.runtime import interruption
from megappo.runtime.interruption import EXIT_AGAIN, EXIT_UNSAVED
from megappo.runtime.launcher.nodes import Nodes
from megappo.runtime.launcher.signals import ASKING, ending_signals
from megappo.runtime.lifetime import EXIT_LOST_RANK, LAUNCHER


class OtherNodeError(RuntimeError):
    """Another node ended first."""


class StartAgain(RuntimeError):
    """All ranks have saved what they had, before the run's end."""


class Agent(LocalElasticAgent):
    """Ends all ranks of its node as soon as one has ended, or another node has.

    Attributes:
        ranks_can_save: the ranks are a run's, so that the first of ASKING is passed on to them, and they save and end.
    """

    ranks_can_save = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._nodes: Nodes | None = None
        self._ended: list[int] = []  # local ranks that ended before any was stopped
        self._stopped_by = ""  # the signal by which the ranks were stopped
        self._first_saved = math.inf  # when the first rank had
        os.environ[LAUNCHER] = str(os.getpid())
        os.environ[interruption.LAUNCHER_STARTED] = str(time.time())

    def run(self, role: str = "default") -> RunResult:
        """Run the ranks to their end, and report what went wrong if no rank can.

        The result's failures are those of the ranks that failed by themselves.

        Raises:
            OtherNodeError, SignalException: what ended them.
            StartAgain: they have saved what they had.
        """
        try:
            result = super().run(role)
        except SignalException as error:
            self._report_stuck()
            self._leave(f"ended by {error.sigval.name}")
            raise
        except OtherNodeError as error:
            self._report_stuck()
            self._leave(str(error))
            raise
        if EXIT_AGAIN in self._codes().values() and not result.is_failed():
            raise StartAgain(f"ended by {self._stopped_by}: started again, the run goes on" if self._stopped_by else "")
        if result.is_failed():
            if self._stopped_by and EXIT_UNSAVED in self._codes().values():
                self._leave(f"ended by {self._stopped_by}")
                raise SignalException(f"ended by {self._stopped_by}", signal.Signals[self._stopped_by])
            self._report()
            own = [local for local in self._ended if self._codes()[local] != EXIT_LOST_RANK] or self._ended
            first = {self._worker_group.workers[local].global_rank for local in own}
            result.failures = {rank: failure for rank, failure in result.failures.items() if rank in first}
        return result

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._ended = []
        self._killed_for_memory = _killed_for_memory()
        self._handle_signals()
        signal.set_wakeup_fd(-1)  # from here on there are ranks to be ended
        held_back = {interruption.SIGNAL} if self.ranks_can_save else set()
        signal.pthread_sigmask(signal.SIG_BLOCK, held_back)  # as the ranks have it, until they can handle it
        pids = super()._start_workers(worker_group)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, held_back)
        if self._stopped_by:
            self._ask_to_save()
        if worker_group.group_world_size > 1 and self._nodes is None:
            node = worker_group.group_rank
            name = f"node {node} ({socket.gethostname()}, {self._ranks(worker_group)})"
            self._nodes = Nodes(worker_group.store, node, worker_group.group_world_size, name)
        return pids

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Start all ranks again, as --max-restarts allows. torchrun calls it when one has failed."""
        self._report()
        print(f"starting all ranks again; --max-restarts leaves {self._remaining_restarts} more", file=sys.stderr)
        super()._restart_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = self._codes()
        if EXIT_AGAIN in codes.values() and set(codes.values()) <= {0, EXIT_AGAIN, None}:
            self._first_saved = min(self._first_saved, time.monotonic())
            if None not in codes.values():
                ranks = [worker.global_rank for worker in worker_group.workers]
                return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))
            if time.monotonic() - self._first_saved < self._shutdown_timeout:
                return RunResult(state=WorkerState.HEALTHY)
        self._ended = [local for local, code in codes.items() if code]
        if self._ended:
            self._pcontext.close(signal.SIGTERM, self._shutdown_timeout)  # torchrun would give them 30 s
            if self._stopped_by or {EXIT_CONFIG, EXIT_AGAIN} & set(codes.values()):
                self._remaining_restarts = 0  # the run is to end, or will not work the next time either
        elif None in codes.values():
            if self._nodes is not None and (verdict := self._nodes.verdict()):
                raise OtherNodeError(verdict)
            return RunResult(state=WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)

    def _report(self) -> None:
        """Report the ranks that failed without an error message."""
        self._report_stuck()
        codes = {local: self._codes()[local] for local in self._ended}
        if all(code == EXIT_LOST_RANK for code in codes.values()):
            verdict = self._nodes.wait_for_verdict() if self._nodes is not None else ""
            lost = f"{self._named(self._ended[0])} lost the connection to another rank, and none has reported why"
            print(f"error: {verdict or lost}", file=sys.stderr)
            self._leave(verdict or lost)
            return
        for local, code in codes.items():
            if code < 0:
                print(f"error: {self._named(local)} was ended by {self._signal(-code)}", file=sys.stderr)
        local, code = next((local, code) for local, code in codes.items() if code != EXIT_LOST_RANK)
        self._leave(f"{self._named(local)} " + (f"failed ({code})" if code > 0 else f"was ended by {_name(-code)}"))

    def _report_stuck(self) -> None:
        for local, code in self._codes().items():
            if code == -signal.SIGKILL and local not in self._ended:
                print(
                    f"error: {self._named(local)} did not end within {self._shutdown_timeout} s of being stopped, and "
                    "was killed: it was stopped, or hung",
                    file=sys.stderr,
                )

    def _signal(self, number: int) -> str:
        if number != signal.SIGKILL:
            return _name(number)
        killed = _killed_for_memory()
        if killed is None:
            return "SIGKILL: the machine may be out of memory (see dmesg)"
        if killed > self._killed_for_memory:
            return "SIGKILL: the machine was out of memory, and the kernel ended a process (see dmesg)"
        return "SIGKILL: by somebody, or a limit of the batch system; the kernel did not run out of memory"

    def _leave(self, reason: str) -> None:
        if self._nodes is not None:
            self._nodes.leave(reason)

    def _processes(self) -> dict[int, Any]:
        """The ranks' processes by local rank."""
        handlers = self._pcontext.subprocess_handlers if self._pcontext is not None else {}
        return {local: handler.proc for local, handler in handlers.items()}

    def _codes(self) -> dict[int, int | None]:
        """The exit codes of those that have ended, by local rank; None of the others."""
        return {local: process.poll() for local, process in self._processes().items()}

    def _named(self, local: int) -> str:
        rank = self._worker_group.workers[local].global_rank
        return f"rank {rank} (pid {self._processes()[local].pid}, {socket.gethostname()})"

    def _handle_signals(self) -> None:
        for number in ending_signals():
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.ranks_can_save and number in ASKING:
            if not self._stopped_by:
                self._stopped_by = _name(number)
                self._ask_to_save()
                return
            # Slurm may send the one in several ways; and once a rank has saved, all have, and end by themselves.
            if number == signal.SIGUSR1 or EXIT_AGAIN in self._codes().values():
                return
        for other in ending_signals():
            signal.signal(other, signal.SIG_IGN)  # a second one would interrupt the ending of the ranks
        raise SignalException(f"signal {number}", signal.Signals(number))

    def _ask_to_save(self) -> None:
        for process in self._processes().values():
            process.send_signal(interruption.SIGNAL)  # not to one that has ended

    @staticmethod
    def _ranks(worker_group: WorkerGroup) -> str:
        ranks = [worker.global_rank for worker in worker_group.workers]
        return f"ranks {ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"


def _name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _killed_for_memory() -> int | None:
    """Return how many processes this machine's kernel has killed for lack of memory; None if it does not count them."""
    path = Path("/proc/vmstat")
    counts = dict(line.split() for line in path.read_text().splitlines()) if path.exists() else {}
    return int(counts["oom_kill"]) if "oom_kill" in counts else None

"""Finds a run that hangs, says where each rank is, and ends it.

Each rank has a thread that adds the rank's fresh signs of life to a number in torchrun's store, every few seconds, and
sees by the sum whether any rank gets on: ranks wait for each other, so that one that hangs soon holds all up, while
ranks that wait for one that works are no fault. Whoever first sees the sum stand still for too long asks all for their
stacks, by raising it, and prints them. That takes no collective, and nobody reads what each rank says but then.
"""

import json
import os
import socket
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import FrameType

import psutil
import torch.distributed as dist

from megappo.placement.ranks import format_ranks
from megappo.runtime.heartbeat import LIFE
from megappo.trainer.failure import tell

BEAT_SECONDS = 10.0
ANSWER_SECONDS = 5.0
"""How long after the last rank must have seen the question the answers are waited for."""
SIGNS, ANSWERS = "watchdog/signs", "watchdog/answers"
ASKED = 2**40
"""Added to the sum of the signs, which never comes near it, by each rank that asks."""
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
WAITS = ("torch/distributed/", "torch/cuda/", "megatron/")
"""Where a thread is that waits for other ranks, or for its GPU, which does."""


class Watchdog:
    """Watches from a thread of its own until the process ends.

    Args:
        store: torchrun's, shared by all ranks.
        seconds: how long all ranks together may give no sign of life.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, seconds: float):
        self._store = store.clone()  # one that the main thread waits with would not answer
        self._rank, self._world_size, self._seconds = rank, world_size, seconds
        self._beat = min(BEAT_SECONDS, seconds / 4)
        self._store.set(f"watchdog/name/{rank}", f"rank {rank} (pid {os.getpid()}, {socket.gethostname()})")
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def _watch(self) -> None:
        with suppress(dist.DistError):  # the store's node is gone: the launchers say so
            is_first = self._wait_for_question()
            self._store.set(f"watchdog/place/{self._rank}", json.dumps(asdict(here())))
            answers = self._store.add(ANSWERS, 1)
            if is_first:
                self._end(answers)

    def _wait_for_question(self) -> bool:
        """Give signs until a rank asks, this or another; whether this was the first."""
        given, total, silence, stopped = LIFE.signs, 0, 0.0, 0.0
        while total < ASKED:
            time.sleep(self._beat)
            if psutil.Process(os.getppid()).status() in STOPPED:  # the launcher, whose store would not answer
                stopped += self._beat
                self._end_without_launcher(stopped)
                continue
            stopped = 0.0
            signs = LIFE.signs
            before, total = total, self._store.add(SIGNS, signs - given or int(LIFE.is_waiting))
            given = signs
            # Counted in beats: by the clock a run that was suspended as a whole would have been silent.
            silence = silence + self._beat if total == before else 0.0
            if silence >= self._seconds:
                return self._store.add(SIGNS, ASKED) < 2 * ASKED
        return False

    def _end_without_launcher(self, stopped: float) -> None:
        if stopped >= self._seconds:
            launcher = f"the launcher of rank {self._rank} (pid {os.getppid()}, {socket.gethostname()})"
            limit = f"{self._seconds:g} s (trainer.hang_timeout_seconds)"
            print(f"error: {launcher} has been stopped for {limit}; let it go on by SIGCONT", file=sys.stderr)
            os._exit(1)

    def _end(self, answers: int) -> None:
        """Print what the ranks have answered and end this one; the launcher ends the others."""
        deadline = time.monotonic() + self._beat + ANSWER_SECONDS
        while answers < self._world_size and time.monotonic() < deadline:
            time.sleep(ANSWER_SECONDS / 50)
            answers = self._store.add(ANSWERS, 0)
        ranks = range(self._world_size)
        found = [self._read(f"watchdog/place/{rank}") for rank in ranks]
        places = [Place(**json.loads(text)) if text else None for text in found]
        names = [self._read(f"watchdog/name/{rank}") or f"rank {rank}" for rank in ranks]
        tell(message(places, names, self._seconds), self._store, 1)
        os._exit(1)

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    Attributes:
        num_phases, phase: see `Life`.
        call: by which it waits for other ranks; "" if it does not.
        stacks: of its threads, the main one first.
    """

    num_phases: int
    phase: str
    call: str
    stacks: str


def here() -> Place:
    """Where this process is."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = {thread: frame for thread, frame in sys._current_frames().items() if thread != threading.get_ident()}
    ordered = sorted(frames, key=lambda thread: thread != main)
    stacks = [_stack(names.get(thread, "a native thread"), frames[thread]) for thread in ordered]
    calls = [call for thread in ordered if (call := _waits_in(frames[thread]))]
    return Place(LIFE.num_phases, LIFE.phase, calls[0] if calls else "", "".join(stacks))


def _stack(thread: str, frame: FrameType) -> str:
    return f"{thread}:\n{''.join(traceback.format_stack(frame))}"


def _waits_in(frame: FrameType) -> str:
    """The call in which a thread waits for other ranks, and where that is; "" if it is somewhere else."""
    path = frame.f_code.co_filename
    start = max(path.rfind(f"/{folder}") for folder in WAITS)
    return f"{frame.f_code.co_name} ({path[start + 1 :]} line {frame.f_lineno})" if start >= 0 else ""


def message(places: Sequence[Place | None], names: Sequence[str], seconds: float) -> str:
    """What to say of a run that hangs: each place once, with the ranks that are there; what likely holds all up first.

    Args:
        places: of every rank; None of those that have not answered.
        names: what to call each.
    """
    ranks: dict[Place | None, list[int]] = {}
    for rank, place in enumerate(places):
        ranks.setdefault(place, []).append(rank)
    ordered = sorted(ranks, key=_innocence)
    suspects = [rank for rank, place in enumerate(places) if _innocence(place) == _innocence(ordered[0])]
    advice = f"look at rank {format_ranks(suspects)} first" if len(suspects) < len(places) else "all wait alike"
    first = f"error: no rank has given a sign of life for {seconds:g} s (trainer.hang_timeout_seconds): {advice}"
    return "\n".join([first, *(_described(place, ranks[place], names) for place in ordered)])


def _innocence(place: Place | None) -> tuple[bool, bool, int]:
    """The less, the likelier a rank there is what the others wait for: it is stopped, waits for none, or is behind."""
    return (True, bool(place.call), place.num_phases) if place is not None else (False, False, 0)


def _described(place: Place | None, ranks: Sequence[int], names: Sequence[str]) -> str:
    who = names[ranks[0]] if len(ranks) == 1 else f"ranks {format_ranks(ranks)}, as {names[ranks[0]]},"
    if place is None:
        return f"{who} does not answer: it was stopped, or native code in it lets no Python run"
    where = f"waits in {place.call}" if place.call else "waits for no other rank"
    return f"{who} is in {place.phase} and {where}:\n{textwrap.indent(place.stacks, '  ').rstrip()}"

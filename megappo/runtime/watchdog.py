"""Finds a run that hangs, reports what each rank is doing, and ends the run.

Each rank has a thread that adds the rank's new heartbeats to a number in torchrun's store every few seconds. The sum
shows whether any rank makes progress: ranks wait for each other, so one that hangs soon stops all, while ranks that
wait for a working one are no fault. The first rank to see the sum stand still for too long requests the stacks of
all ranks, by raising the sum, and prints them. This takes no collective.
"""

import json
import os
import re
import socket
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch.distributed as dist

from megappo.runtime.failure import name_ranks, report_message
from megappo.runtime.heartbeat import heartbeat

POLL_SECONDS = 10.0
ANSWER_SECONDS = 5.0
"""Time to wait for answers after the last rank must have seen the request."""
HEARTBEATS = "watchdog/heartbeats"
REQUEST = 2**40
"""Added to the sum of heartbeats, which stays far below it, by each rank that requests stacks."""
WAITING_CODE = re.compile("/((torch/distributed|torch/cuda|megatron)/.*)")
"""Code in which a thread waits for other ranks, or for its GPU, which waits for them."""


class Watchdog:
    """Watches the run from a thread until `stop`, or until the process ends.

    Args:
        store: torchrun's, shared by all ranks.
        seconds: time without a heartbeat of any rank after which the run is ended.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, seconds: float):
        self._store = store.clone()  # a store that the main thread waits with would not answer
        self._rank = rank
        self._world_size = world_size
        self._seconds = seconds
        self._poll_seconds = min(POLL_SECONDS, seconds / 4)
        self._store.set(f"watchdog/name/{rank}", f"rank {rank} (pid {os.getpid()}, {socket.gethostname()})")
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread: an interpreter that exits while it waits for the store aborts."""
        self._stopping.set()
        self._thread.join()

    def _watch(self) -> None:
        with suppress(dist.DistError):  # the store's node is gone, which the launchers report
            is_first = self._wait_for_request()
            if self._stopping.is_set():
                return
            self._store.set(f"watchdog/state/{self._rank}", json.dumps(rank_state()))
            if is_first:
                self._end_run()

    def _wait_for_request(self) -> bool:
        """Add heartbeats until a rank requests stacks; return whether this rank was the first. False after `stop`."""
        num_added = heartbeat.num_beats
        total = 0
        silence = 0.0
        while total < REQUEST and not self._stopping.wait(self._poll_seconds):
            num_beats = heartbeat.num_beats
            before = total
            total = self._store.add(HEARTBEATS, num_beats - num_added or int(heartbeat.is_waiting))
            num_added = num_beats
            # Counted in polls: by the clock, a run that was suspended as a whole would have been silent.
            silence = silence + self._poll_seconds if total == before else 0.0
            if silence >= self._seconds:
                return self._store.add(HEARTBEATS, REQUEST) < 2 * REQUEST
        return False

    def _end_run(self) -> None:
        """Report the states of all ranks and exit; the launcher ends the other ranks."""
        answers = [f"watchdog/state/{rank}" for rank in range(self._world_size)]
        deadline = time.monotonic() + self._poll_seconds + ANSWER_SECONDS
        while not self._store.check(answers) and time.monotonic() < deadline:
            time.sleep(ANSWER_SECONDS / 50)
        states = []
        names = []
        for rank, answer in enumerate(answers):
            text = self._read(answer)
            states.append(RankState(*json.loads(text)) if text else None)
            names.append(self._read(f"watchdog/name/{rank}") or f"rank {rank}")
        report_message(describe_hang(states, names, self._seconds), self._store, 1)
        os._exit(1)

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""


class RankState(NamedTuple):
    """State of a rank that hangs.

    Attributes:
        call: function in which it waits for other ranks; "" if it does not.
        num_phases, phase: see `Heartbeat`.
        stacks: stacks of its threads, the main thread's first.
    """

    call: str
    num_phases: int
    phase: str
    stacks: str


def rank_state() -> RankState:
    """Return the state of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    stacks = []
    calls = []
    for thread in sorted(frames, key=lambda thread: thread != threading.main_thread().ident):
        frame = frames[thread]
        # On a GPU a native thread of autograd may be the one that waits.
        stacks.append(f"{names.get(thread, 'a native thread')}:\n{''.join(traceback.format_stack(frame))}")
        if found := WAITING_CODE.search(frame.f_code.co_filename):
            calls.append(f"{frame.f_code.co_name} ({found[1]} line {frame.f_lineno})")
    return RankState(next(iter(calls), ""), heartbeat.num_phases, heartbeat.phase, "".join(stacks))


def describe_hang(states: Sequence[RankState | None], names: Sequence[str], seconds: float) -> str:
    """Describe a run that hangs: each state once, with its ranks; the state that likely stops all others first.

    Args:
        states: state of every rank; None for ranks that have not answered.
        names: name of every rank.
    """
    ranks: dict[RankState | None, list[int]] = {}
    for rank, state in enumerate(states):
        ranks.setdefault(state, []).append(rank)
    ordered = sorted(ranks, key=_suspicion)
    suspects = [rank for rank, state in enumerate(states) if _suspicion(state) == _suspicion(ordered[0])]
    advice = f"check {name_ranks(suspects)} first" if len(suspects) < len(states) else "all wait alike"
    first = f"error: no rank has made progress for {seconds:g} s (trainer.hang_timeout_seconds): {advice}"
    return "\n".join([first, *(_describe(state, ranks[state], names) for state in ordered)])


def _suspicion(state: RankState | None) -> tuple[int, int]:
    """Return a sort key: lower for ranks that the others are likelier to wait for, as they wait for none or are
    behind."""
    return (-1, 0) if state is None else (bool(state.call), state.num_phases)


def _describe(state: RankState | None, ranks: Sequence[int], names: Sequence[str]) -> str:
    who = names[ranks[0]] if len(ranks) == 1 else f"{name_ranks(ranks)}, as {names[ranks[0]]},"
    if state is None:
        return f"{who} does not answer: it was stopped, or native code in it blocks Python"
    where = f"waits in {state.call}" if state.call else "waits for no other rank"
    return f"{who} is in {state.phase} and {where}:\n{textwrap.indent(state.stacks, '  ').rstrip()}"

"""Heartbeats and last reports between the launchers of a run's nodes, through the run's store."""

import math
import threading
import time
from contextlib import suppress

from torch.distributed import DistError, Store

BEAT_SECONDS = 2.0
LOST_SECONDS = 30.0
"""A node that has given no sign for so long is lost."""
SUSPECT_SECONDS = 10.0
"""The same once a rank somewhere has lost its connection to another."""
FAREWELL_SECONDS = 5.0
"""Time that a launcher waits at its end for the store or, if it serves the store, for the others to read it."""


class Nodes:
    """Heartbeats to the other nodes of a run, and from the next one. The first node that ends reports why to all.

    Args:
        store: the run's; served by node 0, and gone with it.
        node: number of this node.
        name: what to call it in messages.
    """

    def __init__(self, store: Store, node: int, num_nodes: int, name: str):
        self._store = store.clone()  # the launcher holds its own connection while it waits for the others' end
        self._node, self._num_nodes, self._name = node, num_nodes, name
        self._head = self._verdict = ""
        self._suspects = False
        self._answered = math.inf  # when the store last did; not before all nodes have met
        threading.Thread(target=self._watch, name="nodes", daemon=True).start()

    def verdict(self) -> str:
        """Why the run cannot go on, of another node; "" while nothing is known."""
        if not self._verdict and time.monotonic() - self._answered > LOST_SECONDS:
            return f"{self._head or 'node 0'} has not answered for {LOST_SECONDS:g} s: it was killed or cut off"
        return self._verdict

    def wait_for_verdict(self) -> str:
        """The same after a rank here has lost another: waits for the verdict as long as there may be one."""
        self._suspects = True
        deadline = time.monotonic() + LOST_SECONDS + 2 * BEAT_SECONDS
        while not self.verdict() and time.monotonic() < deadline:
            time.sleep(BEAT_SECONDS / 10)
        return self.verdict()

    def leave(self, reason: str) -> None:
        """Report to the others why this node ends, unless another has ended before."""
        account = f"{self._name}: {reason}"
        farewell = threading.Thread(target=self._publish, name="farewell", args=[account], daemon=True)
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
            self._meet()
            while not self._verdict:
                time.sleep(BEAT_SECONDS)
                self._verdict = self._look()
        except DistError:
            self._verdict = f"{self._head or 'node 0'} has ended or cannot be reached"

    def _meet(self) -> None:
        self._store.set(f"name/{self._node}", self._name)
        self._head = self._store.get("name/0").decode()
        self._next = (self._node + 1) % self._num_nodes
        self._next_name = self._store.get(f"name/{self._next}").decode()
        self._beats, self._last_beat = 0, time.monotonic()
        self._answered = time.monotonic()

    def _look(self) -> str:
        """Give a sign, and look for those of the next node and for a farewell."""
        self._store.add(f"beats/{self._node}", 1)
        beats, now = self._store.add(f"beats/{self._next}", 0), time.monotonic()
        if beats != self._beats:
            self._beats, self._last_beat = beats, now
        self._answered = now
        if self._store.check(["ended"]):
            return self._store.get("ended").decode()
        if self._suspects:
            self._store.set("suspects", "yes")
        silence = SUSPECT_SECONDS if self._store.check(["suspects"]) else LOST_SECONDS
        if now - self._last_beat > silence:
            lost = f"{self._next_name} has not answered for {silence:g} s: it was killed or cut off"
            return self._store.compare_set("ended", "", lost).decode()
        return ""

"""A tracker in a thread of its own: a run waits for its calls no longer than a limit."""

import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread

from megappo.observe.loggers import Logger, describe
from megappo.runtime.heartbeat import heartbeat

Hook = Callable[[Logger], None]
LATE = "it has not returned in time, and is left out from now on"


class TrackerThread:
    """Calls hooks of a tracker, one after another."""

    def __init__(self, name: str, tracker: Logger) -> None:
        self._hooks: SimpleQueue[Hook] = SimpleQueue()
        self._faults: SimpleQueue[str] = SimpleQueue()
        Thread(target=self._work, args=[tracker], name=f"tracker {name}", daemon=True).start()
        self.begin = self._hooks.put

    def fault(self, deadline: float) -> str:
        """Return why the call that was begun has failed; "" if it has not, LATE after a deadline by
        `time.monotonic`."""
        with heartbeat.waiting():
            try:
                return self._faults.get(timeout=max(deadline - time.monotonic(), 0))
            except Empty:
                return LATE

    def _work(self, tracker: Logger) -> None:
        while True:
            hook = self._hooks.get()
            try:
                hook(tracker)
                self._faults.put("")
            except (Exception, SystemExit) as error:
                self._faults.put(describe(error))

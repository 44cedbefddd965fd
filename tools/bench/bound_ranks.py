"""An extension for overlap.py: binds each rank, with its engine and workers, to a core of its own."""

import os
import time
from contextlib import suppress
from threading import Thread

import psutil


def bind_children() -> None:
    """Bind processes as they start. An engine would otherwise use all cores."""
    while True:
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            with suppress(OSError, psutil.Error):  # it has ended meanwhile
                for thread in process.threads():
                    os.sched_setaffinity(thread.id, {int(os.environ["LOCAL_RANK"])})
        time.sleep(1)


if "LOCAL_RANK" in os.environ:  # the launcher has none
    Thread(target=bind_children, daemon=True).start()

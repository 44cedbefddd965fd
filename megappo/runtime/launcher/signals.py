"""The signals that end a run. The standard library alone: they are handled before anything else is imported."""

import os
import signal
import sys
import threading

ENDING = tuple(signal.Signals[f"SIG{name}"] for name in ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2"))

ASKING = (signal.SIGTERM, signal.SIGUSR1)
"""The signals by which batch systems announce the end of a job's time."""


def ending_signals() -> list[signal.Signals]:
    """Return the signals that this process was not started to ignore, as nohup ignores SIGHUP."""
    return [number for number in ENDING if number not in IGNORED]


def end_at_once() -> None:
    """Print the signal's name and exit, even while the process waits in foreign code, which runs no Python handlers.

    `signal.set_wakeup_fd(-1)` revokes it.
    """
    signalled, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    for number in ending_signals():
        signal.signal(number, lambda number, frame: None)  # the wakeup needs a handler
    threading.Thread(target=_wait_for, name="signals", args=[signalled], daemon=True).start()


def _wait_for(signalled: int) -> None:
    number = os.read(signalled, 1)[0]
    print(f"ended by {signal.Signals(number).name}", file=sys.stderr, flush=True)
    os._exit(128 + number)


IGNORED = frozenset({signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else ())

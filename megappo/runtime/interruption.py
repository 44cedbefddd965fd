"""Signals and time limits that end a run: the launcher passes them on, and each rank saves and exits.

The standard library alone, as signals are handled before anything else is imported.
"""

import math
import os
import re
import signal
import sys
import threading
import time
from types import FrameType

SIGNAL = signal.SIGUSR1
"""The signal by which the launcher stops a rank."""
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that end a run."""
ASKING = (signal.SIGTERM, signal.SIGUSR1)
"""The signals by which batch systems announce the end of a job's time."""
IGNORES_HANGUP = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
"""This process was started to ignore SIGHUP, as by nohup."""
EXIT_LOST_RANK = 3
"""Exit code of a rank that ended, without an error message, because another rank was lost."""
EXIT_UNSAVED = 4
"""Exit code of a rank that a signal stopped before there was anything to save: the run would restart from nothing."""
EXIT_AGAIN = 75
"""Exit code of a run that has saved what it had before its last step: start it again (EX_TEMPFAIL of sysexits.h)."""
COMMAND = "MEGAPPO_COMMAND"
"""Environment variable: the command that started the run, as its user wrote it."""
LAUNCHER = "MEGAPPO_LAUNCHER"
"""Environment variable: the pid of a launcher that reports how ranks ended that could not report it themselves."""
LAUNCHER_STARTED = "MEGAPPO_LAUNCHER_STARTED"
"""Environment variable: when the launcher was, which may start ranks again. In seconds since the epoch."""
_STARTED = time.time()


class Interrupted(Exception):
    """A run ends before its last step, with everything saved; raised on all ranks. The message is the reason."""


class Interruption:
    """The request to this rank to save and exit. While there is nothing to save, a signal ends it at once."""

    def __init__(self) -> None:
        self._reason = ""
        self._has_something_to_save = False
        self._exit_code = EXIT_AGAIN
        self._deadline = math.inf

    def listen(self) -> None:
        """Handle the signal from now on."""
        signal.signal(SIGNAL, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {SIGNAL})  # its launcher may have held it back until now

    def begin_saving(self, deadline: float) -> None:
        """Let neither a signal nor the deadline end this rank from now on: the caller of `reason` must end it.

        Args:
            deadline: time in seconds since the epoch.
        """
        self._has_something_to_save = True
        self._deadline = deadline

    def never_saves(self) -> None:
        """Request no restart by the exit code: a run that a signal stops now would restart from nothing."""
        self._exit_code = EXIT_UNSAVED

    def end_saving(self) -> None:
        """Let the signal end this rank at once again."""
        self._has_something_to_save = False

    @property
    def reason(self) -> str:
        """Return why this rank should stop; "" if it should continue."""
        if not self._reason and time.time() > self._deadline:
            self._reason = "the time limit"
        return self._reason

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._reason = self._reason or "a signal"  # the launcher's, whichever it has had itself
        if not self._has_something_to_save:
            os._exit(self._exit_code)  # what it has started ends with it


INTERRUPTION = Interruption()
"""The interruption of this process."""


def deadline(time_limit: float | None, grace: float) -> float:
    """Return when a run should begin to save, in seconds since the epoch; infinite without a limit.

    Args:
        time_limit: seconds that the job may take, from its allocation's start on: SLURM_JOB_START_TIME where that is
            set, else the launcher's, else this process's. None: until SLURM_JOB_END_TIME, where that is set.
        grace: seconds before the limit that saving may take.
    """
    if time_limit is not None:
        return (_moment("SLURM_JOB_START_TIME") or _moment(LAUNCHER_STARTED) or _STARTED) + time_limit - grace
    return (_moment("SLURM_JOB_END_TIME") or math.inf) - grace


def _moment(name: str) -> float | None:
    """Return the seconds since the epoch that a variable holds; None where it is not set.

    Raises:
        ValueError: it holds something else.
    """
    text = os.environ.get(name)
    if text and not re.fullmatch(r"[\d.]+", text):
        raise ValueError(f"the variable {name} is {text!r}, expected seconds since 1970: unset it")
    return float(text) if text else None


def ending_signals() -> list[signal.Signals]:
    """Return the signals that end a launcher, and that it was not started to ignore."""
    return [number for number in ENDING if number != signal.SIGHUP or not IGNORES_HANGUP]


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

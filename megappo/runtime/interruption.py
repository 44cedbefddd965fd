"""A signal from the launcher, or the time limit, stops a run before its last step: each rank saves and exits.

The standard library alone, as the signal is handled before anything else is imported.
"""

import math
import os
import signal
import time
from types import FrameType

from megappo.runtime.variables import moment

SIGNAL = signal.SIGUSR1
"""The signal by which the launcher stops a rank."""
EXIT_AGAIN = 75
"""Exit code of a run that has saved what it had before its last step: start it again (EX_TEMPFAIL of sysexits.h)."""
EXIT_UNSAVED = 4
"""Exit code of a rank that a signal stopped before there was anything to save: the run would restart from nothing."""


class Interrupted(Exception):
    """A run ends before its last step, with everything saved; raised on all ranks. The message is the reason."""


class Interruption:
    """The request to this rank to save and exit. While there is nothing to save, a signal ends it at once."""

    def __init__(self) -> None:
        self._reason = ""
        self._has_something_to_save = False
        self._exit_code = EXIT_AGAIN
        self._deadline = float("inf")

    def listen(self) -> None:
        """Handle the signal from now on."""
        signal.signal(SIGNAL, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {SIGNAL})  # its launcher may have held it back until now

    def begin_saving(self, deadline: float) -> None:
        """From now on neither a signal nor the deadline ends this rank: the caller of `reason` must.

        Args:
            deadline: in seconds since the epoch.
        """
        self._has_something_to_save = True
        self._deadline = deadline

    def never_saves(self) -> None:
        """A run that a signal stops now would restart from nothing, so its exit code does not request a restart."""
        self._exit_code = EXIT_UNSAVED

    def end_saving(self) -> None:
        """The signal ends this rank at once again."""
        self._has_something_to_save = False

    @property
    def reason(self) -> str:
        """Return why this rank should stop; "" if it should go on."""
        if not self._reason and time.time() > self._deadline:
            self._reason = "the time limit"
        return self._reason

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._reason = self._reason or "a signal"  # the launcher's, whichever it has had itself
        if not self._has_something_to_save:
            os._exit(self._exit_code)  # what it has started ends with it


INTERRUPTION = Interruption()
"""This process's."""


LAUNCHER_STARTED = "MEGAPPO_LAUNCHER_STARTED"
"""Environment variable: when the launcher was, which may start ranks again. In seconds since the epoch."""
_STARTED = time.time()


def deadline(time_limit: float | None, grace: float) -> float:
    """When a run should begin to save, in seconds since the epoch; infinite without a limit.

    Args:
        time_limit: seconds that the job may take, from its allocation's start on: SLURM_JOB_START_TIME where that is
            set, else the launcher's, else this process's. None: until SLURM_JOB_END_TIME, where that is set.
        grace: seconds before the limit that saving may take.
    """
    if time_limit is not None:
        return (moment("SLURM_JOB_START_TIME") or moment(LAUNCHER_STARTED) or _STARTED) + time_limit - grace
    return (moment("SLURM_JOB_END_TIME") or math.inf) - grace

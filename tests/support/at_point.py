"""Extension (trainer.extensions) that injects a fault into a run at an exact point.

The point is a call of one of the program's functions on one rank, before or after it runs. The program itself is not
changed. The variable AT_POINT holds the point and the fault as JSON: a `faults.Point` and a name of FAULTS.
"""

import contextlib
import functools
import importlib
import itertools
import json
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil

from megappo.engines import generations
from megappo.runtime.interruption import INTERRUPTION

AT = json.loads(os.environ["AT_POINT"])
FOR_EVER = 10**6


def kill_rank(result: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_launcher(result: object) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(FOR_EVER)  # its end is this process's


def kill_all(result: object) -> None:
    launcher = psutil.Process(os.getppid())
    for process in launcher.children():
        if process.pid != os.getpid():
            process.kill()
    launcher.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def kill_engine(result: object) -> None:
    """Kill the HTTP server of the engine that this rank owns."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended by now
            if "megappo.engines.server" in process.cmdline():
                process.kill()


def signal_launcher(number: signal.Signals, result: object) -> object:
    """Send the launcher a signal, which it passes on to the ranks, and wait until this rank has received it.

    The wait times out where the main thread is busy and cannot handle the signal.
    """
    os.kill(os.getppid(), number)
    deadline = time.monotonic() + 5
    while not INTERRUPTION.reason and time.monotonic() < deadline:
        time.sleep(0.01)
    return result


def stop(result: object) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep(result: object) -> None:
    time.sleep(FOR_EVER)


def nan(result: tuple) -> tuple:
    """Make the loss NaN in the result of a loss function."""
    loss, *others = result
    return loss * math.nan, *others


def other_policy(result: generations.Generation) -> generations.Generation:
    """Return the generation of an engine with other weights: shift the log-probs."""
    return replace(result, log_probs=[value - 1 for value in result.log_probs])


def nonsense(result: generations.Generation) -> generations.Generation:
    """Check a malformed response as the client does."""
    return generations.checked({"error": "?"})


SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
FAULTS: dict[str, Callable[[Any], Any]] = {
    "kill rank": kill_rank,
    "kill launcher": kill_launcher,
    "kill all": kill_all,
    **{number.name: functools.partial(signal_launcher, number) for number in SIGNALS},
    "kill engine": kill_engine,
    "stop": stop,
    "sleep": sleep,
    "nan": nan,
    "other policy": other_policy,
    "nonsense": nonsense,
}


def watched(function: Callable) -> Callable:
    """Wrap a function so that the fault happens at the given call, or from that call on."""
    calls = itertools.count(1)

    @functools.wraps(function)
    def at_point(*args: object, **kwargs: object) -> object:
        number = next(calls)
        if number < AT["call"] or (number > AT["call"] and not AT["again"]):
            return function(*args, **kwargs)
        result = function(*args, **kwargs) if AT["after"] else None
        os.write(2, f"\nat the point at {time.time():.3f}\n".encode())
        result = FAULTS[AT["fault"]](result)
        return result if AT["after"] else function(*args, **kwargs)

    return at_point


if int(os.environ["RANK"]) == AT["rank"]:
    module, _, path = AT["function"].partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    setattr(owner, name, watched(getattr(owner, name)))

"""A file for trainer.extensions, by which something happens to a run at an exact point: at a call of one of the
program's functions on one rank, before it or after. The program itself stays as it is.

AT_POINT says which, and what happens: a `faults.Point` and a name of FAULTS, as JSON.
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
    """Which this rank owns: what of it serves HTTP."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended by now
            if "megappo.engines.server" in process.cmdline():
                process.kill()


def ask(number: signal.Signals, result: object) -> object:
    """The launcher asks the ranks then; where there is a main thread to hear it, this one has by its return."""
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
    """Of what a loss function returns."""
    loss, *others = result
    return loss * math.nan, *others


def other_policy(result: generations.Generation) -> generations.Generation:
    """What an engine with other weights would answer."""
    return replace(result, log_probs=[value - 1 for value in result.log_probs])


def nonsense(result: generations.Generation) -> generations.Generation:
    """What the client makes of an answer that is none."""
    return generations.checked({"error": "?"})


FAULTS: dict[str, Callable[[Any], Any]] = {
    "kill rank": kill_rank,
    "kill launcher": kill_launcher,
    "kill all": kill_all,
    **{number.name: functools.partial(ask, number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)},
    "kill engine": kill_engine,
    "stop": stop,
    "sleep": sleep,
    "nan": nan,
    "other policy": other_policy,
    "nonsense": nonsense,
}


def watched(function: Callable) -> Callable:
    """The function, with the fault at its call of that number, or from that on."""
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

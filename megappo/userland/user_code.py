"""What worker processes that run users' code have in common: the standard library alone, so they start at once."""

import importlib
import os
import resource
import socket
import traceback
from collections.abc import Callable
from typing import Any

from megappo.user_modules import Home, home_of
from megappo.userland.forms import BadFunction

MAX_MESSAGE_CHARACTERS = 2000
MAX_FRAMES = 10
MAX_FRAME_CHARACTERS = 500
TELLING_BYTES = 2**26
"""Beyond the limit, to say that it was reached."""


def own_connection() -> socket.socket:
    """The socket on a descriptor of its own, which the user's processes do not inherit; they find an empty input."""
    connection = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    return connection


def attempt(work: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """(result, ""), or (None, what went wrong)."""
    try:
        return work(*arguments), ""
    except BadFunction as error:
        return None, str(error)
    except BaseException as error:  # SystemExit too: user code must not end the worker without a word
        limits = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limits[1], limits[1]))  # what the error holds may be all it may take
        reason = told(error)
        traceback.clear_frames(error.__traceback__)  # which hold what has been taken
        resource.setrlimit(resource.RLIMIT_DATA, limits)
        return None, reason


def limit_memory(num_bytes: int) -> None:
    """Have the kernel refuse this process and those that it starts more memory of their own than so much each."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most != resource.RLIM_INFINITY:  # whoever started the run has set it: it can only be lowered
        num_bytes = min(num_bytes, most - TELLING_BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes + TELLING_BYTES))


def told(error: BaseException) -> str:
    """An exception, where it was raised and what it came of, at a length that can be read."""
    frames = [cut(frame, MAX_FRAME_CHARACTERS) for frame in traceback.format_tb(error.__traceback__, -MAX_FRAMES)]
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    origin = [f"It came of {named(cause)}"] if cause else []
    return "\n".join([f"raised {named(error)}", *(frame.rstrip() for frame in frames), *origin])


def named(error: BaseException) -> str:
    """An exception's type and message, whatever its own code does."""
    try:
        message = str(error)
    except Exception as another:
        message = f"(its message cannot be read: {type(another).__name__})"
    return f"{type(error).__name__}: {cut(message, MAX_MESSAGE_CHARACTERS)}"


def cut(text: str, length: int) -> str:
    """The beginning of a text that is too long, and how long it is."""
    return text if len(text) <= length else f"{text[:length]} ... ({len(text)} characters)"


def home(source: str) -> Home | None:
    """Return the folder of a file (FILE.py), or the working folder if that holds the module; None for an installed
    module."""
    if source.endswith(".py"):
        return home_of(os.path.dirname(source))
    here = home_of(os.getcwd())
    return here if here.find_spec(source.partition(".")[0]) else None


def load(source: str, name: str) -> Any:
    """What a file (FILE.py) or a module defines under a name."""
    folder = home(source)
    if folder is not None:
        folder.enter()
    module = folder.load(source) if source.endswith(".py") else importlib.import_module(source)
    function = getattr(module, name, None)
    if not callable(function):
        own = (key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__)
        known = sorted(key for key in own if callable(vars(module)[key]) and not key.startswith("_"))
        raise BadFunction(f"does not exist: the file defines {cut(', '.join(known), 1000) or 'no function'}")
    return function

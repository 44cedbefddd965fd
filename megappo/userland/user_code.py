"""Loading user code in worker processes, and describing its errors. Uses the standard library alone, so that a
worker starts at once."""

import importlib
import os
import resource
import traceback
from collections.abc import Callable
from itertools import dropwhile
from typing import Any

from megappo.user_modules import Home, home_of

MAX_MESSAGE_CHARACTERS = 2000
MAX_FRAMES = 10
MAX_FRAME_CHARACTERS = 500
SPARE_BYTES = 2**26
"""Beyond the memory limit, to report that it was reached."""
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
OWN_FOLDERS = (os.path.dirname(__file__), os.path.join(_PACKAGE, "agents"), _PACKAGE)
"""The folders of the worker, of agents' hosts, and of `user_modules`."""
MAX_CHOICES = 128
"""Turns that one request of an agent may ask for."""
JsonObject = dict[str, Any]
"""Anything by name: what JSON and keyword arguments hold."""


class BadFunction(Exception):
    """User code cannot be used, or returned something wrong. The message follows the name of the code."""


def describe(error: BaseException) -> str:
    """Return what went wrong and where, cut to a readable length."""
    if isinstance(error, BadFunction):
        return str(error)
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limits[1], limits[1]))  # the error's frames may hold all that is allowed
    frames = list(dropwhile(_is_of_worker, traceback.extract_tb(error.__traceback__)))[-MAX_FRAMES:]
    shown = [cut(frame, MAX_FRAME_CHARACTERS).rstrip() for frame in traceback.format_list(frames)]
    lines = [f"raised {named(error)}", *shown]
    if cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        lines.append(f"caused by {named(cause)}")
    traceback.clear_frames(error.__traceback__)
    resource.setrlimit(resource.RLIMIT_DATA, limits)
    return "\n".join(lines)


def _is_of_worker(frame: traceback.FrameSummary) -> bool:
    """Return whether a frame of a traceback is in the worker, which calls user code, or in Python's import."""
    folder = os.path.dirname(frame.filename)
    is_import = frame.filename.startswith("<frozen importlib") or os.path.basename(folder) == "importlib"
    return is_import or folder in OWN_FOLDERS


def limit_memory(num_bytes: int) -> None:
    """Limit the memory of this process, and of each that it starts."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most != resource.RLIM_INFINITY:  # whoever started the run has set it: it can only be lowered
        num_bytes = min(num_bytes, most - SPARE_BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes + SPARE_BYTES))


def named(error: BaseException) -> str:
    """Return an exception's type and message, whatever its own code does."""
    try:
        message = str(error)
    except Exception as another:
        message = f"(its message cannot be read: {type(another).__name__})"
    return f"{type(error).__name__}: {cut(message, MAX_MESSAGE_CHARACTERS)}"


def cut(text: str, length: int) -> str:
    """Return the beginning of a long text with its number of characters."""
    return text if len(text) <= length else f"{text[:length]} ... ({len(text)} characters)"


def home(source: str) -> Home | None:
    """Return the folder of a file (FILE.py), or the working folder if that holds the module; None for an installed
    module."""
    if source.endswith(".py"):
        return home_of(os.path.dirname(source))
    here = home_of(os.getcwd())
    return here if here.find_spec(source.partition(".")[0]) else None


def load(source: str, name: str) -> Callable[..., Any]:
    """Return the function or class of a file (FILE.py) or a module.

    Raises:
        BadFunction: it defines no such name.
    """
    folder = home(source)
    if folder is not None:
        folder.enter()
    module = folder.load(source) if source.endswith(".py") else importlib.import_module(source)
    loaded = getattr(module, name, None)
    if not callable(loaded):
        functions = {key: value for key, value in vars(module).items() if callable(value)}
        own = sorted(key for key, value in functions.items() if value.__module__ == module.__name__)
        raise BadFunction(f"does not exist: the file defines {cut(', '.join(own), 1000) or 'no function'}")
    return loaded

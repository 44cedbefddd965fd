"""People's own Python files, run before a config is read: what they register belongs to it like the program's own."""

import functools
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic_core import PydanticCustomError

from megappo.config.coercion import as_declared
from megappo.config.errors import looked_in, shorten
from megappo.config.kinds import as_path
from megappo.user_modules import home_of, share_all

KEY = "trainer.extensions"


def run_extensions(values: Mapping[str, object], before: Callable[[], None] | None = None) -> list[str]:
    """Run the files that a config's values name, each once in a process; what went wrong, one line each.

    Values of a wrong kind are left to the schema.

    Args:
        before: called once before the first of them.
    """
    trainer = values.get("trainer")
    files = as_declared(trainer.get("extensions"), tuple[str, ...]) if isinstance(trainer, dict) else ()
    named = [file for file in files if isinstance(file, str)] if isinstance(files, tuple) else []
    if named and before:
        before()
    errors = []
    for file in named:
        try:
            path = Path(as_path(file))
        except PydanticCustomError:  # left to the schema
            continue
        if not path.is_file():
            errors.append(f"{KEY}: no file {shorten(file)}{looked_in(file)}: create it or correct the path")
            continue
        try:
            _run(str(path.resolve()))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too, and exceptions that libraries keep from `except Exception`
            errors.append(f"{KEY}: {file} raised {_told(error, str(path.resolve()))}: correct the file")
    share_all()
    return errors


@functools.cache
def _run(path: str) -> None:
    """Import a file, with the modules of its folder in place of another's."""
    if not path.endswith(".py"):
        raise ImportError(f"{Path(path).name} is no Python file")
    home = home_of(str(Path(path).parent))
    home.enter()
    home.load(path)


def _told(error: BaseException, path: str) -> str:
    """An exception, and the last line of the file that it came through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    where = f" (line {lines[-1]})" if lines else ""
    try:
        text = str(error)
    except Exception as another:  # of the extension's own class
        text = f"(its message cannot be read: {type(another).__name__})"
    return shorten(f"{type(error).__name__}{': ' if text else ''}{text}") + where

"""Base class of errors that people can act on, and the commands that they name. The standard library alone."""

import sys
from pathlib import Path

EXIT_CONFIG = 2
"""Exit code of a rank whose config cannot work."""
EXIT_UNHEALTHY = 5
"""Exit code of a run that trainer.stop_on ended, with everything saved."""


class ActionableError(Exception):
    """An error whose message names what happened, to what, and what to do. It is shown without a traceback.

    Attributes:
        exit_code: exit code of a process that ends with this error.
        is_consequence: another rank failed first, with the error that matters.
    """

    exit_code = 1
    is_consequence = False

    def report(self, rank: int) -> str:
        """Return the lines to print when the error ends this rank of a run."""
        return f"error (rank {rank}): {escaped_lines(str(self))}"


def escaped(text: str) -> str:
    """Return the text with its unprintable characters escaped, so that no text of a model, a file or a server commands
    the terminal."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def escaped_lines(text: str) -> str:
    """Return the text with its unprintable characters escaped, except for line breaks."""
    return "\n".join(map(escaped, text.split("\n")))


def own_command(name: str) -> str:
    """Return how to call a program of this Python's environment from the working folder, or its name alone where the
    environment lacks it."""
    program, here = Path(sys.executable).with_name(name), Path.cwd()
    if not program.exists():
        return name
    return str(program.relative_to(here) if program.is_relative_to(here) else program)

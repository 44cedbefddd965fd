"""The error of a run that cannot start as configured."""

from pathlib import Path

from megappo.errors import EXIT_CONFIG, ActionableError

LONGEST_VALUE = 80
"""Characters of a wrong value that an error repeats."""
LONGEST_ERROR = 1000
"""Characters of an error that are printed; of a longer one (a path of thousands, say) the middle is left out."""
MOST_ERRORS = 20
"""Errors that are printed of one config."""


class ConfigError(ActionableError, ValueError):
    """Everything wrong with a config, found together.

    Attributes:
        errors: one printable line each, naming the key, what was found, what was expected and what to do.
    """

    exit_code = EXIT_CONFIG

    def __init__(self, *errors: str):
        found = [printable(error) for error in errors]
        self.errors = (*found[:MOST_ERRORS], *(["and more: correct these first"] if found[MOST_ERRORS:] else ()))
        super().__init__("\n".join(self.errors))

    def report(self, rank: int) -> str:
        """Return a line for each error. All ranks find the same, so none is named."""
        return "\n".join(f"error: {line}" for line in self.errors)


def printable(text: str) -> str:
    """The text on one line that any terminal shows as it is: what is not printable is escaped, a long middle left out.

    Paths and arguments of the command line may hold anything, bytes that are not UTF-8 (lone surrogates to Python)
    too.
    """
    if len(text) > LONGEST_ERROR:
        end = LONGEST_ERROR // 2
        text = f"{text[:end]} ... {text[-end:]}"
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def shorten(text: str) -> str:
    """The text as an error repeats it."""
    return text if len(text) <= LONGEST_VALUE else text[:LONGEST_VALUE] + "..."


def looked_in(path: str | Path) -> str:
    """Where a path that is not there was looked for, to follow it in an error, if the path itself does not say."""
    return "" if Path(path).is_absolute() else f" (looked in {Path.cwd()})"

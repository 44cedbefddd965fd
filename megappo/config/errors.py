"""The error of a run that cannot start as configured."""

from collections.abc import Iterable


class ConfigError(ValueError):
    """Everything wrong with a config, found together.

    Attributes:
        errors: one line each, naming the key, what was found, what was expected and what to do.
    """

    def __init__(self, errors: Iterable[str]):
        self.errors = tuple(errors)
        super().__init__("\n".join(self.errors))

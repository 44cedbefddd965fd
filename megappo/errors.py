"""Base class of errors that people can act on. The standard library alone."""

EXIT_CONFIG = 2
"""Exit code of a rank whose config cannot work."""
EXIT_UNHEALTHY = 5
"""Exit code of a run that trainer.stop_on ended, with everything saved."""


class ActionableError(Exception):
    """An error whose message names what happened, to what, and what to do. It is shown without a traceback.

    Attributes:
        exit_code: of a process that ends with it.
        is_consequence: another rank failed first, with the error that matters.
    """

    exit_code = 1
    is_consequence = False

    def report(self, rank: int) -> str:
        """Return the lines to print when the error ends this rank of a run."""
        return f"error (rank {rank}): {self}"

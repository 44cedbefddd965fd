"""A checkpoint that is being written."""

import threading
from collections.abc import Sequence
from pathlib import Path

from megappo.checkpoint.sharded import Writing


class Saving:
    """A checkpoint that is being written, by a thread of every rank while training goes on, or at once.

    Args:
        path: its name when it is complete. partial: its name until then.
        writings: of all components, in the same order on every rank; None of those that are not on this one.
    Attributes:
        error: the exception that ended the thread, other than those that `Writing.finish` raises.
    """

    def __init__(self, path: Path, partial: Path, writings: Sequence[Writing | None]):
        self.path, self.partial, self.writings = path, partial, writings
        self.error: Exception | None = None
        # A process that exits does not wait for it: an incomplete checkpoint has no name to resume from.
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)

    @property
    def in_background(self) -> bool:
        """Return whether a thread writes."""
        return self._thread.ident is not None

    def start(self) -> None:
        """Start the thread that writes."""
        self._thread.start()

    @property
    def is_written(self) -> bool:
        """Return whether this rank has written its files or failed to."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait for this rank's files."""
        if self.in_background:
            self._thread.join()

    @property
    def sums(self) -> dict[str, str]:
        """Path -> sum of each file that this rank wrote."""
        found = [writing.sums for writing in self.writings if writing is not None]
        return {path: digest for sums in found for path, digest in sums.items()}

    def _write(self) -> None:
        try:
            for writing in self.writings:
                if writing is not None:
                    writing.write()
        except Exception as error:
            self.error = error

"""Importing what takes seconds."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Import in the block without the garbage collector: it would take up to a quarter of the time, and find nothing.

    It leaves alone later, too, what was made in it: modules stay.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()

"""A config file over those that its `base:` leads to."""

import os
from dataclasses import replace
from pathlib import Path

from pydantic_core import PydanticCustomError

from megappo.config.errors import ConfigError, shorten
from megappo.config.kinds import as_path
from megappo.config.reading import Layer, parse
from megappo.config.text_files import TextFileError, read_text

LARGEST_FILE = 256 * 2**10
"""Bytes of a config; one with every key has 5 KiB."""
MOST_FILES = 100
"""Files that one config's bases may lead to."""


def read_file(path: Path) -> Layer:
    """A YAML file over the files its `base:` names (relative to it; of several, later ones win)."""
    return _Files().read(path)


class _Files:
    """A file and those that `base:` leads to from it: each is read once, however many name it."""

    def __init__(self) -> None:
        self._layers: dict[str, Layer] = {}
        self._num_read = 0

    def read(self, path: Path, readers: tuple[Path, ...] = (), named_at: str = "") -> Layer:
        """A file over its bases.

        Args:
            readers: the files whose `base:` led here, outermost first.
            named_at: where the last of them did.
        """
        real = os.path.realpath(path)
        if real in self._layers:
            return replace(self._layers[real], errors=())  # they have been told
        if real in map(os.path.realpath, readers):
            circle = " -> ".join(map(str, (*readers, path)))
            return _unreadable(f"{named_at}: base: goes round in circles: {circle}: remove one")
        self._num_read += 1
        if self._num_read > MOST_FILES:
            return _unreadable(f"{named_at}: base: leads to more than {MOST_FILES} files: merge some of them")
        try:
            text = read_text(path, LARGEST_FILE)
        except TextFileError as error:
            return _unreadable(f"{named_at}: base: cannot read {path}: {error}" if readers else f"{path}: {error}")
        self._layers[real] = self._over_bases(path, text, (*readers, path))
        return self._layers[real]

    def _over_bases(self, path: Path, text: str, readers: tuple[Path, ...]) -> Layer:
        try:
            layer = parse(text, (), lambda line: f"{path}:{line}")
        except ConfigError as error:
            return _unreadable(*error.errors)
        named_at = layer.origins.get(("base",), str(path))
        bases = layer.values.pop("base", [])
        bases = [bases] if isinstance(bases, str) else bases
        if not isinstance(bases, list) or not all(isinstance(base, str) and base.isprintable() for base in bases):
            return _unreadable(f"{named_at}: base: expected a path or a list of paths, found {shorten(repr(bases))}")
        below = Layer({})
        for base in bases:
            try:
                file = path.parent / as_path(base)
            except PydanticCustomError as error:
                return _unreadable(f"{named_at}: base: expected a path, found {shorten(repr(base))} ({error})")
            below = self.read(file, readers, named_at).over(below)
        return layer.over(below)


def _unreadable(*errors: str) -> Layer:
    return Layer({}, errors=errors, complete=False)

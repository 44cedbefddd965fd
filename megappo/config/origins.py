"""Where the keys of a config were written, so that errors about it, found whenever, can say so."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from megappo.config.reading import KeyPath

_KEYS = re.compile(r"^[a-z_]+(?=:)|[a-z_]+(?:\.[\w-]+)+")
"""What may be a key in the text of an error: a section only at its start, as its name may be a word like any other."""


@dataclass(frozen=True)
class Origins:
    """Where keys were written. Ignored when configs are compared.

    Attributes:
        file: the config; "" where there is none.
        places: key -> `run.yaml:12` or `command line`; keys at their defaults are not in it. What wins comes first: the
            command line, then the file, then its bases.
    """

    file: str = field(default="", compare=False)
    places: Mapping[KeyPath, str] = field(default_factory=dict, compare=False)

    def of(self, path: KeyPath) -> str:
        """The place of a key, or of what it would be in; at last, the file."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, self.file)

    def rank(self, key: str) -> int:
        """The place of a key's source in the order of precedence: 0 wins, the largest: no source."""
        sources = [place.rpartition(":")[0] for place in self.places.values()]
        place = self.places.get(tuple(key.split(".")))
        return len(sources) if place is None else sources.index(place.rpartition(":")[0])

    def located(self, error: str) -> str:
        """The error behind the place of the first key it names that was written anywhere, else behind the file."""
        named = [tuple(key.split(".")) for key in _KEYS.findall(error)]
        named += [path[:-1] for path in named if len(path) > 3]  # of eval.datasets.NAME.n, what has that name
        place = next((self.places[path] for path in named if path in self.places), self.file)
        return f"{place}: {error}" if place else error

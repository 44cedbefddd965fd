"""Users' Python files as modules: under their own names, with their own folders before installed packages.

The modules of a folder are in sys.modules while its code runs, and out of it while another folder's does, so that two
folders may each have a `utils.py`. A process that multiprocessing spawns finds them by sys.path, which it gets from its
parent. The standard library alone.
"""

import functools
import importlib
import importlib.util
import os
import pkgutil
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

RESERVED = sys.stdlib_module_names | {"megappo", "__main__"}
"""Names of the same modules everywhere: a user's file with such a name does not hide them."""
ENTRY = "/*.py"
"""Suffix of a folder in sys.path that makes the entry a `Home`'s, and no other finder's."""
DOT = ":"
"""Replaces the dots in a module that is named after its whole file."""
_HOMES: list["Home"] = []


class Home:
    """A folder with a user's Python files, and the finder of its modules for an entry of sys.path.

    Args:
        folder: absolute.
    """

    def __init__(self, folder: str):
        self.folder = folder
        self.entry = folder + ENTRY
        self.away: dict[str, ModuleType] = {}
        self._finder = pkgutil.get_importer(folder)
        sys.path_importer_cache[self.entry] = self
        _HOMES.append(self)

    def find_spec(self, name: str, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of a module of this folder; None for others."""
        if DOT in name:
            return importlib.util.spec_from_file_location(name, os.path.join(self.folder, name.replace(DOT, ".")))
        return None if name in RESERVED else self._finder.find_spec(name)

    def enter(self) -> None:
        """Put the modules of this folder in place of the modules of all other folders."""
        if sys.path[0] != self.entry:
            _leave_all()
            sys.modules.update(self.away)
            sys.path.insert(0, self.entry)

    def load(self, file: str) -> ModuleType:
        """Import a file of this folder, which has been entered; as FILE:py where FILE is another module's name."""
        name = os.path.basename(file).removesuffix(".py")
        is_own = name not in RESERVED and "." not in name and importlib.util.find_spec(name).origin == file
        return importlib.import_module(name if is_own else f"{name}.py".replace(".", DOT))

    def leave(self) -> None:
        """Take the modules of this folder out of sys.modules."""
        self.away |= {name: sys.modules.pop(name) for name in list(filter(self._has, sys.modules))}
        sys.path[:] = [entry for entry in sys.path if entry != self.entry]

    def _has(self, name: str) -> bool:
        package = name.partition(".")[0]
        module = sys.modules.get(package)
        places = [*getattr(module, "__path__", ()), getattr(module, "__file__", "")]
        return package not in RESERVED and os.path.dirname(str(places[0])) == self.folder


home_of = functools.cache(Home)
"""Return the `Home` of an absolute folder, the same at each call."""


@functools.cache
def import_file(path: str) -> ModuleType:
    """Import a Python file, once, with the modules of its folder in place of another's.

    Args:
        path: absolute.
    """
    if not path.endswith(".py") or not os.path.isfile(path):
        raise ImportError(f"no Python file {path}")
    home = home_of(os.path.dirname(path))
    home.enter()
    return home.load(path)


def share_all() -> None:
    """Leave all folders' modules importable, for imports in functions. If several folders have a module of one name,
    the first folder's counts; a module that is in sys.modules otherwise stays."""
    _leave_all()
    for home in _HOMES:
        sys.modules.update(home.away | sys.modules)
        sys.path.append(home.entry)


def _leave_all() -> None:
    for home in _HOMES:
        home.leave()


for _entry in sys.path:  # of a process that multiprocessing has spawned
    if _entry.endswith(ENTRY):
        home_of(_entry.removesuffix(ENTRY))

"""What `reward.function`, `rollout.environment` and their like name, as far as that can be told without running it."""

import ast
import symtable
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megappo.config.errors import looked_in
from megappo.userland.builtin import BUILTIN


@dataclass(frozen=True)
class Spec:
    """Where a reward function is.

    Attributes:
        file: absolute, that defines it; "" of a module that only an import can find.
        module: if it is named by a module, as built-in ones are.
    """

    name: str
    file: str
    module: str = ""


def parse_spec(spec: str, key: str = "reward.function", builtin: Mapping[str, str] = BUILTIN) -> Spec:
    """The function, or class, that a key names. Runs no user code.

    Args:
        builtin: names that stand for others.

    Raises:
        ValueError: neither a built-in nor FILE.py:FUNCTION or package.module:FUNCTION, or no such file.
    """
    source, _, name = builtin.get(spec, spec).rpartition(":")
    if name.isidentifier() and source.endswith(".py"):
        if not Path(source).is_file():
            raise ValueError(f"{key} {spec!r}: no file {source}{looked_in(source)}: correct the path")
        return Spec(name, str(Path(source).resolve()))
    if name.isidentifier() and all(part.isidentifier() for part in source.split(".")):
        return Spec(name, _file_of(source), source)
    names = "".join(f"{name}, " for name in builtin)
    kind = "CLASS" if key.endswith(".environment") else "FUNCTION"
    raise ValueError(f"{key} {spec!r}: expected {names}FILE.py:{kind} or package.module:{kind}")


def _file_of(module: str) -> str:
    """A module's file; "" where none is found by its name alone. An import would run the packages that it lies in."""
    places = (Path(entry, *module.split(".")) for entry in (Path.cwd(), *sys.path))
    files = (file for place in places for file in (place / "__init__.py", place.with_suffix(".py")))
    return next((str(file.resolve()) for file in files if file.is_file()), "")


def missing_function(spec: str, key: str = "reward.function", builtin: Mapping[str, str] = BUILTIN) -> str:
    """Why the file that `spec` names cannot define its function, as far as reading it tells; "" if it may.

    Raises:
        ValueError: as `parse_spec`.
    """
    found = parse_spec(spec, key, builtin)
    file, name = found.file, found.name
    if not file:
        return ""
    try:
        tree = ast.parse(Path(file).read_bytes(), file)
        table = symtable.symtable(Path(file).read_text(), file, "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
        return f"{key} {spec!r}: {file} is not Python: {error}"
    names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    brings_any = any(alias.name == "*" for node in imports for alias in node.names)
    if brings_any or {name, "__getattr__"} & names:
        return ""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    own = sorted(node.name for node in tree.body if isinstance(node, kinds))
    return f"{key} {spec!r}: {file} defines no {name}; it defines {', '.join(own) or 'no function'}"

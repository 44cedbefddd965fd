"""The code that `reward.function`, `rollout.environment` and the like name, as far as that is known without running it;
and the reward functions that are known by a name."""

import ast
import symtable
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from megappo.config.config_error import looked_in

BUILTIN = {
    "exact_match": "megappo.userland.graders.texts:exact_match",
    "regex_match": "megappo.userland.graders.texts:regex_match",
    "multiple_choice": "megappo.userland.graders.texts:multiple_choice",
    "gsm8k": "megappo.userland.graders.gsm8k:gsm8k",
    "math": "megappo.userland.graders.mathematics:math",
    "think_answer": "megappo.userland.graders.formats:think_answer",
    "code": "megappo.userland.graders.code:code",
    "http": "megappo.userland.graders.remote:http",
    "judge": "megappo.userland.graders.remote:judge",
    "repetition": "megappo.userland.graders.formats:repetition",
}
"""reward.function -> module:function. Beside a function NAME there may be NAME_answer, which returns a response's
answer, and NAME_label, which returns the meaning of a label and raises ValueError if it has none."""
WAITING = ("http",)
"""Built-in functions of lists that wait for others: they get many rows at once, however long they take."""


class Spec(NamedTuple):
    """The place of a reward function.

    Attributes:
        file: absolute, that defines it; "" for a module that only an import can find.
        module: if it is named by a module, as built-in ones are.
    """

    name: str
    file: str
    module: str = ""


def check_label(label: Any, specs: Iterable[str]) -> None:
    """Check that the built-in ones of these reward functions can grade by a label.

    Args:
        specs: as reward.function names them.
    Raises:
        ValueError: one cannot.
    """
    for spec in specs:
        if check := _label_check(BUILTIN.get(spec, spec)):
            check(label)


@cache
def _label_check(function: str) -> Callable[[Any], Any] | None:
    if function not in BUILTIN.values():
        return None
    module, _, name = function.partition(":")
    return getattr(import_module(module), f"{name}_label", None)


def parse_spec(spec: str, key: str = "reward.function", builtin: Mapping[str, str] = BUILTIN) -> Spec:
    """Return the place of the function, or class, that a key names. Runs none of people's code.

    Args:
        builtin: names that stand for others.
    Raises:
        ValueError: it is neither a built-in nor FILE.py:FUNCTION or package.module:FUNCTION, or there is no such file.
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
    """Return a module's file; "" if none is found by its name alone. An import would run the packages around it."""
    for entry in (str(Path.cwd()), *sys.path):
        place = Path(entry, *module.split("."))
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if file.is_file():
                return str(file.resolve())
    return ""


def missing_function(spec: str, key: str = "reward.function", builtin: Mapping[str, str] = BUILTIN) -> str:
    """Return why a file cannot define its function, as far as reading it shows; "" if it may.

    Raises:
        ValueError: as in `parse_spec`.
    """
    name, file, _ = parse_spec(spec, key, builtin)
    if not file:
        return ""
    try:
        tree = ast.parse(Path(file).read_bytes(), file)
        table = symtable.symtable(Path(file).read_text(), file, "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
        return f"{key} {spec!r}: {file} is not Python: {error}"
    names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imports_all = any(alias.name == "*" for node in imports for alias in node.names)
    if imports_all or {name, "__getattr__"} & names:
        return ""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    own = sorted(node.name for node in tree.body if isinstance(node, kinds))
    return f"{key} {spec!r}: {file} defines no {name}; it defines {', '.join(own) or 'no function'}"

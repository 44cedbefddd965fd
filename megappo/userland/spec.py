"""The code that `reward.function`, `rollout.environment` and the like name, as far as that is known without running it;
and the reward functions that are known by a name."""

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from megappo.config.config_error import looked_in

ANSWERS = "megappo.userland.graders.answers"
BUILTIN = {
    "exact_match": f"{ANSWERS}:exact_match",
    "regex_match": f"{ANSWERS}:regex_match",
    "multiple_choice": f"{ANSWERS}:multiple_choice",
    "gsm8k": f"{ANSWERS}:gsm8k",
    "math": f"{ANSWERS}:math",
    "think_answer": "megappo.userland.graders.formats:think_answer",
    "code": "megappo:code",
    "http": "megappo:http",
    "engine": "megappo:engine",
    "judge": "megappo:judge",
    "repetition": "megappo.userland.graders.formats:repetition",
}
"""reward.function -> module:function. Beside a function NAME that grades by a label there is NAME_label, which raises
ValueError if it cannot. Functions of `megappo` itself run programs or request scores: no module of the core imports
them."""
WAITING = ("http", "engine")
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

    @property
    def source(self) -> str:
        """The module if it is named by one, else the file."""
        return self.module or self.file


def check_label(label: Any, specs: Iterable[str]) -> None:
    """Check that the built-in ones of these reward functions can grade by a label.

    Args:
        specs: functions as reward.function names them.
    Raises:
        ValueError: one cannot.
    """
    for spec in specs:
        module, _, name = BUILTIN.get(spec, __name__).partition(":")
        check: Callable[[Any], Any] | None = getattr(import_module(module), f"{name}_label", None)
        if check is not None:
            check(label)


def parse_spec(spec: str, key: str = "reward.function", builtin: Mapping[str, str] = BUILTIN) -> Spec:
    """Return the place of the function, or class, that a key names. Runs none of user code.

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
    names = "".join(f"{name}, " for name in builtin)
    if name.isidentifier() and all(part.isidentifier() for part in source.split(".")):
        file = _file_of(source)
        if not file and source.startswith("megappo."):
            raise ValueError(f"{key} {spec!r}: megappo has no module {source}; expected {names}or a module of your own")
        return Spec(name, file, source)
    kind = "CLASS" if key.endswith(".environment") else "FUNCTION"
    if not source and spec.endswith(".py"):
        raise ValueError(f"{key} {spec!r}: name the {kind.lower()} in the file, too: {spec}:{kind}")
    raise ValueError(f"{key} {spec!r}: expected {names}FILE.py:{kind} or package.module:{kind}")


def _file_of(module: str) -> str:
    """Return a module's file; "" if none is found by its name alone. An import would run the packages around it."""
    installed = Path(__file__).parents[2]  # sys.path lacks it if megappo is installed as editable
    for entry in (Path.cwd(), *sys.path, installed):
        place = Path(entry, *module.split("."))
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if file.is_file():
                return str(file.resolve())
    return ""

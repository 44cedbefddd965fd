"""Calls between a test and the program that it tests, which runs in another process.

The program gets the arguments of its calls and nothing else of the test. Plain values are sent as JSON. Any other
object of the program stays in its process, and the test holds a `Remote`, each use of which is a call. The program
never compares a value of the test's own. The standard library alone.
"""

import ast
import builtins
import io
import json
import operator
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from decimal import Decimal
from fractions import Fraction
from functools import partialmethod
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

MAX_BYTES = 2**30
"""Longest message."""
COLLECTIONS = {kind.__name__: kind for kind in (list, tuple, set, frozenset, dict, bytes, bytearray, deque)}
NUMBERS = {kind.__name__: kind for kind in (complex, Fraction, Decimal)}
"""Types whose values are made from the text that `str` makes of them."""
ERRORS = {name: one for name, one in vars(builtins).items() if isinstance(one, type) and issubclass(one, BaseException)}
"""The exceptions of Python's own, by name: nothing else that can be called may come from the program."""
USES = (
    *("call", "getattr", "setattr", "getitem", "setitem", "delitem", "len", "iter", "next", "bool", "int", "float"),
    *("index", "str", "repr", "hash"),
)
"""Uses of an object of the program, by a test: functions of `operator`, or built-in ones."""
USES_OF_TWO = ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul")
"""Uses of two such objects."""
PACKAGES = {
    **{name: name for name in ("networkx", "numpy", "pandas", "pytest", "scipy", "sympy", "torch")},
    **{"np": "numpy", "nx": "networkx", "pd": "pandas"},
}
"""The usual names of packages in tests that do not import them -> the packages."""


class Remote:
    """An object of the other process."""

    def __init__(self, peer: "Peer", handle: int):
        vars(self).update(peer=peer, handle=handle)

    def _use(self, name: str, /, *arguments: Any, **keywords: Any) -> Any:
        if name in USES_OF_TWO and not isinstance(arguments[0], Remote):
            return NotImplemented
        return vars(self)["peer"].ask(name, self, *arguments, **keywords)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and vars(self)["peer"].ask("isinstance", value, self)


for _name in USES + USES_OF_TWO:
    setattr(Remote, f"__{_name}__", partialmethod(Remote._use, _name))


class Peer:
    """One of the two processes.

    Args:
        do: called with the name of a use, and its arguments, for each request of the other process.
    """

    def __init__(self, connection: socket.socket, do: Callable[..., Any]):
        self._file = connection.makefile("rwb")
        self._do = do
        sys.set_int_max_str_digits(0)  # JSON has numbers as digits
        self._shared: dict[int, Any] = {}  # objects of this process that the other has a Remote of
        self._remotes: dict[int, Remote] = {}
        self._made_by = NUMBERS | {
            **{"module": import_module, "error": ERRORS.__getitem__, "yours": self._shared.__getitem__},
            "mine": lambda handle: self._remotes.setdefault(handle, Remote(self, handle)),
        }

    def ask(self, name: str, /, *arguments: Any, **keywords: Any) -> Any:
        """Return what a use returns in the other process. Lists among the arguments are changed as they are there.

        Raises:
            EOFError: the other process has ended.
            BaseException: what it raised; in place of an exception of the program's own, its base that is Python's.
        """
        self._send("ask", name, arguments, keywords)
        while (message := self._next())[0] == "ask":
            self._answer(*message[1:])
        kind, result, after, written = message
        sys.stdout.write(written)
        if kind == "raised":
            if result is StopIteration and name != "next":  # Python's map would end, and the test's loop with it
                raise RuntimeError("StopIteration")
            raise result(*after)
        for given, changed in zip(arguments, after, strict=True):
            if isinstance(given, list):
                given[:] = changed
        return result

    def serve(self) -> None:
        """Answer the other process's requests.

        Raises:
            EOFError: the other process has ended.
        """
        while True:
            self._answer(*self._next()[1:])

    def _answer(
        self,
        name: str,
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any],
    ) -> None:
        with redirect_stdout(io.StringIO()) as written:
            try:
                reply = "returned", self._do(name, *arguments, **keywords), arguments
            except BaseException as error:
                reply = "raised", type(error), error.args
        self._send(*reply, written.getvalue())

    def _send(self, *message: Any) -> None:
        self._file.write(json.dumps(self._encoded(message)).encode() + b"\n")
        self._file.flush()

    def _next(self) -> Any:
        line = self._file.readline(MAX_BYTES)
        if not line:
            raise EOFError
        return self._decoded(json.loads(line))

    def _encoded(self, value: Any) -> Any:
        """Return a value as JSON; what JSON lacks becomes a list of its kind and its content."""
        if hasattr(type(value), "tolist"):  # NumPy's numbers and arrays
            value = value.tolist()
        if value is None or isinstance(value, bool | int | float | str):
            return value
        for name, kind in COLLECTIONS.items():
            if isinstance(value, kind):
                return [name, [self._encoded(one) for one in (value.items() if kind is dict else value)]]
        if type(value).__name__ in NUMBERS:
            return [type(value).__name__, str(value)]
        if isinstance(value, Remote):
            return ["yours", vars(value)["handle"]]
        if isinstance(value, ModuleType):
            return ["module", value.__name__]
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["error", next(base.__name__ for base in value.__mro__ if base.__module__ == "builtins")]
        self._shared[id(value)] = value
        return ["mine", id(value)]

    def _decoded(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        kind, content = value
        if kind in COLLECTIONS:
            return COLLECTIONS[kind](map(self._decoded, content))
        return self._made_by[kind](content)


def serve_names(connection: socket.socket, names: Mapping[str, Any]) -> None:
    """Let a test use a program's names, until the test ends.

    Raises:
        EOFError: it has ended.
    """

    def use(name: str, /, *arguments: Any, **keywords: Any) -> Any:
        if name == "names":
            return {name: one for name, one in names.items() if not name.startswith("__")}
        return (getattr(operator, name, None) or getattr(builtins, name))(*arguments, **keywords)

    Peer(connection, use).serve()


def run_test(
    connection: socket.socket,
    test: str,
    entry_point: str | None,
    libraries: Sequence[str],
) -> None:
    """Run a test with a program's names, and with the modules of the prelude and the packages that it uses.

    The names of built-in functions, modules and known packages stay Python's, as a program could deceive the test by
    its own; unless the test uses no other name of the program, as in `assert sum(1, 2) == 3`.

    Raises:
        BaseException: the test's, if the program does not pass it.
    """
    own = Peer(connection, _call).ask("names")
    used = {node.id for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)}
    tested = {entry_point} if entry_point else used & own.keys()
    kept = set(vars(builtins)) | sys.stdlib_module_names | PACKAGES.keys()
    kept -= tested if tested <= kept else set()
    names = {name: one for name, one in own.items() if name not in kept}
    modules = {name: name for name in sys.stdlib_module_names & (own.keys() | set(libraries))} | PACKAGES
    modules = {name: module for name, module in modules.items() if name in used & kept and find_spec(module)}
    names |= {name: import_module(module) for name, module in modules.items()}
    module = sys.modules["solution"] = ModuleType("solution")
    vars(module).update(names)
    names |= {"__name__": "solution", "__builtins__": builtins}
    exec(compile(test, "test.py", "exec"), names)
    if entry_point:
        names["check"](names[entry_point])


def _call(name: str, function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
    """Use a function that a test has passed to a program: it can be called."""
    if name != "call":
        raise TypeError(f"a test's function can be called, and nothing else; found {name}")
    return function(*arguments, **keywords)

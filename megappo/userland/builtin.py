"""Reward functions known by name, and where they are."""

from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from typing import Any

_GRADERS = "megappo.userland.graders"
BUILTIN = {
    "exact_match": f"{_GRADERS}.texts:exact_match",
    "regex_match": f"{_GRADERS}.texts:regex_match",
    "multiple_choice": f"{_GRADERS}.texts:multiple_choice",
    "gsm8k": f"{_GRADERS}.gsm8k:gsm8k",
    "math": f"{_GRADERS}.mathematics:math",
    "think_answer": f"{_GRADERS}.forms:think_answer",
    "code": f"{_GRADERS}.code:code",
    "http": f"{_GRADERS}.remote:http",
    "judge": f"{_GRADERS}.remote:judge",
    "repetition": f"{_GRADERS}.forms:repetition",
}
"""reward.function -> module:function."""
WAITING = ("http",)
"""Of these, functions of lists that wait for others: they get many rows at once, however long they take."""


def check_label(label: Any, specs: Iterable[str]) -> None:
    """Check that the built-in ones of these reward functions can grade by a label.

    Args:
        specs: as reward.function names them.
    Raises:
        ValueError: one cannot.
    """
    for spec in specs:
        if check := beside(BUILTIN.get(spec, spec), "label"):
            check(label)


@cache
def beside(function: str, what: str) -> Callable[[Any], Any] | None:
    """Return the function NAME_`what` beside a built-in reward function (module:NAME), if there is one.

    NAME_answer returns a response's answer, which `str` makes a text, or None. NAME_label returns what a label stands
    for, and raises ValueError for what is no label.
    """
    module, _, name = function.partition(":")
    return getattr(import_module(module), f"{name}_{what}", None) if function in BUILTIN.values() else None

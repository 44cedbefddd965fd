"""Reward functions known by name, and where they are."""

from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from typing import Any

_GRADERS = "megappo.rewards.graders"
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
    """See that reward functions, as reward.function names them, can grade by a label, as far as they are built in.

    Raises:
        ValueError: one cannot.
    """
    for spec in specs:
        if check := beside(BUILTIN.get(spec, spec), "label"):
            check(label)


@cache
def beside(function: str, what: str) -> Callable[[Any], Any] | None:
    """What the module of a built-in function (module:NAME) has for it by the name of NAME_`what`, if it has.

    NAME_answer finds a response's answer, as what can be made a text, or None; NAME_label what a label stands for, or
    raises ValueError where it is none.
    """
    module, _, name = function.partition(":")
    return getattr(import_module(module), f"{name}_{what}", None) if function in BUILTIN.values() else None

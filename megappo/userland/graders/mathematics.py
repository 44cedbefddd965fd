"""Mathematics as competitions have it: whether the last boxed answer is equivalent to the label."""

import re
import time
from collections.abc import Callable
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from megappo.userland.graders.texts import as_text

BOX = re.compile(r"\\f?boxed\b|\\fbox\b|\\boxed(?=\d)")
"""Command before a boxed answer; \\fbox is in MATH's own solutions, too."""
BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
WITHOUT_BRACES = re.compile(r"[^$\n{}]*")
"""Answer without braces, of which TeX would box only the first character: \\boxed 42$."""
UNFINISHED = re.compile(r"\\(?:sum|prod|int|lim|[dt]?binom|gcd|lcm)(?![a-zA-Z])|(?<!\\)!")
"""Marks of unfinished calculations, which SymPy would finish: an answer may have them only if the label does."""
TARGETS = (LatexExtractionConfig(), ExprExtractionConfig())
TIMEOUT_SECONDS = 1
"""Limit for reading an answer, and for comparing two: most take milliseconds, but SymPy never finishes 9^{9^{9^9}}."""
SLOW_SECONDS = 15.0
"""Budget of a call for slow comparisons: once it is spent, only texts are compared, so that every call ends."""
MAX_CHARACTERS = 1000
"""Longest answer that is parsed; a longer one must equal the label's text."""


def math(responses: list[str], labels: list[Any]) -> list[float]:
    """1.0 where a response's last boxed answer is equivalent to the label, else 0.0.

    Two answers are equivalent if their texts differ in spaces alone, or if math-verify finds it, as for 1/2, \\frac12
    and 0.5, or two sets of the same elements. The form of an answer does not count: (x+1)^2 is x^2+2x+1.
    An answer that math-verify cannot read or compare within TIMEOUT_SECONDS is wrong.

    Args:
        labels: answers as texts or numbers, or whole solutions that box them, as MATH's are.
    Raises:
        ValueError: a label is neither, or empty.
    Source: Hendrycks et al. 2021, Measuring Mathematical Problem Solving With the MATH Dataset, whose answers are
        boxed; https://github.com/huggingface/Math-Verify
    """
    are_equivalent = _Comparer()
    grades = [_is_right(response, label, are_equivalent) for response, label in zip(responses, labels, strict=True)]
    if are_equivalent.num_skipped:
        print(f"math: {are_equivalent.num_skipped} answers were compared as texts alone: others took too long")
    return list(map(float, grades))


def last_boxed(text: str) -> str | None:
    """Return the content of a text's last box; None if there is no box, or its braces do not close."""
    boxes = list(BOX.finditer(text))
    if not boxes:
        return None
    rest = text[boxes[-1].end() :].lstrip(" ")
    if not rest.startswith("{"):
        return WITHOUT_BRACES.match(rest).group()
    depth = 0
    for brace in BRACES.finditer(rest):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return rest[1 : brace.start()]
    return None


def math_answer(response: str) -> str | None:
    """Return the last boxed answer without meaningless signs; equivalent answers may be different texts."""
    found = last_boxed(response)
    return None if found is None else _plain(found)


class _Comparer:
    """Compares by math-verify, each pair once, until slow pairs have taken SLOW_SECONDS."""

    def __init__(self) -> None:
        self.num_skipped = 0
        self._found: dict[tuple[str, str], bool] = {}
        self._seconds_left = SLOW_SECONDS

    def __call__(self, expected: str, found: str) -> bool:
        pair = expected, found
        if pair not in self._found:
            if self._seconds_left <= 0:
                self.num_skipped += 1
                return False
            started = time.monotonic()
            self._found[pair] = _are_equivalent(expected, found)
            took = time.monotonic() - started
            self._seconds_left -= took if took >= TIMEOUT_SECONDS else 0.0
        return self._found[pair]


def _is_right(response: str, label: Any, are_equivalent: Callable[[str, str], bool]) -> bool:
    expected = math_label(label)
    found = last_boxed(response)
    if found is None:
        return False
    if _plain(found) == _plain(expected):
        return True
    is_finished = not UNFINISHED.search(found) or UNFINISHED.search(expected) is not None
    return is_finished and len(found) <= MAX_CHARACTERS and are_equivalent(expected, found)


def _are_equivalent(expected: str, found: str) -> bool:
    readings = [parse(f"\\boxed{{{answer}}}", TARGETS, parsing_timeout=TIMEOUT_SECONDS) for answer in (expected, found)]
    return verify(*readings, timeout_seconds=TIMEOUT_SECONDS)


def _plain(answer: str) -> str:
    """An answer without spaces and signs that mean nothing; a space between digits does."""
    return re.sub(r"\\[,!]|\$|(?<!\d)(?:\s|\\[;: ])+|(?:\s|\\[;: ])+(?!\d)", "", answer).rstrip(".")


def math_label(label: Any) -> str:
    """The answer that a label, itself one or a solution that boxes it, stands for.

    Raises:
        ValueError: it is neither, or empty.
    """
    text = as_text(label)
    expected = last_boxed(text) if BOX.search(text) else text
    if not expected or not _plain(expected):
        raise ValueError(f"math needs an answer as label, or a solution that boxes it, found {label!r:.80}")
    return expected

"""Mathematics as competitions have it: whether the last boxed answer is equivalent to the label."""

import re
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

BOX = re.compile(r"\\f?boxed\b|\\fbox\b|\\boxed(?=\d)")
"""What comes before a boxed answer; \\fbox is in MATH's own solutions, too."""
BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
WITHOUT_BRACES = re.compile(r"[^$\n]*")
"""What TeX would not box whole, but who wrote it meant: \\boxed 42$."""
TARGETS = (LatexExtractionConfig(), ExprExtractionConfig())
TIMEOUT_SECONDS = 2
"""Of reading an answer, and of comparing two: SymPy may take for ever over 9^{9^{9^9}}. Most take milliseconds."""
MAX_CHARACTERS = 1000
"""Of an answer that is not the label's very text."""


def math(responses: list[str], labels: list[Any]) -> list[float]:
    """1.0 where a response's last boxed answer is equivalent to the label, else 0.0.

    Equivalent: the same text but for spaces, or what math-verify finds to be, such as 1/2 and \\frac12 and 0.5, or two
    sets of the same elements.

    Args:
        labels: answers as texts or numbers, or whole solutions that box them, as MATH's are.
    Raises:
        ValueError: a label is neither, or empty.
    Source: Hendrycks et al. 2021, Measuring Mathematical Problem Solving With the MATH Dataset, whose answers are
        boxed; https://github.com/huggingface/Math-Verify
    """
    return [float(_is_right(response, label)) for response, label in zip(responses, labels, strict=True)]


def last_boxed(text: str) -> str | None:
    """What stands in a text's last box; None where there is no box, or its braces do not close."""
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


def _is_right(response: str, label: Any) -> bool:
    expected = _expected(label)
    found = last_boxed(response)
    if found is None:
        return False
    if _plain(found) == _plain(expected):
        return True
    return len(found) <= MAX_CHARACTERS and _are_equivalent(expected, found)


def _are_equivalent(expected: str, found: str) -> bool:
    readings = [parse(f"\\boxed{{{answer}}}", TARGETS, parsing_timeout=TIMEOUT_SECONDS) for answer in (expected, found)]
    return verify(*readings, timeout_seconds=TIMEOUT_SECONDS)


def _plain(answer: str) -> str:
    """An answer without spaces and signs that mean nothing."""
    return re.sub(r"\s|\\[,;!: ]|\$", "", answer).rstrip(".")


def _expected(label: Any) -> str:
    is_number = isinstance(label, int | float) and not isinstance(label, bool)
    text = str(label) if is_number or isinstance(label, str) else ""
    expected = last_boxed(text) if BOX.search(text) else text
    if not expected or not _plain(expected):
        raise ValueError(f"math needs an answer as label, or a solution that boxes it, found {label!r:.80}")
    return expected

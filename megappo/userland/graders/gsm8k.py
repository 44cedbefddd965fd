"""Grade-school mathematics: whether the number behind the last #### is the label's."""

import re
from fractions import Fraction
from typing import Any

from megappo.userland.graders.texts import as_text

MARK = "####"
NUMBER = re.compile(
    r"""
    (?<![\w^.,])                             # not a part of a word, of an exponent, of another number
    (?: (?<![-+])(?P<sign>[-+]) )? [ ]? (?:\\?\$)? [ ]?     # -5, $5, -$5, \$5; --5 is 5
    (?P<digits> (?:\d{1,3}(?:,\d{3})+ | \d+) (?:\.\d+)? | \.\d+ )
    (?P<exponent> [eE][-+]?\d{1,3}(?!\w) )?
    (?: [ ]?/[ ]? (?P<divisor>\d+) )?
    (?! ,?\d | [_x.]+\d | [eE][-+]?\d | \s*\^ | [\u00bc-\u00be\u2150-\u215e] )  # 1,23 4x5 6e9999 7^2 8 1/2 go on
    """,
    re.VERBOSE,
)
MAX_CHARACTERS = 100
"""Longest number: longer ones are no answers, and Python is slow to parse them."""
REWRITTEN = str.maketrans({"\u2212": "-", "\u2013": "-", "\u00a0": " ", "\u202f": " "})
"""Signs and spaces of typesetters."""


def gsm8k(responses: list[str], labels: list[Any]) -> list[float]:
    """1.0 where the line behind a response's last #### holds one number, and it is the label's, else 0.0.

    Numbers are compared by value, without their units: "$1,200.00", "1200 dollars" and "1.2e3" are the same. A line of
    several numbers, such as "5 or 6", gives no answer.

    Args:
        labels: numbers, texts of one, or GSM8K's own solutions, which end with "#### 42".
    Raises:
        ValueError: a label holds no number, or several.
    Source: Cobbe et al. 2021, Training Verifiers to Solve Math Word Problems, whose answers stand behind ####.
    """
    return [
        float(gsm8k_answer(response) == gsm8k_label(label)) for response, label in zip(responses, labels, strict=True)
    ]


def gsm8k_answer(text: str) -> Fraction | None:
    """The number behind the last ####; None where there is none, or not one alone."""
    _, mark, rest = text.rpartition(MARK)
    return the_number(rest.lstrip().partition("\n")[0]) if mark else None


def the_number(text: str) -> Fraction | None:
    """The number in a text; None where there is none, or several."""
    found = list(NUMBER.finditer(text.translate(REWRITTEN).replace("{,}", ",").replace("**", "")))
    return _value(found[0]) if len(found) == 1 else None


def _value(match: re.Match[str]) -> Fraction | None:
    sign, digits, exponent, divisor = match.group("sign", "digits", "exponent", "divisor")
    if len(match.group()) > MAX_CHARACTERS:
        return None
    value = Fraction((sign or "") + digits.replace(",", "") + (exponent or ""))
    if divisor is None:
        return value
    return value / int(divisor) if int(divisor) else None


def gsm8k_label(label: Any) -> Fraction:
    """The number that a label, itself one or a solution of GSM8K's, stands for.

    Raises:
        ValueError: it holds none, or several.
    """
    text = as_text(label)
    number = gsm8k_answer(text) if MARK in text else the_number(text)
    if number is None:
        raise ValueError(f"gsm8k needs a number as label, or a text that ends with '#### 42', found {label!r:.80}")
    return number

"""Answers that are texts: the label itself, a regular expression, the letter of a choice."""

import re
from decimal import Decimal
from typing import Any

LETTER = r"""
    (?: \s+ (?: is | was ) )? [\s:]{0,9} (?: (?:option|choice) \s )?      # "answer is: option"
    [\s:*"'$({\[\\]{0,9} (?: (?:text|math) [a-z]{0,2} \{ \(? )?            # **(  $\text{(
    (?-i: (?P<letter> [B-HJ] | [AI] (?! \s+ (?!because|since|as|and)\w ) ) ) (?! \w | '\w )
"""
"""Text after the word that announces a letter. A and I are words, too: "A good one", "I think"."""
ANSWER = re.compile(r"(?: \b answer | \\boxed )" + LETTER, re.VERBOSE | re.IGNORECASE)
OPTION = re.compile(r"\b (?: option | choice )" + LETTER, re.VERBOSE | re.IGNORECASE)
ALONE = re.compile(r"[\s(\[*]{0,9}(?P<letter>[A-J])[\s)\].:*]*")


def exact_match(responses: list[str], labels: list[Any]) -> list[float]:
    """1.0 where the stripped response equals the stripped label, else 0.0.

    Raises:
        ValueError: a label is not a string or a number, or empty.
    """
    return [
        float(exact_match_answer(response) == exact_match_label(label))
        for response, label in zip(responses, labels, strict=True)
    ]


def regex_match(responses: list[str], labels: list[Any]) -> list[float]:
    """1.0 where the label, a regular expression of Python's, is found in the response, else 0.0.

    Raises:
        ValueError: a label is not a string or a number, or empty, or no regular expression.
    """
    return [
        float(regex_match_label(label).search(response) is not None)
        for response, label in zip(responses, labels, strict=True)
    ]


def multiple_choice(responses: list[str], labels: list[Any]) -> list[float]:
    """1.0 where the letter that a response gives as its answer is the label, else 0.0.

    Its answer is the last letter that "answer is", "Answer:" or \\boxed announces, else the last that "option" or
    "choice" does; of a response that is nothing but a letter, that.

    Args:
        labels: letters from A to J, also as "(B)" or "b".
    Raises:
        ValueError: a label is something else.
    """
    return [
        float(multiple_choice_answer(response) == multiple_choice_label(label))
        for response, label in zip(responses, labels, strict=True)
    ]


def exact_match_answer(response: str) -> str:
    """The answer of a response that is nothing else."""
    return response.strip()


def multiple_choice_answer(response: str) -> str | None:
    """The letter that a response gives as its answer; None where it gives none."""
    if alone := ALONE.fullmatch(response):
        return alone["letter"]
    for announced in (ANSWER, OPTION):
        if found := [match["letter"] for match in announced.finditer(response)]:
            return found[-1]
    return None


def exact_match_label(label: Any, grader: str = "exact_match") -> str:
    """A label of `exact_match`, stripped.

    Raises:
        ValueError: it is none. An empty one would equal an empty response.
    """
    text = str(label).strip() if isinstance(label, str | int | float) else ""
    if not text:
        raise ValueError(f"{grader} needs strings or numbers as labels, found {label!r:.80}; see data.label_key")
    return text


def regex_match_label(label: Any) -> re.Pattern[str]:
    """A label of `regex_match`.

    Raises:
        ValueError: it is none. An empty one is found in every response.
    """
    exact_match_label(label, "regex_match")
    try:
        return re.compile(str(label))
    except (re.error, OverflowError) as error:
        raise ValueError(f"regex_match needs regular expressions as labels, found {label!r:.80}: {error}") from error


def multiple_choice_label(label: Any) -> str:
    """A label of `multiple_choice`.

    Raises:
        ValueError: it is none.
    """
    match = ALONE.fullmatch(str(label).upper())
    if match is None:
        raise ValueError(f"multiple_choice needs letters from A to J as labels, found {label!r:.80}")
    return match["letter"]


def as_text(label: Any) -> str:
    """Return a label that is a text as it is, and a number written out, as 1e-07 would be a product in LaTeX; "" for
    others."""
    if isinstance(label, str):
        return label
    is_number = isinstance(label, int | float) and not isinstance(label, bool)
    return format(Decimal(str(label)), "f") if is_number else ""

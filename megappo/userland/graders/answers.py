"""Built-in reward functions that read a response's answer.

Each grades one response and returns the score with the answer that it has found. Beside a function NAME that grades by
a label there is NAME_label, which returns the label's meaning and raises ValueError if it has none.
"""

import re
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

from megappo.userland.user_code import JsonObject

LETTER = r"""
    (?: \s+ (?: is | was ) )? [\s:]{0,9} (?: (?:option|choice) \s )?      # "answer is: option"
    [\s:*"'$({\[\\]{0,9} (?: (?:text|math) [a-z]{0,2} \{ \(? )?            # **(  $\text{(
    (?-i: (?P<letter> [B-HJ] | [AI] (?! \s+ (?!because|since|as|and)\w ) ) ) (?! \w | '\w )
"""
"""Text after the word that announces a letter. A and I are words, too: "A good one", "I think"."""
ANSWER = re.compile(r"(?: \b answer | \\boxed )" + LETTER, re.VERBOSE | re.IGNORECASE)
OPTION = re.compile(r"\b (?: option | choice )" + LETTER, re.VERBOSE | re.IGNORECASE)
ALONE = re.compile(r"[\s(\[*]{0,9}(?P<letter>[A-J])[\s)\].:*]*")
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
MAX_DIGITS = 100
"""Longest number: longer ones are no answers, and Python is slow to parse them."""
REWRITTEN = str.maketrans({"\u2212": "-", "\u2013": "-", "\u00a0": " ", "\u202f": " "})
"""Signs and spaces of typesetters."""
BOX = re.compile(r"\\f?boxed\b|\\fbox\b|\\boxed(?=\d)")
"""Command before a boxed answer; \\fbox is in MATH's own solutions, too."""
BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
WITHOUT_BRACES = re.compile(r"[^$\n{}]*")
"""Answer without braces, of which TeX would box only the first character: \\boxed 42$."""
UNFINISHED = re.compile(r"\\(?:sum|prod|int|lim|[dt]?binom|gcd|lcm)(?![a-zA-Z])|(?<!\\)!")
"""Marks of unfinished calculations, which SymPy would finish: an answer may have them only if the label does."""
TIMEOUT_SECONDS = 3
"""Limit for reading an answer, and for comparing two: most take milliseconds (ten times that on a busy machine), but
SymPy never finishes 9^{9^{9^9}}."""
MAX_CHARACTERS = 1000
"""Longest answer that is parsed; a longer one must equal the label's text."""


def exact_match(solution_str: str, ground_truth: Any) -> JsonObject:
    """1.0 where the stripped response equals the stripped label, else 0.0.

    Raises:
        ValueError: the label is not a string or a number, or empty.
    """
    answer = solution_str.strip()
    return {"score": answer == exact_match_label(ground_truth), "pred": answer}


def exact_match_label(label: Any, grader: str = "exact_match") -> str:
    """Return a label, stripped. An empty one would equal an empty response."""
    text = str(label).strip() if isinstance(label, str | int | float) else ""
    if not text:
        raise ValueError(f"{grader} needs strings or numbers as labels, found {label!r:.80}; see data.label_key")
    return text


def regex_match(solution_str: str, ground_truth: Any) -> bool:
    """1.0 where the label, a regular expression of Python's, is found in the response, else 0.0.

    Raises:
        ValueError: the label is not a string or a number, or empty, or no regular expression.
    """
    return regex_match_label(ground_truth).search(solution_str) is not None


def regex_match_label(label: Any) -> re.Pattern[str]:
    """Return a label's regular expression. An empty one is found in every response."""
    exact_match_label(label, "regex_match")
    try:
        return re.compile(str(label))
    except (re.error, OverflowError) as error:
        raise ValueError(f"regex_match needs regular expressions as labels, found {label!r:.80}: {error}") from error


def multiple_choice(solution_str: str, ground_truth: Any) -> JsonObject:
    """1.0 where the letter that a response gives as its answer is the label, else 0.0.

    Args:
        ground_truth: a letter from A to J, also as "(B)" or "b".
    Raises:
        ValueError: the label is something else.
    """
    answer = letter_in(solution_str)
    return {"score": answer == multiple_choice_label(ground_truth), "pred": answer}


def multiple_choice_label(label: Any) -> str:
    """Return a label's letter."""
    match = ALONE.fullmatch(str(label).upper())
    if match is None:
        raise ValueError(f"multiple_choice needs letters from A to J as labels, found {label!r:.80}")
    return match["letter"]


def letter_in(response: str) -> str | None:
    """Return the last letter that "answer is", "Answer:" or \\boxed announces, else the last that "option" or "choice"
    does; of a response that is nothing but a letter, that."""
    if alone := ALONE.fullmatch(response):
        return alone["letter"]
    for announced in (ANSWER, OPTION):
        if letters := [match["letter"] for match in announced.finditer(response)]:
            return letters[-1]
    return None


def gsm8k(solution_str: str, ground_truth: Any) -> JsonObject:
    """1.0 where the line behind a response's last #### holds one number, and it is the label's, else 0.0.

    Numbers are compared by value, without their units: "$1,200.00", "1200 dollars" and "1.2e3" are the same. A line of
    several numbers, such as "5 or 6", gives no answer.

    Args:
        ground_truth: a number, the text of one, or a solution of GSM8K's, which ends with "#### 42".
    Raises:
        ValueError: the label holds no number, or several.
    Source: Cobbe et al. 2021, Training Verifiers to Solve Math Word Problems, whose answers stand behind ####.
    """
    answer = number_behind_mark(solution_str)
    is_right = answer == gsm8k_label(ground_truth)
    return {"score": is_right, "pred": None if answer is None else str(answer)}


def gsm8k_label(label: Any) -> Fraction:
    """Return a label's number."""
    text = _as_text(label)
    number = number_behind_mark(text) if MARK in text else the_number(text)
    if number is None:
        raise ValueError(f"gsm8k needs a number as label, or a text that ends with '#### 42', found {label!r:.80}")
    return number


def number_behind_mark(text: str) -> Fraction | None:
    """Return the number behind the last ####; None where there is none, or not one alone."""
    _, mark, rest = text.rpartition(MARK)
    return the_number(rest.lstrip().partition("\n")[0]) if mark else None


def the_number(text: str) -> Fraction | None:
    """Return the number in a text; None where there is none, or several."""
    numbers = list(NUMBER.finditer(text.translate(REWRITTEN).replace("{,}", ",").replace("**", "")))
    if len(numbers) != 1 or len(numbers[0].group()) > MAX_DIGITS:
        return None
    sign, digits, exponent, divisor = numbers[0].group("sign", "digits", "exponent", "divisor")
    value = Fraction((sign or "") + digits.replace(",", "") + (exponent or ""))
    divisor = int(divisor or 1)
    return value / divisor if divisor else None


def math(solution_str: str, ground_truth: Any) -> JsonObject:
    """1.0 where a response's last boxed answer is equivalent to the label, else 0.0.

    Two answers are equivalent if their texts differ in spaces alone, or if math-verify finds it, as for 1/2, \\frac12
    and 0.5, or two sets of the same elements. The form of an answer does not count: (x+1)^2 is x^2+2x+1.
    An answer that math-verify cannot read or compare within TIMEOUT_SECONDS is wrong.

    Args:
        ground_truth: an answer as a text or a number, or a whole solution that boxes it, as MATH's are.
    Raises:
        ValueError: the label is neither, or empty.
    Source: Hendrycks et al. 2021, Measuring Mathematical Problem Solving With the MATH Dataset, whose answers are
        boxed; https://github.com/huggingface/Math-Verify
    """
    expected = math_label(ground_truth)
    answer = last_boxed(solution_str)
    if answer is None:
        return {"score": 0.0}
    return {"score": _is_right(expected, answer), "pred": plain_answer(answer)}


def math_label(label: Any) -> str:
    """Return a label's answer."""
    text = _as_text(label)
    expected = last_boxed(text) if BOX.search(text) else text
    if not expected or not plain_answer(expected):
        raise ValueError(f"math needs an answer as label, or a solution that boxes it, found {label!r:.80}")
    return expected


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


def _is_right(expected: str, answer: str) -> bool:
    if plain_answer(answer) == plain_answer(expected):
        return True
    if len(answer) > MAX_CHARACTERS or (UNFINISHED.search(answer) and not UNFINISHED.search(expected)):
        return False
    return _are_equivalent(expected, answer)


@lru_cache(maxsize=10_000)
def _are_equivalent(expected: str, answer: str) -> bool:
    # Imported here, as it takes seconds and other functions do without it.
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    targets = (LatexExtractionConfig(), ExprExtractionConfig())
    readings = [parse(f"\\boxed{{{one}}}", targets, parsing_timeout=TIMEOUT_SECONDS) for one in (expected, answer)]
    return verify(*readings, timeout_seconds=TIMEOUT_SECONDS)


def plain_answer(answer: str) -> str:
    """Return an answer without spaces and signs that mean nothing; a space between digits does."""
    return re.sub(r"\\[,!]|\$|(?<!\d)(?:\s|\\[;: ])+|(?:\s|\\[;: ])+(?!\d)", "", answer).rstrip(".")


def _as_text(label: Any) -> str:
    """Return a label that is a text as it is, and a number written out, as 1e-07 would be a product in LaTeX; "" for
    others."""
    if isinstance(label, str):
        return label
    is_number = isinstance(label, int | float) and not isinstance(label, bool)
    return format(Decimal(str(label)), "f") if is_number else ""

"""Reading a response takes time in proportion to its length, whatever a policy has written."""

import importlib.util
import itertools
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megappo.lab.graders import remote
from megappo.lab.graders.code import program_in
from megappo.userland.graders import answers, formats

ROOT = Path(__file__).resolve().parents[2]
PIECES = (
    *(
        "`",
        "```",
        "``` ",
        " ``` ",
        " `",
        "```\n",
        "a",
        " ",
        "\t",
        "\n",
        "\r",
        "1",
        "1 ",
        " 1",
        "1,",
        "1,111",
        "1.",
        "$",
    ),
    *("-", "+-", "1e", "1/", "1 / ", "^", "1 ^", "_", ".", "\\boxed", "\\boxed{", "\\boxed ", "\\fbox", "{", "}", "\\"),
    *("\\!", "\\; ", "(", "(A", "answer", "answer is ", " answer:", "option ", "is ", "A ", "*", "####", "<think>"),
    *("</think>", "\\text{", "choice ", "!", "\\sum", "I ", "score", "score (", "score:1 ", "score 1e", "\\x41", "'"),
)
BEFORE = ("", "```", "1", "answer", "\\boxed{", "####", "score:1")
BEHIND = ("x", "`")
FEW, TIMES = 2**10, 8
FASTEST_SECONDS = 0.002
"""Shorter times are not compared."""


def shipped() -> Callable[[list[str], list[str], list[str]], list[float]]:
    spec = importlib.util.spec_from_file_location("gsm8k_reward", ROOT / "configs" / "gsm8k_reward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.last_number


LAST_NUMBER = shipped()
READERS = {
    "code": program_in,
    "multiple_choice": answers.letter_in,
    "math": lambda text: answers.plain_answer(answers.last_boxed(text) or ""),
    "what is unfinished": answers.UNFINISHED.search,
    "gsm8k": answers.number_behind_mark,
    "numbers": answers.the_number,
    "think_answer": formats.think_answer,
    "repetition": formats.repetition,
    "judge": lambda text: re.findall(remote.SCORE, text),
    "configs": lambda text: LAST_NUMBER([text], [text], ["#### 1"]),
}


def seconds(reader: Callable[[str], object], text: str) -> float:
    start = time.process_time()  # other processes may have the cores
    reader(text)
    return time.process_time() - start


def is_linear(reader: Callable[[str], object], before: str, piece: str, behind: str) -> bool:
    """Return whether a text of TIMES the length takes less than twice TIMES as long, at one of three tries."""
    short, long = (before + piece * (size // len(piece)) + behind for size in (FEW, FEW * TIMES))
    for _ in range(3):
        least = max(seconds(reader, short), FASTEST_SECONDS)
        if seconds(reader, long) < 2 * TIMES * least:
            return True
    return False


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_eight_times_the_length_takes_eight_times_as_long(reader: Callable[[str], object]):
    slow = [case for case in itertools.product(BEFORE, PIECES, BEHIND) if not is_linear(reader, *case)]
    assert slow == []


def test_a_reader_that_is_not_linear_is_found():
    quadratic = re.compile(r"[^`]*`{3,}[ \t]*([^\s`]*)\s*")
    assert is_linear(quadratic.fullmatch, "```", "a", "`")
    assert not is_linear(quadratic.fullmatch, "```", " ", "`")

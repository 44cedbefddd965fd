"""The grade of a response: what reward functions returned for it, checked, and combined over several functions.

From a returned value to a token's reward: value -> `Grade` -> score (the sum of its scores and step scores) -> shaped
score (`ppo.reward_shaping`) -> the reward of the response's last token (`ppo.advantages`).
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from megappo.userland.signatures import NO_SCORE
from megappo.userland.user_code import JsonObject
from megappo.userland.worker_process import CallError

LARGEST_FLOAT32 = 3.4028234663852886e38
MAX_SCORES = 64
MAX_PARTS = 32
MAX_NAME_CHARACTERS = 64
MAX_ANSWER_CHARACTERS = 200
"""Length at which an answer is cut."""
SCORE, ANSWER, LOSS_WEIGHT, STEP_SCORES = "score", "pred", "loss_weight", "step_scores"
"""The keys of a returned dictionary that have a meaning; `pred` is verl's name. Its other numbers become metrics."""
Step = tuple[int, float]
"""The number of a response's characters up to the end of a step, and the step's score."""


class Grade(NamedTuple):
    """The result of reward functions for a response.

    Attributes:
        scores: one or more, whose sum is its score; empty if a function failed.
        parts: further numbers by name, which become metrics.
        answer: what is voted on if several responses to a prompt are compared; None if there is none.
        failed: a function has failed.
        loss_weight: factor of its losses; None if no function gives one.
        steps: the step scores of each score, sorted by end; empty without any.
        unscored: the function left the response to others.
    """

    scores: list[float]
    parts: dict[str, float]
    answer: str | None = None
    failed: bool = False
    loss_weight: float | None = None
    steps: Sequence[Sequence[Step]] = ()
    unscored: bool = False

    @property
    def totals(self) -> list[float]:
        """Each score plus its step scores: what training uses."""
        both = zip_longest(self.scores, self.steps, fillvalue=())
        return [math.fsum([outcome, *(score for _, score in steps)]) for outcome, steps in both]


FAILED = Grade([], {}, failed=True)


def grades_of(values: Any, responses: Sequence[str], weight: float) -> list[Grade]:
    """Return the grades of responses that one call of a function gave, each with the same number of scores.

    Args:
        values: what the function returned, as JSON; user code may have sent anything.
        weight: factor of the scores.
    Raises:
        CallError: they cannot be used.
    """
    if not isinstance(values, list):
        raise CallError(f"returned {values!r:.80}; expected a list of {len(responses)} numbers")
    if len(values) != len(responses):
        raise CallError(f"returned {len(values)} values for {len(responses)} responses; expected one each")
    grades: list[Grade] = []
    for i, (value, response) in enumerate(zip(values, responses, strict=True)):
        try:
            grades.append(_grade(value, len(response), weight))
            if len(grades[i].scores) != len(grades[0].scores):
                raise ValueError(f"expected {len(grades[0].scores)} scores, as many as for the first response")
        except ValueError as error:
            raise CallError(f"returned {value!r:.80} (value {i}): {error}", index=i) from error
    return grades


def _grade(value: Any, num_characters: int, weight: float) -> Grade:
    fields = value if isinstance(value, dict) else {SCORE: value}
    score = fields.get(SCORE)
    scores = [_number(one, SCORE, weight) for one in (score if isinstance(score, list) else [score])]
    if not 1 <= len(scores) <= MAX_SCORES:
        raise ValueError(f"expected 1 to {MAX_SCORES} scores, found {len(scores)}")
    loss_weight = _number(fields[LOSS_WEIGHT], LOSS_WEIGHT) if LOSS_WEIGHT in fields else None
    if loss_weight is not None and loss_weight < 0:
        raise ValueError(f"expected a {LOSS_WEIGHT} of 0 or more, found {loss_weight}")
    steps = [read_steps(fields[STEP_SCORES], num_characters, weight)] if STEP_SCORES in fields else ()
    if steps and len(scores) > 1:
        raise ValueError(f"expected one score beside {STEP_SCORES}, found {len(scores)}")
    grade = Grade(scores, _parts(fields), _answer(fields.get(ANSWER)), False, loss_weight, steps, value == NO_SCORE)
    _number(math.fsum(grade.totals), "the sum of its scores")
    return grade


def fits_float32(value: Any) -> bool:
    """Return whether a value is a number, finite as a float32; it may be an int beyond all floats."""
    return isinstance(value, int | float) and abs(value) <= LARGEST_FLOAT32


def _number(value: Any, name: str, weight: float = 1.0) -> float:
    number = weight * value if fits_float32(value) else value
    if not fits_float32(number):
        raise ValueError(f"expected a finite number that fits into a float32 as {name}, found {number!r:.80}")
    return number


def _parts(fields: JsonObject) -> dict[str, float]:
    parts = {}
    for name, value in fields.items():
        if name in (SCORE, ANSWER, LOSS_WEIGHT, STEP_SCORES) or not isinstance(value, int | float):
            continue
        if len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
            raise ValueError(
                f"expected names of at most {MAX_NAME_CHARACTERS} printable characters, found {name!r:.80}"
            )
        parts[name] = _number(value, name)
    if len(parts) > MAX_PARTS:
        raise ValueError(f"expected at most {MAX_PARTS} further numbers, found {len(parts)}")
    return parts


def _answer(answer: Any) -> str | None:
    """Return an answer's own text; None for lists and the like."""
    if not isinstance(answer, str | int | float):
        return None
    return str(answer)[:MAX_ANSWER_CHARACTERS].encode(errors="replace").decode()  # UTF-8 has no lone surrogate


def read_steps(
    steps: Any,
    size: int,
    weight: float = 1.0,
    name: str = STEP_SCORES,
) -> list[Step]:
    """Return the scores of steps.

    Args:
        size: the length of the response, the largest end.
    Raises:
        ValueError: they are none.
    """
    expected = f"expected a list of [end, score] as {name}, with ascending ends from 1 to {size}, its length"
    if not isinstance(steps, list):
        raise ValueError(f"{expected}, found {steps!r:.80}")
    checked: list[Step] = []
    last = 0
    for step in steps:
        match step:
            case [int() | float() as end, score] if last < end <= size and end == int(end):  # parquet: floats alone
                last = int(end)
                checked.append((last, _number(score, name, weight)))
            case _:
                raise ValueError(f"{expected}, found {step!r:.80}")
    return checked


def combined(rows: Sequence[Sequence[Grade]], names: Sequence[str]) -> list[Grade]:
    """Return one grade for each response, from the grades that several functions gave it.

    Args:
        rows: the grades of each response by function.
        names: names of the functions.
    """
    if len(names) == 1:
        return [only for [only] in rows]
    counts: Counter[str] = Counter()
    for of_function in zip(*rows, strict=True):
        counts.update({name for grade in of_function for name in grade.parts})
    return [FAILED if any(one.failed for one in of_row) else _together(of_row, names, counts) for of_row in rows]


def _together(grades: Sequence[Grade], names: Sequence[str], counts: Counter[str]) -> Grade:
    """Return the grade of a response by all functions. A part that several functions have gets the function's name."""
    parts = {}
    for function, grade in zip(names, grades, strict=True):
        for name, part in grade.parts.items():
            parts[name if counts[name] == 1 else f"{function}/{name}"] = part
    scored = [grade for grade in grades if not grade.unscored] or grades
    weights = [grade.loss_weight for grade in scored if grade.loss_weight is not None]
    steps = [of_score for grade in grades for of_score in grade.steps or [()] * len(grade.scores)]
    return Grade(
        scores=[score for grade in grades for score in grade.scores],
        parts=parts,
        answer=next((grade.answer for grade in grades if grade.answer is not None), None),
        loss_weight=math.prod(weights) if weights else None,
        steps=steps if any(steps) else (),
    )

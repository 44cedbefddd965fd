"""The grade of a response: what reward functions found of it, checked, and combined over several functions."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from megappo.userland.reward_host import MAX_ANSWER_CHARACTERS
from megappo.userland.user_code import BadFunction

LARGEST_FLOAT32 = 3.4028234663852886e38
MAX_SCORES = 64
MAX_PARTS = 32
MAX_NAME_CHARACTERS = 64


def _float32(number: float) -> float:
    if abs(number) > LARGEST_FLOAT32:
        raise ValueError(f"{number} is too large for a float32; expected up to 3.4e38")
    return number


def _printable(name: str) -> str:
    if len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
        raise ValueError(f"expected a name of at most {MAX_NAME_CHARACTERS} printable characters")
    return name


Number = Annotated[float, Field(strict=True, allow_inf_nan=False), AfterValidator(_float32)]
Step = tuple[Annotated[int, Field(strict=True)], Number]
"""The number of a response's characters up to the end of a step, and the step's score."""


class Graded(NamedTuple):
    """The result of reward functions for a response.

    Attributes:
        scores: one or more, whose sum is its score; none of functions if one failed.
        parts: further numbers by name, which become metrics.
        answer: what is voted on if several responses to a prompt are compared; None if there is none.
        failed: a function has failed.
        loss_weight: factor of its losses; None if no function gives one.
        steps: for each of the scores, or the first of them, the scores of steps by ascending ends.
    """

    scores: Annotated[list[Number], Field(min_length=1, max_length=MAX_SCORES)]
    parts: Annotated[dict[Annotated[str, AfterValidator(_printable)], Number], Field(max_length=MAX_PARTS)]
    answer: Annotated[str, Field(max_length=MAX_ANSWER_CHARACTERS)] | None = None
    failed: bool = False
    loss_weight: Annotated[Number, Field(ge=0)] | None = None
    steps: Annotated[Sequence[Sequence[Step]], Field(max_length=1)] = ()

    @property
    def totals(self) -> list[float]:
        """The scores with those of their steps, which are trained on."""
        if not self.steps:
            return self.scores
        both = zip_longest(self.scores, self.steps, fillvalue=())
        return [math.fsum([outcome, *(score for _, score in steps)]) for outcome, steps in both]


_ALL = TypeAdapter(list[Graded])


def checked(fields: Any, responses: Sequence[str]) -> list[Graded]:
    """Return the grades of responses that one call of a function gave, each with the same number of scores.

    Args:
        fields: what the worker sent; people's code may have written it.
    Raises:
        BadFunction: they cannot be used.
    """
    try:
        found = _ALL.validate_python(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        index, *place = first["loc"] or (0,)
        where = " ".join(map(str, [f"value {index},", *place])).rstrip(",")
        expected = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
        raise BadFunction(f"returned {first['input']!r:.80} ({where}); {expected}") from error
    if len(found) != len(responses) or any(one.failed for one in found):
        raise BadFunction(f"returned {len(found)} values for {len(responses)} responses; expected one grade each")
    for i, (graded, response) in enumerate(zip(found, responses, strict=True)):
        _check_steps(graded, len(response), f"value {i}")
        _float32_sum(graded.totals, f"value {i}, the sum of its scores")
        if len(graded.scores) != len(found[0].scores):
            counts = f"{len(found[0].scores)} scores (value 0) and {len(graded.scores)} (value {i})"
            raise BadFunction(f"returned {counts}; expected as many for each")
    return found


def _check_steps(graded: Graded, num_characters: int, place: str) -> None:
    if graded.steps and len(graded.scores) > 1:
        found = f"a list of {len(graded.scores)} scores beside 'step_scores' ({place})"
        raise BadFunction(f"returned {found}; expected one score")
    last = 0
    for i, (end, _) in enumerate(step for steps in graded.steps for step in steps):
        if not last < end <= num_characters:
            expected = f"above {last}, where the step before ends, and at most {num_characters}, the characters"
            found = f"a step that ends at {end} ({place}, 'step_scores', step {i})"
            raise BadFunction(f"returned {found}; expected an end {expected} of the response")
        last = end


def _float32_sum(scores: Sequence[float], place: str) -> None:
    if abs(total := math.fsum(scores)) > LARGEST_FLOAT32:
        raise BadFunction(f"returned {total} ({place}), which is too large for a float32; expected up to 3.4e38")


def combined(rows: Sequence[Sequence[Graded | None]], names: Sequence[str]) -> list[Graded]:
    """Return one grade for each response, of those that several functions gave.

    Args:
        rows: the grades of each response by function; None: the function failed.
        names: of the functions.
    """
    if len(names) == 1:
        return [one or Graded([], {}, failed=True) for [one] in rows]
    counts: Counter[str] = Counter()
    for of_function in zip(*rows, strict=True):
        counts.update({name for one in of_function if one is not None for name in one.parts})
    shared = {name for name, count in counts.items() if count > 1}
    return [_together(of_row, names, shared) for of_row in rows]


def _together(grades: Sequence[Graded | None], names: Sequence[str], shared: set[str]) -> Graded:
    """Combine the grades of a response; a part that several functions have gets the function's name."""
    scores: list[float] = []
    steps: list[Sequence[Step]] = []
    parts: dict[str, float] = {}
    weights: list[float] = []
    answer = None
    for function, graded in zip(names, grades, strict=True):
        if graded is None:
            return Graded([], {}, failed=True)
        scores += graded.scores
        steps += [*graded.steps, *[()] * (len(graded.scores) - len(graded.steps))]
        parts |= {f"{function}/{name}" if name in shared else name: part for name, part in graded.parts.items()}
        weights += [] if graded.loss_weight is None else [graded.loss_weight]
        answer = graded.answer if answer is None else answer
    return Graded(scores, parts, answer, False, math.prod(weights) if weights else None, steps if any(steps) else ())

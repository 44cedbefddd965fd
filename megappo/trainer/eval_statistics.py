"""What several responses to each prompt say of a model: mean@n, best@k, worst@k, pass@k, maj@k of a prompt's scores.

Of a prompt with n responses, what k of them would give is estimated without bias from all n. Pure Python; the mean of
each number over the prompts, and its standard error, are `observe.metrics`'.
"""

import math
import operator
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache


def of_prompt(scores: Sequence[float], answers: Sequence[str | None], pass_threshold: float) -> dict[str, float]:
    """A prompt's numbers: `names` of as many responses.

    Args:
        answers: what each response answers; None where it answers nothing.
        pass_threshold: the score from which on a response passes.
    """
    n = len(scores)
    num_passed = sum(score >= pass_threshold for score in scores)
    numbers = {f"mean@{n}": statistics.fmean(scores), "pass@1": pass_at(1, n, num_passed)}
    for k in sizes(n):
        numbers[f"pass@{k}"] = pass_at(k, n, num_passed)
        numbers[f"best@{k}"] = best_at(k, scores)
        numbers[f"worst@{k}"] = -best_at(k, [-score for score in scores])
        numbers[f"maj@{k}"] = majority_at(k, scores, answers)
    return numbers


def names(n: int) -> list[str]:
    """What is told of prompts with n responses; of one response, mean@1 and pass@1."""
    return [f"mean@{n}", "pass@1", *(f"{kind}@{k}" for k in sizes(n) for kind in ("pass", "best", "worst", "maj"))]


def sizes(n: int) -> list[int]:
    """2, 4, 8, ... and n, but for 1."""
    return sorted({2**power for power in range(1, n.bit_length())} | {n} - {1})


def pass_at(k: int, n: int, num_passed: int) -> float:
    """The probability that of k of n responses, drawn without replacement, one passes.

    Source: Chen et al. 2021, Evaluating Large Language Models Trained on Code, equation 1.
    """
    return 1.0 - math.comb(n - num_passed, k) / math.comb(n, k)


def best_at(k: int, scores: Sequence[float]) -> float:
    """The mean of the largest score over all choices of k of the responses: `pass_at` for scores of any value."""
    return math.fsum(map(operator.mul, sorted(scores), _chances_of_largest(k, len(scores))))


@cache
def _chances_of_largest(k: int, n: int) -> tuple[float, ...]:
    """Of each of n ascending scores to be the largest of k: the k - 1 others are among those before it."""
    return tuple(math.comb(i, k - 1) / math.comb(n, k) for i in range(n))


def majority_at(k: int, scores: Sequence[float], answers: Sequence[str | None]) -> float:
    """The mean score of the answer that most of k responses give, over as many groups of k as there are, in order.

    A response without an answer has no vote. Where none of a group has one, and among answers with as many votes, the
    mean is over all of these: what a draw among them would give on average.

    Source: Wang et al. 2023, Self-Consistency Improves Chain of Thought Reasoning in Language Models.
    """
    return statistics.fmean(_of_majority(group) for group in _groups(k, list(zip(answers, scores, strict=True))))


def _groups(k: int, votes: list[tuple[str | None, float]]) -> Iterator[list[tuple[str | None, float]]]:
    """Those that are left over are in none."""
    return (votes[start : start + k] for start in range(0, len(votes) - k + 1, k))


def _of_majority(votes: list[tuple[str | None, float]]) -> float:
    counts = Counter(answer for answer, _ in votes if answer is not None) or Counter([None])
    winners = [answer for answer, count in counts.items() if count == max(counts.values())]
    return statistics.fmean(
        statistics.fmean(score for answer, score in votes if answer == winner) for winner in winners
    )

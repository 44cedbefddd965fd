"""Evaluation: responses to held-out prompts, scored, as metrics: mean@n, pass@k, best@k, worst@k, maj@k.

For a prompt with n responses, the value for k responses is estimated from all n without bias.
"""

import math
import operator
import statistics
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from megappo.config.eval_sets import EvalSet, eval_sets
from megappo.observe.metrics import Metric, reduce_ranks
from megappo.observe.observer import NullObserver, Observer
from megappo.rollouts.datasets import Datasets
from megappo.rollouts.responses import Responses, episode_metrics, named_metrics, named_parts
from megappo.rollouts.rollouts import Rollouts
from megappo.rollouts.sample_rows import Sample
from megappo.trainer.statistics import value_parts

HAS_ANSWERS = "has_answers"
"""Positive if any response has an answer; without, there is no majority."""


def evaluate(rollouts: Rollouts, datasets: Datasets, observer: Observer | NullObserver, step: int) -> dict[str, Any]:
    """Evaluate every held-out data set, log a few responses, and return `val/<dataset>/*`; all ranks together.

    Ranks exchange only numbers and the responses to log.
    """
    metrics = {}
    for name, settings in eval_sets(rollouts.config).items():
        prompts = datasets.held_out(name, rollouts.exchange)
        params = rollouts.params(settings.max_response_length, settings.temperature, settings.top_p, settings.top_k)
        responses = rollouts.sample(prompts, settings.n, params, f"evaluate {name}", task=name)
        parts = _metric_parts(responses, settings, has_spread=len(prompts) > 1)
        mine = (parts, _shown(rollouts, responses, name, settings))
        parts_by_rank, shown_by_rank = zip(*rollouts.exchange.share(mine), strict=True)
        found = reduce_ranks(parts_by_rank)
        has_answers = found.pop(HAS_ANSWERS)
        for metric, value in found.items():
            if has_answers > 0 or not metric.startswith("maj@"):
                metrics[f"val/{name}/{metric}"] = value
        shown = {index: sample for of_rank in shown_by_rank for index, sample in of_rank.items()}
        observer.samples(step, [shown[index] for index in sorted(shown)])
    return metrics


def _metric_parts(responses: Responses, settings: EvalSet, *, has_spread: bool) -> dict[str, Metric]:
    """Return this rank's part of the metrics of a data set.

    Args:
        has_spread: there are several prompts, so means have a confidence interval.
    """
    by_response: list[dict[str, float]] = []
    by_prompt: list[dict[str, float]] = []
    all_scores: list[float] = []
    all_answers: list[str | None] = []
    for group in responses.groups().values():
        scores, answers = _scores(group), [one.graded.answer for one in group]
        by_prompt.append(prompt_statistics(scores, answers, settings.pass_threshold))
        all_scores += scores
        all_answers += answers
        for one in group:
            lengths = {"response_length/mean": one.num_policy_tokens}
            by_response.append(lengths | {"truncated_frac": one.is_truncated} | named_parts(one.graded.parts))
    metrics = value_parts("score", torch.tensor(all_scores, dtype=torch.float64))
    metrics |= named_metrics([*by_response, *by_prompt], dtype=torch.float64)
    if has_spread:
        widths = named_metrics(by_prompt, "ci95", torch.float64)
        metrics |= {f"{name}/ci95": metric for name, metric in widths.items()}
    metrics[HAS_ANSWERS] = Metric.of(float(any(answer is not None for answer in all_answers)), "max")
    return metrics | responses.failure_metrics() | episode_metrics(responses.samples)


def _scores(group: Sequence[Sample]) -> list[float]:
    return [math.fsum(one.graded.scores) for one in group]


def _shown(rollouts: Rollouts, responses: Responses, name: str, settings: EvalSet) -> dict[int, dict[str, Any]]:
    """Return the first prompts of a data set, if they are among these, with their first response and all scores."""
    shown = {}
    for index, group in responses.groups().items():
        if index >= rollouts.config.trainer.num_samples:
            continue
        prompt, scores, first = responses.prompts[index], _scores(group), group[0]
        shown[index] = {
            "dataset": name,
            "prompt": prompt.text,
            "response": rollouts.tokenizer.decode(first.tokens, skip_special_tokens=True),
            "label": prompt.label,
            "score": scores[0],
            "passed": scores[0] >= settings.pass_threshold,
        }
        if settings.n > 1:
            answers = [one.graded.answer for one in group]
            shown[index]["scores"] = scores
            if any(answer is not None for answer in answers):
                shown[index]["answers"] = answers
    return shown


def prompt_statistics(
    scores: Sequence[float], answers: Sequence[str | None], pass_threshold: float
) -> dict[str, float]:
    """Return the statistics of the responses to one prompt.

    Args:
        answers: None where a response has no answer.
        pass_threshold: lowest score with which a response passes.
    """
    n = len(scores)
    num_passed = sum(score >= pass_threshold for score in scores)
    numbers = {f"mean@{n}": statistics.fmean(scores), "pass@1": pass_at(1, n, num_passed)}
    for k in subset_sizes(n):
        numbers[f"pass@{k}"] = pass_at(k, n, num_passed)
        numbers[f"best@{k}"] = best_at(k, scores)
        numbers[f"worst@{k}"] = -best_at(k, [-score for score in scores])
        numbers[f"maj@{k}"] = majority_at(k, scores, answers)
    return numbers


def subset_sizes(n: int) -> list[int]:
    """Return 2, 4, 8, ... up to n, and n itself, without 1."""
    powers = {2**power for power in range(1, n.bit_length())}
    return sorted(powers | {n} - {1})


def pass_at(k: int, n: int, num_passed: int) -> float:
    """Return the probability that at least one of k responses passes, drawn without replacement from n.

    Source: Chen et al. 2021, Evaluating Large Language Models Trained on Code, equation 1.
    """
    return 1.0 - math.comb(n - num_passed, k) / math.comb(n, k)


def best_at(k: int, scores: Sequence[float]) -> float:
    """Return the mean, over all choices of k responses, of their largest score: `pass_at` for scores of any value."""
    return math.fsum(map(operator.mul, sorted(scores), _largest_chances(k, len(scores))))


@cache
def _largest_chances(k: int, n: int) -> tuple[float, ...]:
    """Return for each of n ascending scores the chance to be the largest of k: the k - 1 others are before it."""
    return tuple(math.comb(i, k - 1) / math.comb(n, k) for i in range(n))


def majority_at(k: int, scores: Sequence[float], answers: Sequence[str | None]) -> float:
    """Return the mean score of the majority answer of k responses, over as many consecutive groups of k as there are.

    A response without an answer has no vote. If no response of a group has a vote, or several answers have equally
    many, the mean over all of these is taken: the expected score of a random choice among them.

    Source: Wang et al. 2023, Self-Consistency Improves Chain of Thought Reasoning in Language Models.
    """
    votes = list(zip(answers, scores, strict=True))
    groups = [votes[start : start + k] for start in range(0, len(votes) - k + 1, k)]
    return statistics.fmean(_majority_score(group) for group in groups)


def _majority_score(votes: list[tuple[str | None, float]]) -> float:
    counts = Counter(answer for answer, _ in votes if answer is not None) or Counter([None])
    most = max(counts.values())
    winners = [answer for answer, count in counts.items() if count == most]
    means = [statistics.fmean(score for answer, score in votes if answer == winner) for winner in winners]
    return statistics.fmean(means)

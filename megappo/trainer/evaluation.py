"""Evaluation: responses to held-out prompts, scored, as metrics: mean@n, pass@k, best@k, worst@k, maj@k.

For a prompt with n responses, the value for k responses is estimated from all n without bias.
"""

import math
import operator
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from megappo.config.eval_sets import EvalSet, eval_sets
from megappo.data.prompts import Prompt
from megappo.observe.metrics import Metric, reduce_ranks
from megappo.observe.observer import NullObserver, Observer
from megappo.rollouts.datasets import Datasets
from megappo.rollouts.responses import Responses, episode_metrics
from megappo.rollouts.rollouts import Rollouts
from megappo.rollouts.sampler import Sample
from megappo.trainer.statistics import value_parts


@dataclass
class AnsweredPrompt:
    """A held-out prompt with all of its responses.

    Attributes:
        scores, answers, parts: of each response; see `Graded`.
    """

    prompt: Prompt
    samples: list[Sample] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    answers: list[str | None] = field(default_factory=list)
    parts: list[Mapping[str, float]] = field(default_factory=list)

    @property
    def has_answers(self) -> bool:
        return any(answer is not None for answer in self.answers)


def evaluate(rollouts: Rollouts, datasets: Datasets, observer: Observer | NullObserver, step: int) -> dict[str, Any]:
    """Evaluate every held-out data set, log a few responses, and return `val/<dataset>/*`; all ranks together.

    Ranks exchange only numbers and the responses to log.
    """
    metrics = {}
    for name, one in eval_sets(rollouts.config).items():
        prompts = datasets.held_out(name, rollouts.exchange)
        params = rollouts.params(one.max_response_length, one.temperature, one.top_p, one.top_k)
        responses = rollouts.sample(prompts, one.n, params, f"evaluate {name}", task=name)
        answered = _by_prompt(responses)
        parts = _metric_parts(list(answered.values()), one, has_spread=len(prompts) > 1)
        parts |= responses.failure_metrics() | episode_metrics(responses.samples)
        has_answers = any(found.has_answers for found in answered.values())
        mine = (parts, _shown(rollouts, answered, name, one), has_answers)
        parts_by_rank, shown_by_rank, has_answers_by_rank = zip(*rollouts.exchange.share(mine), strict=True)
        for metric, value in reduce_ranks(parts_by_rank).items():
            if any(has_answers_by_rank) or not metric.startswith("maj@"):
                metrics[f"val/{name}/{metric}"] = value
        shown = {index: sample for of_rank in shown_by_rank for index, sample in of_rank.items()}
        observer.samples(step, [shown[index] for index in sorted(shown)])
    return metrics


def _by_prompt(responses: Responses) -> dict[int, AnsweredPrompt]:
    """Return this rank's responses by prompt_index, in the order of their sample_index."""
    answered: dict[int, AnsweredPrompt] = {}
    pairs = zip(responses.samples, responses.graded(), strict=True)
    for sample, graded in sorted(pairs, key=lambda pair: pair[0].sample_index):
        index = sample.prompt_index
        found = answered.setdefault(index, AnsweredPrompt(responses.prompts[index]))
        found.samples.append(sample)
        found.scores.append(math.fsum(graded.scores))
        found.answers.append(graded.answer)
        found.parts.append(graded.parts)
    return answered


def _metric_parts(answered: Sequence[AnsweredPrompt], one: EvalSet, *, has_spread: bool) -> dict[str, Metric]:
    """Return this rank's part of the metrics of a data set.

    Args:
        has_spread: there are several prompts, so means have a confidence interval.
    """
    values: dict[str, list[float]] = {"response_length/mean": [], "truncated_frac": []}
    scores: list[float] = []
    for found in answered:
        scores += found.scores
        values["response_length/mean"] += [sample.num_policy_tokens for sample in found.samples]
        values["truncated_frac"] += [sample.finish_reason == "length" for sample in found.samples]
        for parts in found.parts:
            for name, number in parts.items():
                values.setdefault(f"part/{name}", []).append(number)
    by_prompt = [prompt_statistics(found.scores, found.answers, one.pass_threshold) for found in answered]
    names = statistic_names(one.n)
    for name in names:
        values[name] = [numbers[name] for numbers in by_prompt]
    metrics = value_parts("score", torch.tensor(scores, dtype=torch.float64))
    for name, numbers in values.items():
        metrics[name] = Metric.of(torch.tensor(numbers, dtype=torch.float64), "mean")
    for name in names if has_spread else ():
        metrics[f"{name}/ci95"] = Metric.of(torch.tensor(values[name], dtype=torch.float64), "ci95")
    return metrics


def _shown(
    rollouts: Rollouts, answered: Mapping[int, AnsweredPrompt], name: str, one: EvalSet
) -> dict[int, dict[str, Any]]:
    """Return the first prompts of a data set, if they are among these, with their first response and all scores."""
    shown = {}
    for index, found in answered.items():
        if index >= rollouts.config.trainer.num_samples:
            continue
        shown[index] = {
            "dataset": name,
            "prompt": found.prompt.text,
            "response": rollouts.tokenizer.decode(found.samples[0].tokens, skip_special_tokens=True),
            "label": found.prompt.label,
            "score": found.scores[0],
            "passed": found.scores[0] >= one.pass_threshold,
        }
        if one.n > 1:
            shown[index]["scores"] = found.scores
            if found.has_answers:
                shown[index]["answers"] = found.answers
    return shown


def statistic_names(n: int) -> list[str]:
    """Return the names of `prompt_statistics` for n responses; for one response, mean@1 and pass@1."""
    names = [f"mean@{n}", "pass@1"]
    for k in subset_sizes(n):
        names += [f"pass@{k}", f"best@{k}", f"worst@{k}", f"maj@{k}"]
    return names


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

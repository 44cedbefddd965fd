"""Evaluation: responses to held-out prompts, scored, as metrics: mean@n, pass@k, best@k, worst@k, maj@k.

For a prompt with n responses, the value for k responses is estimated from all n without bias.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from megappo.config.eval_sets import Task, eval_sets
from megappo.observe.metrics import Metric, RankMetrics, Reduced, reduce_ranks
from megappo.observe.observer import NullObserver, Observer
from megappo.rollouts.datasets import Datasets
from megappo.rollouts.responses import Responses, episode_metrics, named_metrics, named_parts
from megappo.rollouts.rollouts import Rollouts
from megappo.rollouts.sample_rows import Sample, shown_facts
from megappo.runtime.heartbeat import heartbeat
from megappo.trainer.statistics import spread


def evaluate(
    rollouts: Rollouts,
    datasets: Datasets,
    observer: Observer | NullObserver,
    step: int,
    grade: Callable[[Mapping[str, Responses]], None],
) -> Reduced:
    """Evaluate every held-out data set, log a few responses, and return `val/<dataset>/*`; all ranks together.

    Ranks exchange only numbers and the responses to log.

    Args:
        grade: scores the responses to some data sets with the reward model.
    """
    metrics = {}
    tasks = eval_sets(rollouts.config)
    all_responses = {}
    for name, task in tasks.items():
        prompts = datasets.held_out(name, rollouts.exchange)
        own = task.rollout
        params = rollouts.params(own.max_response_length, own.temperature, own.top_p, own.top_k)
        heartbeat.begin(name)
        all_responses[name] = rollouts.sample(prompts, own.n, params, task=name)
    if by_model := {name: responses for name, responses in all_responses.items() if tasks[name].has_reward_model}:
        grade(by_model)
    for name, responses in all_responses.items():
        task = tasks[name]
        threshold = task.rollout.val_pass_threshold
        has_spread = len(responses.prompts) > 1
        parts = _metric_parts(responses, threshold, has_spread=has_spread)
        shown = _shown(rollouts, responses, name, task)
        has_answers = any(one.grade.answer is not None for one in responses.samples)
        shared = rollouts.exchange.all_gather((parts, shown, has_answers))
        parts_by_rank, shown_by_rank, have_answers = zip(*shared, strict=True)
        for metric, value in reduce_ranks(parts_by_rank).items():
            if any(have_answers) or not metric.startswith("maj@"):  # without answers there is no majority
                metrics[f"val/{name}/{metric}"] = value
        in_order = sorted(chain(*shown_by_rank), key=lambda shown: shown[0])
        if rollouts.images is not None and rollouts.exchange.rank == 0:
            for index, sample in in_order:
                sample["images"] = rollouts.images.thumbnails(responses.prompts[index].record)
        observer.samples(step, [sample for _, sample in in_order])
    return metrics


def _metric_parts(responses: Responses, pass_threshold: float, *, has_spread: bool) -> RankMetrics:
    """Return this rank's part of the metrics of a data set.

    Args:
        has_spread: there are several prompts, so means have a confidence interval.
    """
    by_response = []
    by_prompt = []
    all_scores = []
    for group in responses.groups().values():
        scores, answers = _scores_and_answers(group)
        by_prompt.append(prompt_statistics(scores, answers, pass_threshold))
        all_scores += scores
        for one in group:
            lengths = {"response_length/mean": one.num_policy_tokens}
            by_response.append(lengths | {"truncated_frac": one.is_truncated} | named_parts(one.grade.parts))
    score = spread("score", torch.tensor(all_scores, dtype=torch.float64))
    metrics = {name: Metric.of(*part) for name, part in score.items()}
    metrics |= named_metrics([*by_response, *by_prompt], dtype=torch.float64)
    if has_spread:
        widths = named_metrics(by_prompt, "ci95", torch.float64)
        metrics |= {f"{name}/ci95": metric for name, metric in widths.items()}
    return metrics | responses.failure_metrics() | episode_metrics(responses.samples)


def _scores_and_answers(group: Sequence[Sample]) -> tuple[list[float], list[str | None]]:
    return [math.fsum(one.grade.scores) for one in group], [one.grade.answer for one in group]


def _shown(
    rollouts: Rollouts,
    responses: Responses,
    name: str,
    task: Task,
) -> list[tuple[int, dict[str, Any]]]:
    """Return the first prompts of a data set, if they are among these, with their first response and all scores."""
    records = []
    for index, group in responses.groups().items():
        if index >= rollouts.config.trainer.num_samples:
            continue
        prompt = responses.prompts[index]
        scores, answers = _scores_and_answers(group)
        shown = {
            "dataset": name,
            "prompt": prompt.text,
            "response": rollouts.tokenizer.decode(group[0].tokens, skip_special_tokens=True),
            "label": prompt.label,
            "score": scores[0],
            "passed": scores[0] >= task.rollout.val_pass_threshold,
        }
        shown |= shown_facts(group[0], rollouts.tokenizer)
        if task.rollout.n > 1:
            shown["scores"] = scores
            if any(answer is not None for answer in answers):
                shown["answers"] = answers
        records.append((index, shown))
    return records


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
    n = len(scores)
    # The scores ascend: one is the largest of k if the k - 1 others are before it.
    return math.fsum(score * (math.comb(i, k - 1) / math.comb(n, k)) for i, score in enumerate(sorted(scores)))


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
    answers = [answer for answer, _ in votes if answer is not None]
    counts = Counter(answers or [None])
    most = max(counts.values())
    means = []
    for winner, count in counts.items():
        if count == most:
            scores = [score for answer, score in votes if answer == winner]
            means.append(statistics.fmean(scores))
    return statistics.fmean(means)

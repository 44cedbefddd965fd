"""An evaluation: responses to held-out prompts, scored, as metrics, and a few of them to show. All ranks together."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from megappo.config.eval_sets import EvalSet, eval_sets
from megappo.data.prompts import Prompt
from megappo.observe.metrics import Metric, reduce_ranks
from megappo.observe.observer import NullObserver, Observer
from megappo.rollouts.datasets import Datasets
from megappo.rollouts.responses import episode_metrics
from megappo.rollouts.sampler import Sample
from megappo.trainer.eval_statistics import names, of_prompt
from megappo.trainer.rollouts import Rollouts
from megappo.trainer.statistics import value_parts
from megappo.userland.forms import Graded


@dataclass(frozen=True)
class Answered:
    """A prompt with all of its responses, what the reward function found of each, and its score."""

    prompt: Prompt
    samples: list[Sample]
    graded: list[Graded]

    @cached_property
    def scores(self) -> list[float]:
        return [math.fsum(one.scores) for one in self.graded]

    @property
    def answers(self) -> list[str | None]:
        return [one.answer for one in self.graded]

    @property
    def has_answers(self) -> bool:
        return any(answer is not None for answer in self.answers)


def evaluate(rollouts: Rollouts, datasets: Datasets, observer: Observer | NullObserver, step: int) -> dict[str, Any]:
    """`val/<dataset>/*` on every held-out prompt of each data set, and a few prompts' responses logged.

    From rank to rank go numbers, and the responses to show.
    """
    metrics = {}
    for name, one in eval_sets(rollouts.config).items():
        prompts = datasets.held_out(name, rollouts.exchange)
        answered, counts = _answered(rollouts, prompts, name, one)
        own = _parts(list(answered.values()), one, has_spread=len(prompts) > 1) | counts
        shown = _shown(rollouts, answered, name, one)
        has_answers = any(found.has_answers for found in answered.values())
        parts, samples, answers = zip(*rollouts.exchange.share((own, shown, has_answers)), strict=True)
        votes = any(answers)
        found = {key: value for key, value in reduce_ranks(parts).items() if votes or not key.startswith("maj@")}
        metrics |= {f"val/{name}/{metric}": value for metric, value in found.items()}
        of_all_ranks = {index: sample for part in samples for index, sample in part.items()}
        observer.samples(step, [of_all_ranks[index] for index in sorted(of_all_ranks)])
    return metrics


def _answered(
    rollouts: Rollouts, prompts: Sequence[Prompt], name: str, one: EvalSet
) -> tuple[dict[int, Answered], dict[str, Metric]]:
    """This rank's share of the prompts of a data set, by their places in it; and its part of
    `SampleScoring.counts` and of what is told of episodes."""
    params = rollouts.params(one.max_response_length, one.temperature, one.top_p, one.top_k)
    scoring = rollouts.scoring(prompts, name)
    samples = rollouts.sample(prompts, one.n, params, f"evaluate {name}", scoring, task=name)
    graded = scoring.graded()
    of_prompts: dict[int, list[tuple[Sample, Graded]]] = defaultdict(list)
    for pair in sorted(zip(samples, graded, strict=True), key=lambda pair: pair[0].sample_index):
        of_prompts[pair[0].prompt_index].append(pair)
    answered = {
        index: Answered(prompts[index], [sample for sample, _ in pairs], [found for _, found in pairs])
        for index, pairs in of_prompts.items()
    }
    return answered, scoring.counts() | episode_metrics(samples)


def _parts(answered: Sequence[Answered], one: EvalSet, *, has_spread: bool) -> dict[str, Metric]:
    """This rank's part of the metrics of a data set.

    Args:
        has_spread: there is more than one prompt, so that means have a confidence interval.
    """
    samples = [sample for found in answered for sample in found.samples]
    scores = torch.tensor([score for found in answered for score in found.scores], dtype=torch.float64)
    metrics = value_parts("score", scores)
    told: dict[str, list[float]] = defaultdict(list)
    for graded in (graded for found in answered for graded in found.graded):
        for name, number in graded.parts.items():
            told[f"part/{name}"].append(number)
    told["response_length/mean"] = [sample.num_policy_tokens for sample in samples]
    told["truncated_frac"] = [sample.finish_reason == "length" for sample in samples]
    numbers = [of_prompt(found.scores, found.answers, one.pass_threshold) for found in answered]
    of_prompts = {name: [of_one[name] for of_one in numbers] for name in names(one.n)}
    for name, values in (told | of_prompts).items():
        metrics[name] = Metric.of(torch.tensor(values, dtype=torch.float64), "mean")
    for name, values in of_prompts.items() if has_spread else ():
        metrics[f"{name}/ci95"] = Metric.of(torch.tensor(values, dtype=torch.float64), "ci95")
    return metrics


def _shown(rollouts: Rollouts, answered: Mapping[int, Answered], name: str, one: EvalSet) -> dict[int, dict[str, Any]]:
    """The first prompts of a data set that are among these: with their first response, and the scores of all."""
    return {
        index: {
            "dataset": name,
            "prompt": found.prompt.text,
            "response": rollouts.tokenizer.decode(found.samples[0].tokens, skip_special_tokens=True),
            "label": found.prompt.label,
            "score": found.scores[0],
            "passed": found.scores[0] >= one.pass_threshold,
            **({"scores": found.scores} if one.n > 1 else {}),
            **({"answers": found.answers} if one.n > 1 and found.has_answers else {}),
        }
        for index, found in answered.items()
        if index < rollouts.config.trainer.num_samples
    }

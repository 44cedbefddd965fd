"""Samples on their way to the reward function's workers, from when they are written."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import get_args

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from megappo.data.prompts import Prompt
from megappo.observe.metrics import Metric
from megappo.rollouts.episodes import Ending
from megappo.rollouts.sampler import Sample
from megappo.userland.forms import Graded
from megappo.userland.pool import RewardPool
from megappo.userland.work import Row


class SampleScoring:
    """Samples that are added as they come, and what a reward function finds of each.

    Args:
        rewards: its workers; None on ranks that have no samples.
        tokenizer: no other thread may use it.
        prompts: in which the samples' indices count.
    """

    def __init__(self, rewards: RewardPool | None, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]):
        self._rewards, self._tokenizer, self._prompts = rewards, tokenizer, prompts
        self._scoring = rewards.begin() if rewards is not None else None
        self._samples: list[Sample] = []

    def add(self, samples: Sequence[Sample]) -> range:
        """Have their whole texts scored, an environment's turns included; workers may begin at once. Their positions
        among all samples."""
        positions = range(len(self._samples), len(self._samples) + len(samples))
        self._samples += samples
        if self._scoring is None or not samples:  # of no texts the tokenizer would decode one
            return positions
        texts = self._tokenizer.batch_decode([one.tokens for one in samples], skip_special_tokens=True)
        of_sample = [self._prompts[one.prompt_index] for one in samples]
        self._scoring.add(
            [
                Row(prompt.text, text, prompt.label, prompt.columns, f"record {prompt.index}, counted from 0")
                for prompt, text in zip(of_sample, texts, strict=True)
            ]
        )
        return positions

    def known(self, positions: range) -> list[Graded] | None:
        """As `graded`, of these samples alone, if it is there by now."""
        samples = self._samples[positions.start : positions.stop]
        graded = [Graded([], {})] * len(samples) if self._scoring is None else self._scoring.known(positions)
        return None if graded is None else _with_returns(samples, graded)

    def end(self) -> None:
        """Say that all samples are there."""
        if self._scoring is not None:
            self._scoring.end()

    def graded(self) -> list[Graded]:
        """Of each sample, in order; waits for them. One of which a function failed has no scores of it, and is told.

        The sum of an environment's rewards comes before the function's scores, and is there without them, too.

        Raises:
            RewardError: the function failed, and reward.on_error is raise.
        """
        if self._scoring is None:
            return _with_returns(self._samples, [Graded([], {})] * len(self._samples))
        graded = self._scoring.results()
        if failure := self._scoring.failure:
            failed = sum(one.failed for one in graded)
            print(f"WARNING (rank {dist.get_rank()}): {failed} responses have score 0: {failure}", flush=True)
        return _with_returns(self._samples, graded)

    def counts(self) -> dict[str, Metric]:
        """Of how many samples a function failed, and of how many as a call took too long; where that ends no run."""
        if self._scoring is None or self._rewards.on_error == "raise":
            return {}
        numbers = {"errors": self._scoring.num_errors, "timeouts": self._scoring.num_timeouts}
        return {name: Metric((number,), "sum") for name, number in numbers.items()}


@dataclass(frozen=True)
class PartlyWanted:
    """Some of the samples of a scoring, by their positions; as `SampleScoring`."""

    _scoring: SampleScoring
    _positions: Sequence[int]

    def graded(self) -> list[Graded]:
        """Of each of these samples, in order; waits for all."""
        graded = self._scoring.graded()
        return [graded[position] for position in self._positions]

    def counts(self) -> dict[str, Metric]:
        """See `SampleScoring`; of all."""
        return self._scoring.counts()


@dataclass(frozen=True)
class Scored:
    """Samples whose scores are there; as `SampleScoring`."""

    _graded: list[Graded]
    _counts: dict[str, Metric]

    def graded(self) -> list[Graded]:
        """Of each sample, in order."""
        return self._graded

    def counts(self) -> dict[str, Metric]:
        """See `SampleScoring`."""
        return self._counts


def nums_scores_of(graded: Sequence[Graded]) -> set[int]:
    """How many scores samples have, but for those of which a function failed."""
    return {len(one.scores) for one in graded if not one.failed}


def told_means(graded: Sequence[Graded]) -> dict[str, Metric]:
    """This rank's part of the means of what else than scores was told, by name."""
    names = {name for one in graded for name in one.parts}
    values = {name: [one.parts[name] for one in graded if name in one.parts] for name in sorted(names)}
    parts = {f"part/{name}": Metric.of(torch.tensor(told), "mean") for name, told in values.items()}
    if of_steps := [sum(score for _, score in chain(*one.steps)) for one in graded if any(one.steps)]:
        parts["step_scores"] = Metric.of(torch.tensor(of_steps), "mean")
    return parts


def _with_returns(samples: Sequence[Sample], graded: Sequence[Graded]) -> list[Graded]:
    return [
        one if sample.episode is None else _with_return(sample, one)
        for sample, one in zip(samples, graded, strict=True)
    ]


def _with_return(sample: Sample, graded: Graded) -> Graded:
    rewards = (reward for segment in sample.episode.segments for reward in segment.rewards)
    return graded._replace(scores=[math.fsum(rewards), *graded.scores], steps=[(), *graded.steps])


def episode_metrics(samples: Sequence[Sample]) -> dict[str, Metric]:
    """This rank's part of what is told of episodes."""
    episodes = [one.episode for one in samples if one.episode is not None]
    if not episodes:
        return {}
    values = {
        "turns": [one.num_turns for one in episodes],
        "segments": [len(one.segments) for one in episodes],
        **{f"{ending}_frac": [one.ending == ending for one in episodes] for ending in get_args(Ending)},
    }
    for name in sorted({name for one in episodes for name in one.parts}):
        values[f"part/{name}"] = [one.parts[name] for one in episodes if name in one.parts]
    return {f"episode/{name}": Metric.of(torch.tensor(found).float(), "mean") for name, found in values.items()}

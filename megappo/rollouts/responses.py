"""Responses to prompts, scored by the reward function's workers from the moment that each is finished."""

import math
from collections.abc import Sequence
from itertools import chain
from typing import get_args

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from megappo.data.prompts import Prompt
from megappo.observe.metrics import Metric
from megappo.rollouts.episodes import Ending
from megappo.rollouts.sampler import EngineUsage, Sample
from megappo.userland.forms import Graded
from megappo.userland.pool import RewardPool
from megappo.userland.work import Row


class Responses:
    """This rank's responses to some prompts.

    Args:
        rewards: workers of the reward function; None where there is none, or on ranks without responses.
        tokenizer: no other thread may use it.
    Attributes:
        samples: so far; `prompt_index` counts in `prompts`.
        usage: of this rank's engine while it sampled them.
    """

    def __init__(self, prompts: Sequence[Prompt], rewards: RewardPool | None, tokenizer: PreTrainedTokenizerBase):
        self.prompts = prompts
        self.samples: list[Sample] = []
        self.usage = EngineUsage()
        self._rewards, self._tokenizer = rewards, tokenizer
        self._scoring = None if rewards is None else rewards.begin()
        self._graded: list[Graded] | None = None

    def add(self, samples: Sequence[Sample]) -> range:
        """Have the whole texts scored, the environment's turns included; return the samples' positions."""
        positions = range(len(self.samples), len(self.samples) + len(samples))
        self.samples += samples
        if self._scoring is None or not samples:  # batch_decode makes one text of no tokens at all
            return positions
        texts = self._tokenizer.batch_decode([one.tokens for one in samples], skip_special_tokens=True)
        rows = []
        for sample, text in zip(samples, texts, strict=True):
            prompt = self.prompts[sample.prompt_index]
            name = f"record {prompt.index}, counted from 0"
            rows.append(Row(prompt.text, text, prompt.label, prompt.columns, name))
        self._scoring.add(rows)
        return positions

    def end(self) -> None:
        """Declare that all samples have been added."""
        if self._scoring is not None:
            self._scoring.end()

    def known(self, positions: range) -> list[Graded] | None:
        """Return what is known of these samples, as `graded` does; None while their scores are missing."""
        samples = self.samples[positions.start : positions.stop]
        graded = [Graded([], {})] * len(samples) if self._scoring is None else self._scoring.known(positions)
        return None if graded is None else _with_returns(samples, graded)

    def graded(self) -> list[Graded]:
        """Wait for the scores of all samples, in order. A sample for which a function failed has none of its scores.

        With an environment, the sum of its rewards comes first, before the function's scores.

        Raises:
            RewardError: the function failed, and reward.on_error is raise.
        """
        if self._graded is None:
            self._graded = _with_returns(self.samples, self._function_results())
        return self._graded

    def _function_results(self) -> list[Graded]:
        if self._scoring is None:
            return [Graded([], {})] * len(self.samples)
        graded = self._scoring.results()
        if failure := self._scoring.failure:
            num_failed = sum(one.failed for one in graded)
            print(f"WARNING (rank {dist.get_rank()}): {num_failed} responses have score 0: {failure}", flush=True)
        return graded

    def failure_metrics(self) -> dict[str, Metric]:
        """Count samples for which a function failed, or exceeded its time, where neither ends the run."""
        if self._scoring is None or self._rewards.on_error == "raise":
            return {}
        counts = {"errors": self._scoring.num_errors, "timeouts": self._scoring.num_timeouts}
        return {name: Metric((count,), "sum") for name, count in counts.items()}


def _with_returns(samples: Sequence[Sample], graded: Sequence[Graded]) -> list[Graded]:
    pairs = zip(samples, graded, strict=True)
    return [one if sample.episode is None else _with_return(sample, one) for sample, one in pairs]


def _with_return(sample: Sample, graded: Graded) -> Graded:
    rewards = (reward for segment in sample.episode.segments for reward in segment.rewards)
    return graded._replace(scores=[math.fsum(rewards), *graded.scores], steps=[(), *graded.steps])


def extra_metrics(graded: Sequence[Graded]) -> dict[str, Metric]:
    """This rank's part of the means of what reward functions return beside scores, by name."""
    metrics = {}
    for name in sorted({name for one in graded for name in one.parts}):
        values = [one.parts[name] for one in graded if name in one.parts]
        metrics[f"part/{name}"] = Metric.of(torch.tensor(values), "mean")
    step_sums = [sum(score for _, score in chain(*one.steps)) for one in graded if any(one.steps)]
    if step_sums:
        metrics["step_scores"] = Metric.of(torch.tensor(step_sums), "mean")
    return metrics


def episode_metrics(samples: Sequence[Sample]) -> dict[str, Metric]:
    """This rank's part of the metrics of episodes; empty without any."""
    episodes = [one.episode for one in samples if one.episode is not None]
    if not episodes:
        return {}
    values: dict[str, list[float]] = {
        "turns": [one.num_turns for one in episodes],
        "segments": [len(one.segments) for one in episodes],
    }
    for ending in get_args(Ending):
        values[f"{ending}_frac"] = [one.ending == ending for one in episodes]
    for name in sorted({name for one in episodes for name in one.parts}):
        values[f"part/{name}"] = [one.parts[name] for one in episodes if name in one.parts]
    return {f"episode/{name}": Metric.of(torch.tensor(found).float(), "mean") for name, found in values.items()}

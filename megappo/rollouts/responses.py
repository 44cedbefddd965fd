"""Responses to prompts, scored by the reward function's workers from the moment that each is finished."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import get_args

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from megappo.data.prompts import Prompt
from megappo.observe.metrics import Metric
from megappo.rollouts.episodes import Ending, Episode
from megappo.rollouts.sampler import EngineUsage, Sample
from megappo.userland.grades import Graded
from megappo.userland.rewards import RewardPool
from megappo.userland.signatures import Row


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

    def groups(self) -> dict[int, list[tuple[Sample, Graded]]]:
        """Wait for the scores; return the samples with theirs by prompt_index, in the order of their sample_index."""
        groups: dict[int, list[tuple[Sample, Graded]]] = defaultdict(list)
        for sample, graded in zip(self.samples, self.graded(), strict=True):
            groups[sample.prompt_index].append((sample, graded))
        for group in groups.values():
            group.sort(key=lambda pair: pair[0].sample_index)
        return groups

    def engine_metrics(self) -> dict[str, Metric]:
        """This rank's part of the metrics of all engines; empty if its engine finished nothing."""
        usage = self.usage
        if not usage.prompt_tokens:
            return {}
        return {
            "rollout/running_requests": Metric((usage.sequence_seconds, usage.seconds), "mean"),
            "rollout/cached_prompt_frac": Metric((usage.cached_tokens, usage.prompt_tokens), "mean"),
        }

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


def named_metrics(
    records: Sequence[Mapping[str, float]], reduction: str = "mean", dtype: torch.dtype = torch.float32
) -> dict[str, Metric]:
    """This rank's part of the metric of each number, over the records that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, number in record.items():
            values[name].append(number)
    return {name: Metric.of(torch.tensor(numbers, dtype=dtype), reduction) for name, numbers in values.items()}


def extra_metrics(graded: Sequence[Graded]) -> dict[str, Metric]:
    """This rank's part of the means of what reward functions return beside scores."""
    records = [parts_of(one) for one in graded]
    for record, one in zip(records, graded, strict=True):
        if any(one.steps):
            record["step_scores"] = sum(score for _, score in chain(*one.steps))
    return named_metrics(records)


def parts_of(found: Graded | Episode) -> dict[str, float]:
    """Return the further numbers of a reward function, or of an environment, by the names of their metrics."""
    return {f"part/{name}": number for name, number in found.parts.items()}


def episode_metrics(samples: Sequence[Sample]) -> dict[str, Metric]:
    """This rank's part of the metrics of episodes; empty without any."""
    records = []
    for episode in [one.episode for one in samples if one.episode is not None]:
        record = {"turns": episode.num_turns, "segments": len(episode.segments)} | parts_of(episode)
        for ending in get_args(Ending):
            record[f"{ending}_frac"] = episode.ending == ending
        records.append(record)
    return {f"episode/{name}": metric for name, metric in named_metrics(records).items()}

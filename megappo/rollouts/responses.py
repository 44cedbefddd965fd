"""Responses to prompts, scored by the reward function's workers from the moment that each is finished."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from megappo.data.prompts import Prompt
from megappo.errors import escaped_lines
from megappo.observe.metrics import Metric
from megappo.rollouts.sample_rows import UNSCORED, Prompts, Sample
from megappo.rollouts.sampler import EngineUsage
from megappo.userland.grades import Grade
from megappo.userland.rewards import RewardPool
from megappo.userland.signatures import Row
from megappo.userland.user_code import JsonObject

EPISODE_ENDINGS = ("done", "turns", "length", "lost")


class Responses:
    """This rank's responses to some prompts.

    Args:
        rewards: workers of the reward function; None where there is none, or on ranks without responses.
        tokenizer: no other thread may use it.
        columns: returns the fields of a prompt for reward functions.
    Attributes:
        samples: samples so far; `prompt_index` is an index into `prompts`.
        usage: work of this rank's engine while it sampled them.
    """

    def __init__(
        self,
        prompts: Prompts,
        rewards: RewardPool | None,
        tokenizer: PreTrainedTokenizerBase,
        columns: Callable[[Prompt], JsonObject] = attrgetter("columns"),
    ):
        self.prompts = prompts
        self._columns = columns
        self.samples: list[Sample] = []
        self.usage = EngineUsage()
        self._rewards = rewards
        self._tokenizer = tokenizer
        self._scoring = None if rewards is None else rewards.begin()
        self._is_graded = False

    def add(self, samples: Sequence[Sample]) -> range:
        """Score the whole texts, including the environment's turns; return the samples' positions."""
        positions = range(len(self.samples), len(self.samples) + len(samples))
        self.samples += samples
        if self._scoring is None or not samples:  # batch_decode makes one text of no tokens at all
            return positions
        texts = self._tokenizer.batch_decode([one.tokens for one in samples], skip_special_tokens=True)
        rows = []
        for sample, text in zip(samples, texts, strict=True):
            prompt = self.prompts[sample.prompt_index]
            rows.append(Row(prompt.text, text, prompt.label, self._columns(prompt), prompt.place))
        self._scoring.add(rows)
        return positions

    def end(self) -> None:
        """Declare that all samples have been added."""
        if self._scoring is not None:
            self._scoring.end()

    def fill_if_scored(self, positions: range) -> bool:
        """Fill in the grades of these samples if they have been scored; return whether they have."""
        samples = self.samples[positions.start : positions.stop]
        grades = [UNSCORED] * len(samples) if self._scoring is None else self._scoring.known(positions)
        if grades is not None:
            _fill(samples, grades)
        return grades is not None

    def fill_grades(self) -> None:
        """Wait for the scores of all samples and fill in their grades. A sample for which a function failed has none of
        its scores.

        Raises:
            RewardError: the function failed, and reward.on_error is raise.
        """
        if self._is_graded:
            return
        grades = [UNSCORED] * len(self.samples) if self._scoring is None else self._scoring.results()
        _fill(self.samples, grades)
        self._is_graded = True
        if self._scoring is not None and self._scoring.failure:
            num_failed = sum(one.failed for one in grades)
            failure = failure_report(self._scoring.failure, self._rewards.reported)
            message = f"{num_failed} responses have score 0: {failure}"
            print(f"WARNING (rank {dist.get_rank()}): {escaped_lines(message)}", flush=True)

    def groups(self) -> dict[int, list[Sample]]:
        """Wait for the scores; return the graded samples by prompt_index, in the order of their sample_index."""
        self.fill_grades()
        groups: dict[int, list[Sample]] = defaultdict(list)
        for sample in self.samples:
            groups[sample.prompt_index].append(sample)
        for group in groups.values():
            group.sort(key=lambda one: one.sample_index)
        return groups

    def failure_metrics(self) -> dict[str, Metric]:
        """Count graded samples for which a function failed, or exceeded its time, where neither ends the run."""
        if self._scoring is None or self._rewards.on_error == "raise":
            return {}
        num_failed = sum(one.grade.failed for one in self.samples)
        return {
            "failed_frac": Metric((num_failed, len(self.samples)), "mean"),
            "errors": Metric((self._scoring.num_errors,), "sum"),
            "timeouts": Metric((self._scoring.num_timeouts,), "sum"),
        }


def warn_of_lost(samples: Sequence[Sample]) -> None:
    """Warn if episodes are lost or cut short by their environment or agent."""
    if lost := [escaped_lines(one.lost) for one in samples if one.lost]:
        print(f"WARNING (rank {dist.get_rank()}): {len(lost)} episodes were cut short: {lost[0]}", flush=True)


def failure_report(failure: str, reported: set[str]) -> str:
    """Return a function's failure: whole for the first of its type, which is added to `reported`, else in a line."""
    kind = failure.partition(": ")[0]
    first = failure.partition("\n")[0]
    if kind in reported:
        return f"{first} (the first one is reported above in full)"
    reported.add(kind)
    return failure


def _fill(samples: Sequence[Sample], grades: Sequence[Grade]) -> None:
    """Fill in the grades of samples, with the sum of an environment's rewards before the scores of functions."""
    for sample, grade in zip(samples, grades, strict=True):
        sample.grade = grade
        if sample.parts is not None:
            total = math.fsum(chain.from_iterable(segment.rewards for segment in sample.segments))
            sample.grade = grade._replace(scores=[total, *grade.scores], steps=[(), *grade.steps])


def named_metrics(
    records: Sequence[Mapping[str, float]], reduction: str = "mean", dtype: torch.dtype = torch.float32
) -> dict[str, Metric]:
    """Return this rank's part of the metric of each number, over the records that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, number in record.items():
            values[name].append(number)
    return {name: Metric.of(torch.tensor(numbers, dtype=dtype), reduction) for name, numbers in values.items()}


def extra_metrics(samples: Sequence[Sample]) -> dict[str, Metric]:
    """Return this rank's part of the means of what reward functions return beside scores."""
    records = []
    for grade in [one.grade for one in samples]:
        record = named_parts(grade.parts)
        if any(grade.steps):
            record["step_scores"] = sum(score for _, score in chain(*grade.steps))
        records.append(record)
    return named_metrics(records)


def named_parts(parts: Mapping[str, float]) -> dict[str, float]:
    """Return the further numbers of a reward function, or of an environment, by the names of their metrics."""
    return {f"part/{name}": number for name, number in parts.items()}


def episode_metrics(samples: Sequence[Sample]) -> dict[str, Metric]:
    """Return this rank's part of the metrics of episodes; empty without any."""
    records = []
    for one in samples:
        if one.parts is not None:
            record = {"episode/turns": one.num_turns, "episode/segments": len(one.segments)}
            record |= {f"episode/{ending}_frac": one.ending == ending for ending in EPISODE_ENDINGS}
            record |= {f"episode/{name}": number for name, number in named_parts(one.parts).items()}
            records.append(record)
    return named_metrics(records) | agent_metrics(samples)


def agent_metrics(samples: Sequence[Sample]) -> dict[str, Metric]:
    """Return this rank's part of the metrics of agents' episodes; empty without any."""
    played = [one for one in samples if one.agent]
    facts = [one.agent for one in played]
    if not played:
        return {}
    num_turns = sum(one.num_turns for one in played)
    num_superseded = sum(one.num_superseded for one in facts)
    num_new = sum(len(one.segments) - 1 for one in played)
    num_later = num_turns - len(facts)
    records = [{"agent/requests": one.num_requests, "agent/waiting_seconds": one.waited_seconds} for one in facts]
    found = named_metrics(records)
    found["agent/superseded_frac"] = Metric((num_superseded, num_turns + num_superseded), "mean")
    return found | ({"agent/new_segment_frac": Metric((num_new, num_later), "mean")} if num_later else {})

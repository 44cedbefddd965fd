"""Choose the groups of responses that a step trains on: all groups of a draw, the first that are finished
(over-sampling), or the first whose scores differ, from as many draws as that takes (dynamic sampling).

Source: Yu et al. 2025, DAPO, section 3.2; the config keys and rounds are verl's.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from megappo.batch.exchange import Exchange
from megappo.config.sections import FilterGroups
from megappo.data.prompts import Prompt
from megappo.observe.metrics import Metric, merge_metrics
from megappo.rollouts.responses import Responses
from megappo.rollouts.sample_rows import Sample
from megappo.rollouts.sampler import EARLY_STOP_POLL_SECONDS, EngineUsage
from megappo.runtime.heartbeat import heartbeat
from megappo.userland.grades import Grade
from megappo.userland.rewards import RewardError

SCORE = "score"
"""The metric that is the sum of a response's scores; other metrics are numbers that reward functions return."""
GroupKey = tuple[int, int]
"""(round, prompt_index)."""


class GroupQuota:
    """Counts the groups of all ranks that a step can train on, so that engines stop when there are enough.

    Args:
        metric: only groups in which it differs count; None: all finished groups count.
        take: a `store_counter` shared by all ranks.
    """

    def __init__(self, num_groups: int, metric: str | None, take: Callable[[int], int]):
        self._num_groups = num_groups
        self._metric = metric
        self._take = take
        self._pending: list[tuple[Sequence[Sample], Callable[[], bool]]] = []

    def add(self, group: Sequence[Sample], fill_if_scored: Callable[[], bool]) -> None:
        """Add a finished group; `fill_if_scored` fills in its grades if it can, and returns whether they are there."""
        self._pending.append((group, fill_if_scored))

    def is_met(self) -> bool:
        """Count the added groups whose scores have arrived; return whether all ranks together have enough."""
        pending = []
        num_new = 0
        for group, fill_if_scored in self._pending:
            if self._metric is not None and not fill_if_scored():
                pending.append((group, fill_if_scored))
            elif self._metric is None or differ(group, self._metric):
                num_new += 1
        self._pending = pending
        return self._take(num_new) + num_new >= self._num_groups

    def wait_counted(self, is_interrupted: Callable[[], bool]) -> None:
        """Wait until all of this rank's groups are counted, or the quota is met. Other engines, which may still be
        sampling, need the count to stop in time."""
        while not self.is_met() and self._pending and not is_interrupted():
            with heartbeat.waiting():
                time.sleep(EARLY_STOP_POLL_SECONDS)


class Scored(Protocol):
    """Responses of this rank that are scored, or are being scored."""

    def fill_grades(self) -> None:
        """Wait for the scores and fill in the samples' grades."""

    def failure_metrics(self) -> dict[str, Metric]:
        """Count samples for which a function failed, where that does not end the run."""


@dataclass
class StepResponses:
    """The groups of responses that a step trains on.

    Attributes:
        prompts: one for each group, the same on all ranks.
        samples: this rank's; `prompt_index` is an index into `prompts`.
        parts: what this rank's samples are a part of.
        usages: work of this rank's engine for them.
        num_dropped_tokens: tokens of other responses, on all ranks.
        metrics: the same on all ranks, such as counts of groups and of draws.
        greedy: a greedy response to each prompt, where the estimator needs them.
        seconds: time that the engines took for them.
    """

    prompts: Sequence[Prompt]
    samples: list[Sample]
    parts: Sequence[Scored]
    usages: Sequence[EngineUsage]
    num_dropped_tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    greedy: Responses | None = None
    seconds: float = 0.0

    def fill_grades(self) -> None:
        """Wait for the scores of all parts and fill in the samples' grades."""
        for one in self.parts:
            one.fill_grades()

    def failure_metrics(self) -> dict[str, Metric]:
        """Return the failure metrics of all samples of all parts, see `Scored`."""
        return merge_metrics(one.failure_metrics() for one in self.parts)

    def engine_metrics(self) -> dict[str, Metric]:
        """Return this rank's part of the metrics of all engines, greedy responses included."""
        greedy = [] if self.greedy is None else [self.greedy.usage]
        return merge_metrics(usage.metrics() for usage in [*self.usages, *greedy])


class Batches:
    """Yields each step's scored rows. All ranks call it together.

    Attributes:
        num_drawn: prompts, or examples, that have been drawn so far.
        pending: positions, in the order of drawing, of prompts or examples that no step has trained on or left out yet.
    """

    num_drawn = 0
    pending: Sequence[int] = ()

    def prepare_save(self) -> None:
        """Prepare for a checkpoint. Only a run that samples ahead of training has responses in progress."""

    def forget_saved(self, step: int) -> None:
        """Delete what no run needs that resumes from a checkpoint after this step."""


def chosen_of(rounds: Sequence[Responses], groups: Sequence[GroupKey]) -> StepResponses:
    """Return the responses of the chosen groups, the same on all ranks, from all rounds of sampling."""
    prompts = [rounds[number].prompts[index] for number, index in groups]
    places = {group: place for place, group in enumerate(groups)}
    samples: list[Sample] = []
    for number, responses in enumerate(rounds):
        for sample in responses.samples:
            place = places.get((number, sample.prompt_index))
            if place is not None:
                sample.prompt_index = place
                samples.append(sample)
    return StepResponses(prompts, samples, rounds, [one.usage for one in rounds])


def choose_groups(
    sample: Callable[[Sequence[Prompt], int], Responses],
    draw: Callable[[], list[Prompt]],
    exchange: Exchange,
    num_groups: int,
    phase: Callable[[str], AbstractContextManager[None]],
    *,
    filters: FilterGroups,
    over_samples: bool = False,
) -> StepResponses:
    """Sample until `num_groups` groups count; return them in the order of their prompts. All ranks call it together.

    If the rounds of dynamic sampling yield too few groups, the first others fill up the step.

    Args:
        sample: samples responses to a draw of prompts; its second argument is the number of groups still needed.
        draw: returns the prompts of the next round.
        over_samples: draws have more prompts than a step trains on, and sampling stops when enough groups count.
    Raises:
        RewardError: a reward function failed, or returns no such metric.
    """
    rounds: list[Responses] = []
    counted = list[GroupKey]()
    others = list[GroupKey]()
    metric, max_rounds = (filters.metric, filters.max_num_gen_batches) if filters.enable else (None, 1)
    while len(counted) < num_groups and len(rounds) < max_rounds:
        with phase("rollout"):
            responses = sample(draw(), num_groups - len(counted))
        with phase("reward" if filters.enable else "rollout"):
            finished, counting = _finished_groups(responses, metric, exchange)
        for index in sorted(finished):
            (counted if index in counting else others).append((len(rounds), index))
        rounds.append(responses)
    chosen = chosen_of(rounds, (counted + others)[:num_groups])
    surplus = max(0, len(counted) - num_groups)
    if filters.enable:
        chosen.metrics |= {
            "filter_groups/num_gen_batches": len(rounds),
            "filter_groups/equal_groups": len(others),
            "filter_groups/equal_groups_kept": max(0, num_groups - len(counted)),
            "filter_groups/surplus_groups": surplus,
        }
    if filters.enable or over_samples:
        num_written = sum(usage.written_tokens for usage in chosen.usages)
        num_dropped = num_written - sum(one.num_policy_tokens for one in chosen.samples)
        chosen.num_dropped_tokens = sum(exchange.all_gather(num_dropped))
    if over_samples:
        num_finished = len(counted) + len(others)
        chosen.metrics["over_sampling/unfinished_groups"] = sum(len(one.prompts) for one in rounds) - num_finished
        chosen.metrics["over_sampling/dropped_tokens"] = chosen.num_dropped_tokens
        if not filters.enable:
            chosen.metrics["over_sampling/surplus_groups"] = surplus
    return chosen


def differ(group: Sequence[Sample], metric: str) -> bool:
    """Return whether a metric differs within a group. Nothing is known of responses for which a function failed."""
    return len({_value(one.grade, metric) for one in group if not one.grade.failed}) > 1


def _finished_groups(responses: Responses, metric: str | None, exchange: Exchange) -> tuple[set[int], set[int]]:
    """Return the prompts of all ranks' finished groups, and the prompts of groups that count. With a metric, wait for
    scores."""
    finished = counted = {one.prompt_index for one in responses.samples}
    if metric is not None:
        counted = {index for index, group in responses.groups().items() if differ(group, metric)}
    finished_by_rank, counted_by_rank = zip(*exchange.all_gather((finished, counted)), strict=True)
    return set().union(*finished_by_rank), set().union(*counted_by_rank)


def _value(grade: Grade, metric: str) -> float:
    if metric == SCORE:
        return sum(grade.totals)
    if metric not in grade.parts:
        raise RewardError(
            f"algorithm.filter_groups.metric {metric}: the reward function returned no such number for a response, but "
            f"{', '.join([SCORE, *grade.parts])}\nset one that it returns for each response"
        )
    return grade.parts[metric]

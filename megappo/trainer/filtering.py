"""Which groups of responses a step trains on: those that are finished first, or (dynamic sampling) those whose scores
differ, from as many prompts as that takes.

Source: Yu et al. 2025, DAPO, 3.2; the keys and rounds are verl's.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from megappo.config.algorithm_section import FilterGroups
from megappo.data.prompts import Prompt
from megappo.observe.metrics import merge_metrics
from megappo.rollouts.responses import PartlyWanted, Scored
from megappo.rollouts.sampler import Sample, Use
from megappo.trainer.models import Phase
from megappo.trainer.over_sampling import Wanted
from megappo.trainer.rollouts import Responses, Rollouts
from megappo.userland.forms import Graded
from megappo.userland.pool import RewardError

SCORE = "score"
"""The metric that is the sum of a response's scores; others are what reward functions tell beside these."""


@dataclass(frozen=True)
class Chosen:
    """What a step trains on.

    Attributes:
        responses: this rank's, whose indices count in `prompts`.
        num_dropped_tokens: that the policy wrote in vain, on all ranks.
        metrics: of the choice.
    """

    responses: Responses
    prompts: list[Prompt]
    num_dropped_tokens: int
    metrics: dict[str, int]


def choose_finished(rollouts: Rollouts, prompts: list[Prompt], num_groups: int) -> Chosen:
    """So many groups of which all responses are there, in the order of their prompts; once there are as many, the
    engines leave the rest. All ranks together."""
    responses = rollouts.respond(prompts, Wanted(num_groups))
    samples = responses.sampled
    finished = sorted(set().union(*rollouts.exchange.share({one.prompt_index for one in samples})))
    places = {index: place for place, index in enumerate(finished[:num_groups])}
    positions = [position for position, one in enumerate(samples) if one.prompt_index in places]
    kept = [replace(samples[at], prompt_index=places[samples[at].prompt_index]) for at in positions]
    num_dropped = _num_in_vain(rollouts, responses.use, kept)
    return Chosen(
        replace(responses, sampled=kept, scoring=PartlyWanted(responses.scoring, positions)),
        [prompts[index] for index in places],
        num_dropped,
        {
            "over_sampling/surplus_groups": len(finished) - len(places),
            **_over_sampling(len(prompts) - len(finished), num_dropped),
        },
    )


def choose_groups(
    rollouts: Rollouts,
    draw: Callable[[], list[Prompt]],
    settings: FilterGroups,
    num_groups: int,
    phase: Phase,
    *,
    over_samples: bool = False,
) -> Chosen:
    """So many groups whose scores differ, in the order of their prompts; where rounds do not give as many, the first
    others, too. All ranks together.

    Args:
        draw: the prompts of the next round.
        over_samples: a round ends once it has as many such groups as are still needed.
    Raises:
        RewardError: a reward function failed, or tells no such metric.
    """
    rounds: list[tuple[list[Prompt], Responses, list[Graded]]] = []
    differing: list[tuple[int, int]] = []
    equal: list[tuple[int, int]] = []
    while len(differing) < num_groups and len(rounds) < settings.max_num_gen_batches:
        with phase("rollout"):
            prompts = draw()
            wanted = Wanted(num_groups - len(differing), partial(_differ, settings.metric)) if over_samples else None
            responses = rollouts.respond(prompts, wanted)
        with phase("reward"):
            graded = responses.scoring.graded()
            found, finished = _found(rollouts, responses.sampled, graded, settings.metric)
        for index in sorted(finished):
            (differing if index in found else equal).append((len(rounds), index))
        rounds.append((prompts, responses, graded))
    kept = (differing + equal)[:num_groups]
    places = {group: place for place, group in enumerate(kept)}
    of_kept: list[tuple[Sample, Graded]] = []
    for number, (_, responses, graded) in enumerate(rounds):
        for sample, one in zip(responses.sampled, graded, strict=True):
            if (place := places.get((number, sample.prompt_index))) is not None:
                of_kept.append((replace(sample, prompt_index=place), one))
    counts = merge_metrics(responses.scoring.counts() for _, responses, _ in rounds)
    scored = Scored([one for _, one in of_kept], counts)
    use = sum((responses.use for _, responses, _ in rounds), Use())
    samples = [sample for sample, _ in of_kept]
    num_dropped = _num_in_vain(rollouts, use, samples)
    num_unfinished = sum(len(prompts) for prompts, _, _ in rounds) - len(differing) - len(equal)
    return Chosen(
        Responses(samples, [], scored, use=use),
        [rounds[number][0][index] for number, index in kept],
        num_dropped,
        {
            "filter_groups/num_gen_batches": len(rounds),
            "filter_groups/equal_groups": len(equal),
            "filter_groups/equal_groups_kept": max(0, num_groups - len(differing)),
            "filter_groups/surplus_groups": max(0, len(differing) - num_groups),
            **(_over_sampling(num_unfinished, num_dropped) if over_samples else {}),
        },
    )


def _over_sampling(num_unfinished: int, num_dropped_tokens: int) -> dict[str, int]:
    return {"over_sampling/unfinished_groups": num_unfinished, "over_sampling/dropped_tokens": num_dropped_tokens}


def _num_in_vain(rollouts: Rollouts, use: Use, kept: Sequence[Sample]) -> int:
    """Tokens that the engines wrote beside those of the samples that are kept, on all ranks."""
    return sum(rollouts.exchange.share(use.written_tokens - sum(one.num_policy_tokens for one in kept)))


def _found(
    rollouts: Rollouts, samples: Sequence[Sample], graded: Sequence[Graded], metric: str
) -> tuple[set[int], set[int]]:
    """The prompts of all ranks' samples to which these differ, and all of them."""
    mine = (_differing(samples, graded, metric), {one.prompt_index for one in samples})
    differing, finished = zip(*rollouts.exchange.share(mine), strict=True)
    return set().union(*differing), set().union(*finished)


def _differ(metric: str, graded: Sequence[Graded]) -> bool:
    """Whether a group's scores do; of one that failed nothing is known."""
    return len({_value(one, metric) for one in graded if not one.failed}) > 1


def _differing(samples: Sequence[Sample], graded: Sequence[Graded], metric: str) -> set[int]:
    """The prompts of this rank's samples to which these do."""
    groups = defaultdict(list)
    for sample, one in zip(samples, graded, strict=True):
        groups[sample.prompt_index].append(one)
    return {index for index, group in groups.items() if _differ(metric, group)}


def _value(graded: Graded, metric: str) -> float:
    if metric == SCORE:
        return sum(graded.totals)
    if metric not in graded.parts:
        told = ", ".join(chain([SCORE], graded.parts))
        raise RewardError(
            f"algorithm.filter_groups.metric {metric}: the reward function told no such number of a response, but "
            f"{told}\nname one that it tells of each"
        )
    return graded.parts[metric]

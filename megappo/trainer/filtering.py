"""Dynamic sampling: a step trains on groups of responses whose scores differ, from as many prompts as that takes.

Source: Yu et al. 2025, DAPO, 3.2; the keys and rounds are verl's.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from megappo.config.algorithm_section import FilterGroups
from megappo.data.prompts import Prompt
from megappo.observe.metrics import merge_metrics
from megappo.rewards.forms import Graded
from megappo.rewards.pool import RewardError
from megappo.rollout.sampler import Sample, Use
from megappo.trainer.models import Phase
from megappo.trainer.rollouts import Responses, Rollouts
from megappo.trainer.scoring import Scored

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


def choose_groups(
    rollouts: Rollouts,
    draw: Callable[[], list[Prompt]],
    settings: FilterGroups,
    num_groups: int,
    phase: Phase,
    when_sampled: Callable[[], None] = lambda: None,
) -> Chosen:
    """So many groups whose scores differ, in the order of their prompts; where rounds do not give as many, the first
    others, too. All ranks together.

    Args:
        draw: the prompts of the next round.
        when_sampled: called before the rewards of each round.
    Raises:
        RewardError: a reward function failed, or tells no such metric.
    """
    rounds: list[tuple[list[Prompt], Responses, list[Graded]]] = []
    differing: list[tuple[int, int]] = []
    equal: list[tuple[int, int]] = []
    while len(differing) < num_groups and len(rounds) < settings.max_num_gen_batches:
        with phase("rollout"):
            prompts = draw()
            responses = rollouts.respond(prompts)
        when_sampled()
        with phase("reward"):
            graded = responses.scoring.graded()
            found = set().union(*rollouts.exchange.share(_differing(responses.sampled, graded, settings.metric)))
        for index in range(len(prompts)):
            (differing if index in found else equal).append((len(rounds), index))
        rounds.append((prompts, responses, graded))
    kept = (differing + equal)[:num_groups]
    places = {group: place for place, group in enumerate(kept)}
    of_kept: list[tuple[Sample, Graded]] = []
    num_dropped = 0
    for number, (_, responses, graded) in enumerate(rounds):
        for sample, one in zip(responses.sampled, graded, strict=True):
            if (place := places.get((number, sample.prompt_index))) is None:
                num_dropped += sample.num_policy_tokens
            else:
                of_kept.append((replace(sample, prompt_index=place), one))
    counts = merge_metrics(responses.scoring.counts() for _, responses, _ in rounds)
    scored = Scored([one for _, one in of_kept], counts)
    use = sum((responses.use for _, responses, _ in rounds), Use())
    return Chosen(
        Responses([sample for sample, _ in of_kept], [], scored, use=use),
        [rounds[number][0][index] for number, index in kept],
        sum(rollouts.exchange.share(num_dropped)),
        {
            "filter_groups/num_gen_batches": len(rounds),
            "filter_groups/equal_groups": len(equal),
            "filter_groups/equal_groups_kept": max(0, num_groups - len(differing)),
            "filter_groups/surplus_groups": max(0, len(differing) - num_groups),
        },
    )


def _differing(samples: Sequence[Sample], graded: Sequence[Graded], metric: str) -> set[int]:
    """The prompts of this rank's samples to which these differ; of one that failed nothing is known."""
    values = defaultdict(set)
    for sample, one in zip(samples, graded, strict=True):
        if not one.failed:
            values[sample.prompt_index].add(_value(one, metric))
    return {index for index, of_group in values.items() if len(of_group) > 1}


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

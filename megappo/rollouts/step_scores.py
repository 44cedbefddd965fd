"""What training depends on of what reward functions tell beside the scores: weights of losses, and scores of steps."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from megappo.config.algorithm_checks import step_scores_errors
from megappo.config.errors import ConfigError
from megappo.config.schema import Config
from megappo.rollouts.sampler import Sample
from megappo.runtime.heartbeat import LIFE
from megappo.userland.forms import Graded

LONGEST_CHARACTER = 4
"""Tokens, of a byte each: of as many places behind each other one is between two characters."""


def kinds_told(graded: Sequence[Graded]) -> tuple[bool, bool]:
    """Whether there are weights among what was told of this rank's samples, and scores of steps."""
    return any(one.loss_weight is not None for one in graded), any(any(one.steps) for one in graded)


def told_fields(
    config: Config,
    samples: Sequence[Sample],
    graded: Sequence[Graded],
    tokenizer: PreTrainedTokenizerBase,
    kinds: Iterable[tuple[bool, bool]],
) -> dict[str, Any]:
    """The arguments of `with_scores` that come of it: those of which anything was told on any rank. Of a sample of
    which nothing was, the weight is 1, and no token has a reward.

    Args:
        kinds: `kinds_told` of all ranks.
    Raises:
        ConfigError: scores of steps do not go with the config.
    """
    has_weights, has_steps = map(any, zip(*kinds, strict=True))
    told: dict[str, Any] = {}
    if has_weights:
        weights = [1.0 if one.loss_weight is None else one.loss_weight for one in graded]
        told["loss_weights"] = torch.tensor(weights, dtype=torch.float32)
    if has_steps:
        if errors := step_scores_errors(config):
            raise ConfigError(*errors)
        pairs = zip(samples, graded, strict=True)
        told["step_rewards"] = [step_rewards(sample, one, tokenizer) for sample, one in pairs]
    return told


def step_rewards(sample: Sample, graded: Graded, tokenizer: PreTrainedTokenizerBase) -> list[float]:
    """Of each token of a sample the sum of the scores of the steps that end there.

    That is the token which completes a step's last character; where an environment wrote it, the policy's last before.

    Args:
        tokenizer: whose text the reward function has seen; no other thread may use it.
    """
    rewards = [0.0] * len(sample.tokens)
    steps = sorted(chain.from_iterable(graded.steps))
    if not steps:
        return rewards
    LIFE.sign()
    ends, scores = zip(*steps, strict=True)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    own = [i for i, log_prob in enumerate(sample.log_probs) if log_prob is not None]
    for place, score in zip(completing(sample.tokens, decode(sample.tokens), ends, decode), scores, strict=True):
        rewards[own[max(0, bisect_right(own, place) - 1)]] += score  # the first token is the policy's
    return rewards


def completing(
    tokens: Sequence[int], text: str, ends: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> list[int]:
    """The place of the token with which the first `end` characters of the text are there, for each end, ascending.

    Tokens are halved where the halves' texts, and what spaces are between them, are that of both together, as they
    mostly are, so that many ends cost little; where they are not (a cut through a character), prefixes are decoded.
    """
    if not ends:
        return []

    def found(end: int) -> int:
        return bisect_left(
            range(len(tokens) - 1), True, key=lambda last: decode(tokens[: last + 1])[:end] == text[:end]
        )

    first = max(1, min(len(tokens) // 2, len(tokens) - LONGEST_CHARACTER))
    for cut in range(first, min(first + LONGEST_CHARACTER, len(tokens))):
        left, right = decode(tokens[:cut]), decode(tokens[cut:])
        gap = text[len(left) : len(text) - len(right)]  # some tokenizers drop a space with which a text begins
        if left + gap + right == text and not gap.strip():
            start = len(left) + len(gap)
            here, there = bisect_right(ends, len(left)), bisect_right(ends, start)
            behind = completing(tokens[cut:], right, [end - start for end in ends[there:]], decode)
            before = completing(tokens[:cut], left, ends[:here], decode)
            return [*before, *map(found, ends[here:there]), *(cut + place for place in behind)]
    return [found(end) for end in ends]

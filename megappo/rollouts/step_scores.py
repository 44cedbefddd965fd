"""Loss weights and scores of steps, which reward functions may return beside scores, as fields of rows."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from megappo.config.checks import step_scores_errors
from megappo.config.config_error import ConfigError
from megappo.config.schema import Config
from megappo.rollouts.sampler import Sample
from megappo.runtime.heartbeat import heartbeat
from megappo.userland.grades import Graded

MAX_CHARACTER_TOKENS = 4
"""A character has at most so many tokens, of one byte each, so one of as many positions in a row is between two."""


def extra_kinds(graded: Sequence[Graded]) -> tuple[bool, bool]:
    """Return whether this rank's samples have loss weights, and whether they have scores of steps."""
    return any(one.loss_weight is not None for one in graded), any(any(one.steps) for one in graded)


def extra_fields(
    config: Config,
    samples: Sequence[Sample],
    graded: Sequence[Graded],
    tokenizer: PreTrainedTokenizerBase,
    kinds: Iterable[tuple[bool, bool]],
) -> dict[str, Any]:
    """Return the arguments of `with_scores` for the extras that any rank has. Samples without them get loss weight 1
    and rewards 0.

    Args:
        kinds: `extra_kinds` of all ranks.
    Raises:
        ConfigError: the config does not support scores of steps.
    """
    has_weights, has_steps = map(any, zip(*kinds, strict=True))
    fields: dict[str, Any] = {}
    if has_weights:
        weights = [1.0 if one.loss_weight is None else one.loss_weight for one in graded]
        fields["loss_weights"] = torch.tensor(weights, dtype=torch.float32)
    if has_steps:
        if errors := step_scores_errors(config):
            raise ConfigError(*errors)
        pairs = zip(samples, graded, strict=True)
        fields["step_rewards"] = [step_rewards(sample, one, tokenizer) for sample, one in pairs]
    return fields


def step_rewards(sample: Sample, graded: Graded, tokenizer: PreTrainedTokenizerBase) -> list[float]:
    """Return for each token of a sample the sum of the scores of the steps that end there.

    A step ends at the token that completes its last character; if an environment wrote that token, at the policy's last
    token before it.

    Args:
        tokenizer: with which the reward function's text was decoded; no other thread may use it.
    """
    rewards = [0.0] * len(sample.tokens)
    steps = sorted(chain.from_iterable(graded.steps))
    if not steps:
        return rewards
    heartbeat.beat()
    ends, scores = zip(*steps, strict=True)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    own = [i for i, log_prob in enumerate(sample.log_probs) if log_prob is not None]
    places = completing_tokens(sample.tokens, decode(sample.tokens), ends, decode)
    for place, score in zip(places, scores, strict=True):
        rewards[own[max(0, bisect_right(own, place) - 1)]] += score  # the first token is the policy's
    return rewards


def completing_tokens(
    tokens: Sequence[int], text: str, ends: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> list[int]:
    """Return for each of the ascending `ends` the position of the token that completes `text[:end]`.

    Decoding every prefix is quadratic. So tokens are halved where the texts of both halves, with spaces between them,
    make the text of the whole, as nearly always. Where they do not (a cut within a character), prefixes are decoded.
    """
    if not ends:
        return []

    def search(end: int) -> int:
        def is_complete(last: int) -> bool:
            return decode(tokens[: last + 1])[:end] == text[:end]

        return bisect_left(range(len(tokens) - 1), True, key=is_complete)

    first = max(1, min(len(tokens) // 2, len(tokens) - MAX_CHARACTER_TOKENS))
    for cut in range(first, min(first + MAX_CHARACTER_TOKENS, len(tokens))):
        left, right = decode(tokens[:cut]), decode(tokens[cut:])
        gap = text[len(left) : len(text) - len(right)]  # some tokenizers drop the space at the start of a text
        if left + gap + right == text and not gap.strip():
            start = len(left) + len(gap)
            num_left, num_before = bisect_right(ends, len(left)), bisect_right(ends, start)
            in_left = completing_tokens(tokens[:cut], left, ends[:num_left], decode)
            in_gap = [search(end) for end in ends[num_left:num_before]]
            in_right = completing_tokens(tokens[cut:], right, [end - start for end in ends[num_before:]], decode)
            return in_left + in_gap + [cut + place for place in in_right]
    return [search(end) for end in ends]

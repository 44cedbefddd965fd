"""Samples as rows, with all that the rollout knows of each."""

from collections import defaultdict
from collections.abc import Container, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from megappo.batch.rows import Rows
from megappo.config.errors import ConfigError
from megappo.data.prompts import Prompt
from megappo.rollout.sampler import Sample


def check_known(samples: Sequence[Sample], vocab_size: int) -> None:
    """Refuse tokens for which the critic has no embedding: the actor samples from the whole of its own vocabulary.

    Raises:
        ConfigError: naming the token.
    """
    highest = max((token for one in samples for token in one.tokens), default=0)
    if highest >= vocab_size:
        found = f"the actor wrote token {highest}, for which the critic has no embedding (vocab_size is {vocab_size} in"
        raise ConfigError(f"critic.model_path: {found} its config.json): choose a model with the actor's vocabulary")


def summed(scores: torch.Tensor) -> torch.Tensor:
    """[b] float32, the score of each response, from its scores, [b, K]."""
    return scores.sum(dim=1, dtype=torch.float64).float()


class _Part(NamedTuple):
    """A row to be: of sample number `of`, with a prompt, the tokens from `start` to `stop`; segment `number`."""

    of: int
    sample: Sample
    prompt: list[int]
    start: int
    stop: int
    number: int = 0


def masked(samples: Sequence[Sample], *, compared: bool) -> set[tuple[int, int]]:
    """The truncated samples, as (prompt_index, sample_index).

    Args:
        compared: the samples of a prompt are, so that of one the only one left goes, too.
    """
    left: dict[int, list[int]] = defaultdict(list)
    for one in samples:
        if one.finish_reason != "length":
            left[one.prompt_index].append(one.sample_index)
    kept = {(prompt, order) for prompt, orders in left.items() for order in orders if len(orders) > compared}
    return {(one.prompt_index, one.sample_index) for one in samples} - kept


def sample_rows(
    samples: Sequence[Sample],
    prompts: Sequence[Prompt],
    scores: torch.Tensor,
    *,
    step_rewards: Sequence[Sequence[float]] | None = None,
    loss_weights: torch.Tensor | None = None,
    episodes: bool = False,
    without: Container[tuple[int, int]] = (),
) -> Rows:
    """A row of each sample, or with an environment of each segment of its episode.

    Args:
        scores: [b, K], of samples.
        step_rewards: of each sample's tokens, where a reward function has told any.
        loss_weights: [b], likewise.
        episodes: there is an environment; on ranks without samples, too.
        without: of these, by prompt_index and sample_index, nothing is trained on.
    """
    parts = [part for of, one in enumerate(samples) for part in _parts(of, one, prompts[one.prompt_index].tokens)]
    index = torch.tensor([part.of for part in parts], dtype=torch.int64)
    is_kept = [[float((part.sample.prompt_index, part.sample.sample_index) not in without)] for part in parts]
    log_probs = [part.sample.log_probs[part.start : part.stop] for part in parts]
    fields = {
        "response_mask": _padded([[log_prob is not None for log_prob in row] for row in log_probs]) * _padded(is_kept),
        "rollout_log_probs": _padded([[log_prob or 0.0 for log_prob in row] for row in log_probs]),
        "scores": summed(scores)[index],
        "truncated": torch.tensor([float(part.sample.finish_reason == "length") for part in parts]),
    }
    if scores.shape[1] > 1:
        fields["score_components"] = scores[index]
    if loss_weights is not None:
        fields["loss_weights"] = loss_weights[index]
    if step_rewards is not None:
        fields["turn_rewards"] = _padded([step_rewards[part.of][part.start : part.stop] for part in parts])
    if episodes:
        segments = [part.sample.episode.segments[part.number] for part in parts]
        fields["episodes"] = torch.tensor([float(part.sample.sample_index) for part in parts])
        fields["segments"] = torch.tensor([float(part.number) for part in parts])
        fields["turns"] = _padded([segment.turns for segment in segments])
        rewards = _padded([segment.rewards for segment in segments])
        fields["turn_rewards"] = rewards + fields.get("turn_rewards", 0.0)
    most = max((part.number + 1 for part in parts), default=1)
    input_ids = [part.prompt + part.sample.tokens[part.start : part.stop] for part in parts]
    return Rows(
        ids=torch.tensor([part.sample.sample_index * most + part.number for part in parts], dtype=torch.int64),
        prompt_ids=torch.tensor([part.sample.prompt_index for part in parts], dtype=torch.int64),
        prompt_lengths=torch.tensor([len(part.prompt) for part in parts], dtype=torch.int64),
        response_lengths=torch.tensor([part.stop - part.start for part in parts], dtype=torch.int64),
        input_ids=list(_flat(input_ids, torch.int64).split([len(tokens) for tokens in input_ids])),
        fields=fields,
    )


def _parts(of: int, sample: Sample, prompt: list[int]) -> list[_Part]:
    if sample.episode is None:
        return [_Part(of, sample, prompt, 0, len(sample.tokens))]
    parts, start = [], 0
    for number, segment in enumerate(sample.episode.segments):
        parts.append(_Part(of, sample, segment.prompt, start, start + len(segment.tokens), number))
        start += len(segment.tokens)
    return parts


def _padded(values: Sequence[Sequence[float]]) -> torch.Tensor:
    """[b, longest] float32."""
    lengths = torch.tensor([len(of_row) for of_row in values], dtype=torch.int64)
    is_there = torch.arange(max(map(len, values), default=0)) < lengths[:, None]
    padded = torch.zeros(is_there.shape)
    padded[is_there] = _flat(values, torch.float32)
    return padded


def _flat(values: Sequence[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
    """All in one: a tensor of each row takes ten times as long."""
    return torch.tensor(list(chain.from_iterable(values)), dtype=dtype)

"""Samples as rows, with all that the rollout knows of each."""

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from megappo.batch.rows import Rows
from megappo.config.errors import ConfigError
from megappo.data.prompts import Prompt
from megappo.rollouts.sampler import Sample


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
    """A row to be: segment `number` of a sample."""

    sample: Sample
    prompt: list[int]
    tokens: list[int]
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
    *,
    episodes: bool = False,
    without: Container[tuple[int, int]] = (),
) -> Rows:
    """A row of each sample, or with an environment of each segment of its episode, without scores.

    Args:
        episodes: there is an environment; on ranks without samples, too.
        without: of these, by prompt_index and sample_index, nothing is trained on.
    """
    parts = [part for one in samples for part in _parts(one, prompts[one.prompt_index].tokens)]
    lengths = _integers(len(part.tokens) for part in parts)
    log_probs = list(chain.from_iterable(one.log_probs for one in samples))
    is_own = torch.from_numpy(np.fromiter((log_prob is not None for log_prob in log_probs), dtype=bool))
    if without:
        names = [(part.sample.prompt_index, part.sample.sample_index) for part in parts]
        is_own &= torch.tensor([name not in without for name in names]).repeat_interleave(lengths)
    fields = {
        "response_mask": _padded(is_own, lengths),
        "rollout_log_probs": _padded(_numbers(log_prob or 0.0 for log_prob in log_probs), lengths),
        "truncated": torch.tensor([float(part.sample.finish_reason == "length") for part in parts]),
    }
    if episodes:
        segments = [part.sample.episode.segments[part.number] for part in parts]
        fields["episodes"] = torch.tensor([float(part.sample.sample_index) for part in parts])
        fields["segments"] = torch.tensor([float(part.number) for part in parts])
        turns = chain.from_iterable(segment.turns for segment in segments)
        rewards = chain.from_iterable(segment.rewards for segment in segments)
        fields["turns"], fields["turn_rewards"] = (_padded(_numbers(of), lengths) for of in (turns, rewards))
    most = max((part.number + 1 for part in parts), default=1)
    tokens = (tokens for part in parts for tokens in (part.prompt, part.tokens))
    return Rows(
        ids=_integers(part.sample.sample_index * most + part.number for part in parts),
        prompt_ids=_integers(part.sample.prompt_index for part in parts),
        prompt_lengths=_integers(len(part.prompt) for part in parts),
        response_lengths=lengths,
        input_ids=_integers(chain.from_iterable(tokens)),
        fields=fields,
    )


def with_scores(
    rows: Rows,
    samples: Sequence[Sample],
    scores: torch.Tensor,
    *,
    step_rewards: Sequence[Sequence[float]] | None = None,
    loss_weights: torch.Tensor | None = None,
) -> Rows:
    """`sample_rows` with what the reward function has found of the samples.

    Args:
        scores: [b, K], of samples.
        step_rewards: of each sample's tokens, where a reward function has told any; beside those of an environment.
        loss_weights: [b], likewise.
    """
    counts = _integers(1 if one.episode is None else len(one.episode.segments) for one in samples)
    index = torch.arange(len(samples)).repeat_interleave(counts)
    fields = {"scores": summed(scores)[index]}
    if scores.shape[1] > 1:
        fields["score_components"] = scores[index]
    if loss_weights is not None:
        fields["loss_weights"] = loss_weights[index]
    if step_rewards is not None:
        of_steps = _padded(_numbers(chain.from_iterable(step_rewards)), rows.response_lengths)
        fields["turn_rewards"] = of_steps + rows.fields.get("turn_rewards", 0.0)
    return replace(rows, fields=rows.fields | fields)


def _parts(sample: Sample, prompt: list[int]) -> list[_Part]:
    if sample.episode is None:
        return [_Part(sample, prompt, sample.tokens)]
    segments = enumerate(sample.episode.segments)
    return [_Part(sample, segment.prompt, segment.tokens, number) for number, segment in segments]


def _padded(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """[b, longest] float32, of the rows' values one after the other."""
    longest = int(lengths.max()) if len(lengths) else 0
    padded = torch.zeros(len(lengths), longest)
    padded[torch.arange(longest) < lengths[:, None]] = values.float()
    return padded


def _numbers(values: Iterable[float]) -> torch.Tensor:
    return torch.from_numpy(np.fromiter(values, dtype=np.float32))  # torch.tensor takes four times as long


def _integers(values: Iterable[int]) -> torch.Tensor:
    return torch.from_numpy(np.fromiter(values, dtype=np.int64))

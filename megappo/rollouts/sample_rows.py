"""Rows of samples, with all fields that the rollout knows."""

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch

from megappo.batch.rows import Rows
from megappo.config.config_error import ConfigError
from megappo.data.prompts import Prompt
from megappo.rollouts.sampler import Sample
from megappo.rollouts.transcript import Segment


def check_tokens(samples: Sequence[Sample], vocab_size: int) -> None:
    """Refuse tokens for which the critic has no embedding: the actor samples from its whole vocabulary.

    Raises:
        ConfigError: names the token.
    """
    highest = max((token for one in samples for token in one.tokens), default=0)
    if highest >= vocab_size:
        raise ConfigError(
            f"critic.model_path: the actor wrote token {highest}, for which the critic has no embedding (vocab_size is "
            f"{vocab_size} in its config.json): choose a model with the actor's vocabulary"
        )


def total_scores(scores: torch.Tensor) -> torch.Tensor:
    """Return the score of each response, [b] float32, from its scores [b, K]."""
    return scores.sum(dim=1, dtype=torch.float64).float()


def masked_samples(samples: Sequence[Sample], *, compared: bool) -> set[tuple[int, int]]:
    """Return the truncated samples, as (prompt_index, sample_index).

    Args:
        compared: the samples of a prompt are compared, so a sample that remains alone is masked, too.
    """
    num_complete = Counter(one.prompt_index for one in samples if one.finish_reason != "length")
    return {
        (one.prompt_index, one.sample_index)
        for one in samples
        if one.finish_reason == "length" or num_complete[one.prompt_index] <= compared
    }


def sample_rows(
    samples: Sequence[Sample],
    prompts: Sequence[Prompt],
    *,
    episodes: bool = False,
    masked: Container[tuple[int, int]] = (),
) -> Rows:
    """Return a row for each sample, or for each segment of its episode, without scores.

    Args:
        episodes: the run has an environment; the same on ranks without samples.
        masked: (prompt_index, sample_index) of samples that are not trained on.
    """
    owners: list[Sample] = []
    numbers: list[int] = []
    segments: list[Segment] = []
    for one in samples:
        for number, segment in enumerate(_segments(one, prompts)):
            owners.append(one)
            numbers.append(number)
            segments.append(segment)
    lengths = _integers(len(segment.tokens) for segment in segments)
    log_probs = list(chain.from_iterable(one.log_probs for one in samples))
    is_own = torch.from_numpy(np.fromiter((log_prob is not None for log_prob in log_probs), dtype=bool))
    if masked:
        is_kept = [(one.prompt_index, one.sample_index) not in masked for one in owners]
        is_own &= torch.tensor(is_kept).repeat_interleave(lengths)
    fields = {
        "response_mask": _padded(is_own, lengths),
        "rollout_log_probs": _padded(_numbers(log_prob or 0.0 for log_prob in log_probs), lengths),
        "truncated": _numbers(one.finish_reason == "length" for one in owners),
    }
    if episodes:
        turns = chain.from_iterable(segment.turns for segment in segments)
        rewards = chain.from_iterable(segment.rewards for segment in segments)
        fields["episodes"] = _numbers(one.sample_index for one in owners)
        fields["segments"] = _numbers(numbers)
        fields["turns"] = _padded(_numbers(turns), lengths)
        fields["turn_rewards"] = _padded(_numbers(rewards), lengths)
    max_segments = max(numbers, default=0) + 1
    ids = [one.sample_index * max_segments + number for one, number in zip(owners, numbers, strict=True)]
    tokens = chain.from_iterable((segment.prompt, segment.tokens) for segment in segments)
    return Rows(
        ids=_integers(ids),
        prompt_ids=_integers(one.prompt_index for one in owners),
        prompt_lengths=_integers(len(segment.prompt) for segment in segments),
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
    """Add the reward function's results to `sample_rows`.

    Args:
        scores: [b, K], of samples.
        step_rewards: per token of each sample, where reward functions score steps; added to the environment's rewards.
        loss_weights: [b], of samples.
    """
    counts = _integers(1 if one.episode is None else len(one.episode.segments) for one in samples)
    index = torch.arange(len(samples)).repeat_interleave(counts)
    fields = {"scores": total_scores(scores)[index]}
    if scores.shape[1] > 1:
        fields["score_components"] = scores[index]
    if loss_weights is not None:
        fields["loss_weights"] = loss_weights[index]
    if step_rewards is not None:
        padded = _padded(_numbers(chain.from_iterable(step_rewards)), rows.response_lengths)
        fields["turn_rewards"] = padded + rows.fields.get("turn_rewards", 0.0)
    return replace(rows, fields=rows.fields | fields)


def _segments(sample: Sample, prompts: Sequence[Prompt]) -> Sequence[Segment]:
    if sample.episode is not None:
        return sample.episode.segments
    return [Segment(prompts[sample.prompt_index].tokens, "", sample.tokens)]


def _padded(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return [b, longest] float32 from the values of all rows in a row."""
    longest = int(lengths.max()) if len(lengths) else 0
    padded = torch.zeros(len(lengths), longest)
    padded[torch.arange(longest) < lengths[:, None]] = values.float()
    return padded


def _numbers(values: Iterable[float]) -> torch.Tensor:
    return torch.from_numpy(np.fromiter(values, dtype=np.float32))  # torch.tensor takes four times as long


def _integers(values: Iterable[int]) -> torch.Tensor:
    return torch.from_numpy(np.fromiter(values, dtype=np.int64))

"""Shaping of scores before they become rewards of tokens: scale, clip, normalise, add a length penalty. All [B]."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megappo.moments import merged_moments
from megappo.ppo.reductions import EPS, PromptGroups, Unreduced, check_finite, moments_over_ranks


def no_penalty(response_lengths: Tensor, max_response_length: int, config: Any) -> Tensor:
    """Return zeros, [B] float32."""
    return torch.zeros_like(response_lengths, dtype=torch.float32)


def linear_penalty(response_lengths: Tensor, max_response_length: int, config: Any) -> Tensor:
    """Return -length_penalty_factor x length / max_response_length, [B] float32."""
    return -config.length_penalty_factor * response_lengths.float() / max_response_length


def overlong_penalty(response_lengths: Tensor, max_response_length: int, config: Any) -> Tensor:
    """Soft overlong punishment: 0 up to max_response_length - overlong_buffer, then linear to -factor at the maximum.

    Args:
        response_lengths: [B] tokens.
        config: the reward section. overlong_buffer: tokens over which the penalty grows, at most max_response_length;
            length_penalty_factor: the largest penalty, also beyond the maximum (verl's keeps growing there).

    Returns:
        [B] float32, <= 0.
    Source: Yu et al. 2025 (DAPO), eq. 13, times factor.
    """
    excess = response_lengths.float() - (max_response_length - config.overlong_buffer)
    return -config.length_penalty_factor * (excess / config.overlong_buffer).clamp(0.0, 1.0)


class RunningMoments:
    """Mean and standard deviation (ddof 1) of all numbers so far, the same on every rank; see `merged_moments`."""

    def __init__(self) -> None:
        self.count = 0.0
        self.mean = 0.0
        self._squares = 0.0

    @property
    def std(self) -> float:
        """Standard deviation; 0 for fewer than two numbers."""
        return math.sqrt(self._squares / (self.count - 1.0)) if self.count > 1.0 else 0.0

    def update(self, scores: Tensor, process_group: ProcessGroup | None = None) -> None:
        """Add the scores, [B], of all ranks of `process_group`; each must call, with its own (possibly none).

        Except for rounding the result depends neither on how scores are spread over ranks nor over calls.
        """
        added = moments_over_ranks(scores.detach().double(), process_group)
        before = self.count, self.mean, self._squares
        self.count, self.mean, self._squares = merged_moments([before, added])

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self._squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.count = state["count"]
        self.mean = state["mean"]
        self._squares = state["squares"]


def normalize_scores(
    scores: Tensor,
    prompt_ids: Tensor,
    normalize: str,
    running: RunningMoments,
    *,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """Return (score - mean) / (std + 1e-6), std with ddof 1.

    Args:
        scores: [B] float32.
        prompt_ids: [B] int64; the same number = the same prompt. All responses to a prompt are on one rank.
        normalize: whose mean and std: batch = the scores of all ranks; running = also all earlier ones; group = the
            scores of the same prompt; none = scores unchanged.
        running: moments that normalize running updates with the scores before they are normalised; unchanged otherwise.
        process_group: ranks that batch and running take together; each must call.

    Returns:
        [B] float32. Scores that are all equal, or a single one, become 0.

    Raises:
        ValueError: with normalize group, a prompt with one response.
    """
    if normalize == "none":
        return scores
    if normalize == "group":
        return PromptGroups(prompt_ids).normalized(scores.double()).float()
    moments = {"running": running, "batch": RunningMoments()}[normalize]
    moments.update(scores, process_group)
    return ((scores.double() - moments.mean) / (moments.std + EPS)).float()


def shape_scores(
    scores: Tensor,
    response_lengths: Tensor,
    prompt_ids: Tensor,
    config: Any,
    running: RunningMoments,
    *,
    max_response_length: int,
    process_group: ProcessGroup | None = None,
) -> tuple[Tensor, Unreduced]:
    """Scale scores, clip them to +- clip, normalise them and add the length penalty, in this order.

    Args:
        scores: [B] float32, one per response.
        response_lengths: [B] tokens that the policy wrote.
        prompt_ids, running, process_group: as in normalize_scores.
        config: the reward section.
        max_response_length: rollout.max_response_length.

    Returns:
        (shaped, metrics): [B] float32; reward/length_penalty, the mean of what was added; reward/clipped_frac, the
        fraction of scores that were clipped; of these scores.

    Raises:
        ValueError: as normalize_scores.
        FloatingPointError: scores that are not finite.
    """
    check_finite("scores", scores)
    limit = math.inf if config.clip is None else config.clip
    # In float32, so that the mean of equal scores, summed in float64, is exact and they become exactly 0.
    scaled = scores.float() * config.scale
    clipped = scaled.clamp(-limit, limit)
    normalized = normalize_scores(clipped, prompt_ids, config.normalize, running, process_group=process_group)
    penalty = config.penalty.function(response_lengths, max_response_length, config)
    is_clipped = scaled.abs() > limit
    return normalized + penalty, {
        "reward/length_penalty": (penalty, "mean"),
        "reward/clipped_frac": (is_clipped, "mean"),
    }

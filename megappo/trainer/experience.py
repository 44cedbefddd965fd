"""Advantages and returns from scored rows with their log-probs and values: PPO's experience of a step."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from megappo.batch.row_metrics import log_prob_diff, of_tokens
from megappo.batch.rows import Rows
from megappo.batch.trajectories import Trajectories
from megappo.ppo.advantages import compute_token_level_rewards, estimate, explained_variance, whiten
from megappo.ppo.aggregation import Unreduced
from megappo.ppo.corrections import rollout_is_weights
from megappo.ppo.estimators import reinforce_plus_plus
from megappo.ppo.gae import gae_over_turns, length_adaptive_lam
from megappo.ppo.kl import kl_estimate
from megappo.ppo.reward_shaping import shape_scores
from megappo.trainer.objectives import conventions
from megappo.trainer.run import Run
from megappo.trainer.statistics import metrics_over_ranks


@dataclass(frozen=True)
class AdvantageResult:
    """A step's rows with their advantages, and statistics over the rows of all ranks.

    Attributes:
        rows: this rank's, with `shaped_scores`, `advantages` and, if the run has values, `returns`. With a KL penalty
            in the rewards they have `kl_penalty`, with advantages_clip `clipped_advantages`, with a rollout correction
            `rollout_is_weights`.
        log_prob_diff: mean of |old_log_probs - rollout_log_probs| over the tokens; 0 without a token.
        kl_penalty: mean of the KL to the reference over the tokens; None without a penalty in the rewards or a token.
    """

    rows: Rows
    log_prob_diff: float
    kl_penalty: float | None
    metrics: dict[str, Any]


def add_advantages(run: Run, rows: Rows) -> AdvantageResult:
    """Compute the advantages of scored rows; all ranks together.

    Args:
        rows: at their owners, where all responses to a prompt are together.
    """
    config, exchange = run.config, run.exchange
    correction, fields = config.algorithm.rollout_correction, dict(rows.fields)
    weights, correction_metrics = rollout_is_weights(
        fields["old_log_probs"], fields["rollout_log_probs"], rows.response_mask, correction, group=exchange.group
    )
    if correction.is_on:
        fields["rollout_is_weights"] = weights
    if config.algorithm.use_kl_in_reward:
        fields["kl_penalty"] = _kl_penalty(run, rows)
    trajectories = Trajectories(replace(rows, fields=fields))
    joined = trajectories.joined
    scores, shaping_metrics = shape_scores(
        joined.fields["scores"],
        joined.response_mask.sum(dim=1).long(),
        joined.prompt_ids,
        config.reward,
        run.progress.reward_moments,
        max_response_length=config.rollout.max_response_length,
        group=exchange.group,
    )
    advantages, returns = _advantages(run, joined, scores)
    added = {"shaped_scores": scores, **_whitened_and_clipped(run, advantages, joined.response_mask)}
    if config.has_values:
        added["returns"] = returns
    rows = trajectories.spread(**added)
    metrics, means = metrics_over_ranks(exchange, rows, correction_metrics | shaping_metrics, _statistics(run, rows))
    num_tokens = metrics["rollout/trained_tokens"] = means["num_tokens"]
    if config.algorithm.use_kl_in_reward:
        metrics["reward/kl_coef"] = run.progress.kl.value
    if config.has_values:
        explained = explained_variance(means["residual"], means["returns"]) if num_tokens > 1 else math.nan
        metrics["critic/vf_explained_var"] = explained
    if not num_tokens:
        return AdvantageResult(rows, 0.0, None, metrics)
    return AdvantageResult(rows, means["log_prob_diff"], means.get("kl_penalty"), metrics)


def _statistics(run: Run, rows: Rows) -> Unreduced:
    """Return statistics of the rows that are used here, and not logged."""
    found: Unreduced = {"log_prob_diff": (log_prob_diff(rows), "mean"), "num_tokens": (rows.response_mask, "sum")}
    if run.config.algorithm.use_kl_in_reward:
        found["kl_penalty"] = (of_tokens("kl_penalty")(rows), "mean")
    if run.config.has_values:
        values, returns = of_tokens("values")(rows).double(), of_tokens("returns")(rows).double()
        found["residual"] = (returns - values, "variance")
        found["returns"] = (returns, "variance")
    return found


def _kl_penalty(run: Run, rows: Rows) -> torch.Tensor:
    """Return the KL of each token to the reference, before its coefficient."""
    kind, fields = run.config.algorithm.kl_penalty, rows.fields
    if kind == "full":
        return fields["full_kl"]
    return kl_estimate(fields["old_log_probs"], fields["ref_log_probs"], kind, conventions=conventions(run.config))


def _advantages(run: Run, rows: Rows, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns. A KL penalty is a part of the rewards, or subtracted after the baseline: see
    `Conventions.kl_gamma`."""
    kl, gamma = rows.fields.get("kl_penalty"), conventions(run.config).kl_gamma
    if kl is None or gamma is None or not run.config.algorithm.method.compares_responses:
        return _estimate(run, rows, _token_level_rewards(run, rows, scores, kl))
    advantages, returns = _estimate(run, rows, _token_level_rewards(run, rows, scores, None))
    penalties, _ = reinforce_plus_plus(kl, rows.response_mask, gamma)
    return advantages - run.progress.kl.value * penalties, returns


def _token_level_rewards(run: Run, rows: Rows, scores: torch.Tensor, kl: torch.Tensor | None) -> torch.Tensor:
    """Return the shaped scores on each response's last token, minus the KL penalty of each token.

    Rewards of an environment and of steps are a part of the scores. They stay on their own tokens, scaled like the
    scores; the remaining score (of the reward function, the length penalty) is on the last token.
    """
    turn_rewards = rows.fields.get("turn_rewards")
    if turn_rewards is None:
        return compute_token_level_rewards(scores, rows.response_mask, kl, run.progress.kl.value)
    turn_rewards = turn_rewards * run.config.reward.scale
    last = scores - turn_rewards.sum(dim=1)
    return compute_token_level_rewards(last, rows.response_mask, kl, run.progress.kl.value) + turn_rewards


def _estimate(run: Run, rows: Rows, rewards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns. In decoupled and length-adaptive GAE they have different lambdas."""
    algorithm, mask = run.config.algorithm, rows.response_mask
    inputs: dict[str, Any] = {
        **rows.fields,
        **{key: getattr(algorithm, key) for key in algorithm.method.reads},
        "token_level_rewards": rewards,
        "response_mask": mask,
        "bootstrap_values": None,
        "groups": rows.prompt_ids,
        "group": run.exchange.group,
        "lam": algorithm.lam if algorithm.lam_alpha is None else length_adaptive_lam(mask, algorithm.lam_alpha),
    }
    if "bootstrap_values" in rows.fields:
        inputs["bootstrap_values"] = rows.fields["bootstrap_values"] * rows.fields["truncated"]
    estimator = gae_over_turns if algorithm.gae_level == "turn" else algorithm.method.function
    advantages, returns = estimate(estimator, **inputs)
    if algorithm.lam_alpha is not None or algorithm.critic_lam is not None:
        inputs["lam"] = algorithm.lam if algorithm.critic_lam is None else algorithm.critic_lam
        _, returns = estimate(estimator, **inputs)
    return advantages, returns


def _whitened_and_clipped(run: Run, advantages: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return `advantages`, whitened over the tokens of all ranks (whiten_advantages, or the estimator's default) and
    clipped; `clipped_advantages` is 1 where clipping changed them."""
    algorithm = run.config.algorithm
    whitens = algorithm.method.whitens if algorithm.whiten_advantages is None else algorithm.whiten_advantages
    if whitens:
        whitening = conventions(run.config).whitening_of(algorithm.adv_estimator)
        advantages = whiten(advantages, mask, group=run.exchange.group, whitening=whitening)
    limit = algorithm.advantages_clip
    if limit is None:
        return {"advantages": advantages}
    return {"advantages": advantages.clamp(-limit, limit), "clipped_advantages": (advantages.abs() > limit).float()}

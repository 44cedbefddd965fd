"""From rollouts that were scored and looked at to advantages: rewards per token, corrections, estimate, whitening."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from megappo.batch.metrics import log_prob_diff, of_tokens
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
    """A step's rows with their advantages, and what is known of all rows of all ranks.

    Attributes:
        rows: this rank's, with `shaped_scores` and `advantages`; `kl_penalty` where the rewards have one in them,
            `clipped_advantages` where they are clipped, `returns` where there are values, and `rollout_is_weights`
            where they are not all 1.
        log_prob_diff: the mean over the tokens of |old_log_probs - rollout_log_probs|; 0 without a token.
        kl_penalty: the mean over the tokens of the KL to the reference; None where the rewards have none in them, or
            there is no token.
    """

    rows: Rows
    log_prob_diff: float
    kl_penalty: float | None
    metrics: dict[str, Any]


def add_advantages(run: Run, rows: Rows) -> AdvantageResult:
    """From scored rows to advantages; all ranks together.

    Args:
        rows: at their owners, where all responses to a prompt are together.
    """
    penalty = {"kl_penalty": _kl_penalty(run, rows)} if run.config.algorithm.use_kl_in_reward else {}
    weights, correction_metrics = _correct(run, rows)
    trajectories = Trajectories(replace(rows, fields=rows.fields | penalty | weights))
    joined = trajectories.joined
    scores, shaping_metrics = _shaped_scores(run, joined)
    advantages, returns = _advantages(run, joined, scores)
    added = {"shaped_scores": scores} | _whitened(run, advantages, joined.response_mask)
    added |= {"returns": returns} if run.config.has_values else {}
    rows = trajectories.spread(**added)
    looked_at = {"log_prob_diff": (log_prob_diff(rows), "mean"), "num_tokens": (rows.response_mask, "sum")}
    if penalty:
        looked_at["kl_penalty"] = (of_tokens("kl_penalty")(rows), "mean")
    if run.config.has_values:
        expected, found_returns = (of_tokens(name)(rows).double() for name in ("values", "returns"))
        looked_at |= {"residual": (found_returns - expected, "variance"), "returns": (found_returns, "variance")}
    metrics, found = metrics_over_ranks(run.exchange, rows, correction_metrics | shaping_metrics, looked_at)
    if penalty:
        metrics["reward/kl_coef"] = run.progress.kl.value
    num_tokens = metrics["rollout/trained_tokens"] = found["num_tokens"]
    if run.config.has_values:
        explained = explained_variance(found["residual"], found["returns"]) if num_tokens > 1 else math.nan
        metrics["critic/vf_explained_var"] = explained
    if not num_tokens:
        return AdvantageResult(rows, 0.0, None, metrics)
    return AdvantageResult(rows, found["log_prob_diff"], found.get("kl_penalty"), metrics)


def _shaped_scores(run: Run, rows: Rows) -> tuple[torch.Tensor, Unreduced]:
    return shape_scores(
        rows.fields["scores"],
        rows.response_mask.sum(dim=1).long(),
        rows.prompt_ids,
        run.config.reward,
        run.progress.reward_moments,
        max_response_length=run.config.rollout.max_response_length,
        group=run.exchange.group,
    )


def _advantages(run: Run, rows: Rows, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, with the KL penalty, where there is one, in the rewards or subtracted behind a baseline:
    see `Conventions.kl_gamma`."""
    kl, gamma = rows.fields.get("kl_penalty"), conventions(run.config).kl_gamma
    if kl is None or gamma is None or not run.config.algorithm.method.compares_responses:
        return _estimate(run, rows, _token_level_rewards(run, rows, scores, kl))
    advantages, returns = _estimate(run, rows, _token_level_rewards(run, rows, scores, None))
    penalties, _ = reinforce_plus_plus(kl, rows.response_mask, gamma)
    return advantages - run.progress.kl.value * penalties, returns


def _token_level_rewards(run: Run, rows: Rows, scores: torch.Tensor, kl: torch.Tensor | None) -> torch.Tensor:
    """Shaped scores on each response's last token, minus the KL penalty of each token where there is one. Rewards of an
    environment and of steps, which are part of the scores, where they were given, scaled as these are; so what else the
    scores have, the reward function's outcome and a length penalty, is on the last token."""
    turn_rewards = rows.fields.get("turn_rewards")
    if turn_rewards is not None:
        turn_rewards = turn_rewards * run.config.reward.scale
    last = scores if turn_rewards is None else scores - turn_rewards.sum(dim=1)
    rewards = compute_token_level_rewards(last, rows.response_mask, kl, run.progress.kl.value)
    return rewards if turn_rewards is None else rewards + turn_rewards


def _kl_penalty(run: Run, rows: Rows) -> torch.Tensor:
    """Of each token, before its coefficient."""
    kind, fields = run.config.algorithm.kl_penalty, rows.fields
    if kind == "full":
        return fields["full_kl"]
    return kl_estimate(fields["old_log_probs"], fields["ref_log_probs"], kind, conventions=conventions(run.config))


def _estimate(run: Run, rows: Rows, rewards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns; of a decoupled or length-adaptive GAE each with its own lambda."""
    algorithm, fields, mask = run.config.algorithm, rows.fields, rows.response_mask
    inputs = {
        **fields,
        "token_level_rewards": rewards,
        "response_mask": mask,
        "bootstrap_values": fields["bootstrap_values"] * fields["truncated"] if "bootstrap_values" in fields else None,
        "groups": rows.prompt_ids,
        "group": run.exchange.group,
        **{key: getattr(algorithm, key) for key in algorithm.method.reads},
    }
    estimator = gae_over_turns if algorithm.gae_level == "turn" else algorithm.method.function
    lam = algorithm.lam if algorithm.lam_alpha is None else length_adaptive_lam(mask, algorithm.lam_alpha)
    critic_lam = algorithm.lam if algorithm.critic_lam is None else algorithm.critic_lam
    advantages, returns = estimate(estimator, **(inputs | {"lam": lam}))
    if algorithm.lam_alpha is not None or algorithm.critic_lam is not None:
        _, returns = estimate(estimator, **(inputs | {"lam": critic_lam}))
    return advantages, returns


def _whitened(run: Run, advantages: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """`advantages`, whitened over the tokens of all ranks where the config says so, or, left open, the estimator's
    method; and clipped where it says so, with `clipped_advantages`, 1 where that made a difference."""
    algorithm = run.config.algorithm
    chosen = algorithm.whiten_advantages
    if algorithm.method.whitens if chosen is None else chosen:
        whitening = conventions(run.config).whitening_of(algorithm.adv_estimator)
        advantages = whiten(advantages, mask, group=run.exchange.group, whitening=whitening)
    limit = algorithm.advantages_clip
    if limit is None:
        return {"advantages": advantages}
    return {"advantages": advantages.clamp(-limit, limit), "clipped_advantages": (advantages.abs() > limit).float()}


def _correct(run: Run, rows: Rows) -> tuple[dict[str, torch.Tensor], Unreduced]:
    """The importance weights against the mismatch between engine and trainer, where there are any."""
    correction, fields = run.config.algorithm.rollout_correction, rows.fields
    weights, metrics = rollout_is_weights(
        fields["old_log_probs"], fields["rollout_log_probs"], rows.response_mask, correction, group=run.exchange.group
    )
    return ({"rollout_is_weights": weights} if correction.is_on else {}), metrics

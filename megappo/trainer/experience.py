"""PPO's experience of a step: advantages and returns of its scored rows, from their log-probs and values."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from megappo.batch.exchange import Batch
from megappo.batch.row_metrics import log_prob_diff, of_tokens
from megappo.batch.rows import Rows
from megappo.batch.trajectories import Trajectories
from megappo.ppo.advantages import (
    compute_token_level_rewards,
    estimate,
    gae_over_turns,
    length_adaptive_lam,
    whiten,
)
from megappo.ppo.corrections import rollout_is_weights
from megappo.ppo.estimators import reinforce_plus_plus
from megappo.ppo.kl import kl_estimate
from megappo.ppo.reductions import Unreduced
from megappo.ppo.reward_shaping import RunningMoments, shape_scores
from megappo.trainer.objectives import conventions
from megappo.trainer.progress import Experience
from megappo.trainer.statistics import over_ranks, row_metrics, spread
from megappo.trainer.value_metrics import value_metrics

if TYPE_CHECKING:  # a run evaluates a critic by the returns of this module
    from megappo.trainer.run import Run


def add_advantages(run: "Run", step: int, batch: Batch, metrics: dict[str, Any]) -> Experience:
    """Compute the advantages of scored rows; all ranks together.

    The rows get `shaped_scores`, `advantages` and, if the run has values, `returns`; with a KL penalty in the rewards
    `kl_penalty`, with advantages_clip `clipped_advantages`, with a rollout correction `rollout_is_weights`. The metrics
    compare the engines' log-probs with the actor's, where these are known.

    Args:
        batch: all responses to a prompt are at one owner.
        metrics: the step's metrics so far.
    """
    rows, compared = batch.rows, Unreduced()
    if "old_log_probs" in rows.fields:
        weights, compared = _compared(run, rows)
        if run.config.algorithm.rollout_correction.is_on:
            rows = replace(rows, fields=rows.fields | {"rollout_is_weights": weights})
    rows, shaping_metrics = with_advantages(run, rows, run.progress.reward_moments)
    of_values = {f"critic/{name}": part for name, part in value_metrics(rows).items()}
    more = row_metrics(run.exchange, rows, step, compared | shaping_metrics | of_values)
    return _experience(run, step, replace(batch, rows=rows), metrics | more)


def compare_engines(run: "Run", experience: Experience) -> None:
    """Add the metrics that compare the engines' log-probs with the actor's, where the update computes these; all ranks
    together."""
    _, values = _compared(run, experience.batch.rows)
    experience.metrics |= over_ranks(run.exchange, values)


def _compared(run: "Run", rows: Rows) -> tuple[torch.Tensor, Unreduced]:
    """Return the importance weights of the trainer against the engines, and the metrics that compare their log-probs;
    all ranks together."""
    old, sampled = rows.fields["old_log_probs"], rows.fields["rollout_log_probs"]
    correction = run.config.algorithm.rollout_correction
    weights, values = rollout_is_weights(old, sampled, rows.response_mask, correction, group=run.exchange.group)
    differences = log_prob_diff(rows)
    if differences is not None:
        values |= spread("rollout/log_prob_diff", differences)
    return weights, values


def with_advantages(run: "Run", rows: Rows, reward_moments: RunningMoments) -> tuple[Rows, Unreduced]:
    """Return the rows with the fields that `add_advantages` names, without corrections, and metrics of the shaping of
    their scores; all ranks together.

    Args:
        reward_moments: moments of all earlier scores; these scores are added.
    """
    config = run.config
    if config.penalizes_kl:
        rows = replace(rows, fields=rows.fields | {"kl_penalty": _kl_penalty(run, rows)})
    trajectories = Trajectories(rows)
    joined = trajectories.joined
    scores, shaping_metrics = shape_scores(
        joined.fields["scores"],
        joined.response_mask.sum(dim=1).long(),
        joined.prompt_ids,
        config.reward,
        reward_moments,
        max_response_length=config.rollout.max_response_length,
        process_group=run.exchange.group,
    )
    advantages, returns = _advantages(run, joined, scores)
    added = {"shaped_scores": scores, **_whitened_and_clipped(run, advantages, joined.response_mask)}
    if config.has_values:
        added["returns"] = returns
    return trajectories.spread(**added), shaping_metrics


def _experience(run: "Run", step: int, batch: Batch, metrics: dict[str, Any]) -> Experience:
    """Return a step's experience, with the statistics of its rows that the run itself reads."""
    config = run.config
    rows = batch.rows
    values: Unreduced = {"num_tokens": (rows.response_mask, "sum")}
    if config.penalizes_kl:
        values["kl_penalty"] = (of_tokens("kl_penalty")(rows), "mean")
        metrics["reward/kl_coef"] = run.progress.kl.value
    reduced = over_ranks(run.exchange, values)
    num_tokens = metrics["rollout/trained_tokens"] = reduced["num_tokens"]
    return Experience(step, batch, metrics, reduced.get("kl_penalty") if num_tokens else None)


def _kl_penalty(run: "Run", rows: Rows) -> torch.Tensor:
    """Return the KL of each token to the reference, before its coefficient."""
    kind = run.config.algorithm.kl_penalty
    fields = rows.fields
    if kind == "full":
        return fields["full_kl"]
    return kl_estimate(rows.old_log_probs, fields["ref_log_probs"], kind, conventions=conventions(run.config))


def _advantages(run: "Run", rows: Rows, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns of the rows' rewards: the shaped scores on each response's last token, minus the KL
    penalty of each token.

    Rewards of an environment and of steps are a part of the scores. They stay on their own tokens, scaled like the
    scores; the remaining score (of the reward function, the length penalty) is on the last token. The KL penalty is a
    part of the rewards, or subtracted after the baseline: see `Conventions.token_kl_gamma`.
    """
    kl = rows.fields.get("kl_penalty")
    kl_coef = run.progress.kl.value
    gamma = conventions(run.config).token_kl_gamma
    compares = run.config.algorithm.method.compares_responses
    after_baseline = kl is not None and gamma is not None and compares
    turn_rewards = rows.fields.get("turn_rewards")
    if turn_rewards is not None:
        turn_rewards = turn_rewards * run.config.reward.scale
        scores = scores - turn_rewards.sum(dim=1)
    rewards = compute_token_level_rewards(scores, rows.response_mask, None if after_baseline else kl, kl_coef)
    if turn_rewards is not None:
        rewards = rewards + turn_rewards
    advantages, returns = _estimate(run, rows, rewards)
    if after_baseline:
        penalties, _ = reinforce_plus_plus(kl, rows.response_mask, gamma)
        advantages = advantages - kl_coef * penalties
    return advantages, returns


def _estimate(run: "Run", rows: Rows, rewards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns. In decoupled and length-adaptive GAE they have different lambdas."""
    algorithm = run.config.algorithm
    mask = rows.response_mask
    inputs = {  # `estimate` passes on what the estimator has as parameters
        **rows.fields,  # the critic's `values` for gae
        "old_log_probs": None if run.config.old_log_probs == "update" else rows.old_log_probs,
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


def _whitened_and_clipped(run: "Run", advantages: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
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

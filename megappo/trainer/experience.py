"""From rollouts that were scored and looked at to advantages: rewards per token, corrections, estimate, whitening."""

from dataclasses import dataclass, replace

import torch

from megappo.batch.rows import Rows
from megappo.ppo.advantages import (
    compute_token_level_rewards,
    estimate,
    explained_variance,
    length_adaptive_lam,
    whiten,
)
from megappo.ppo.corrections import rollout_is_weights
from megappo.ppo.kl import kl_estimate
from megappo.ppo.reward_shaping import shape_scores
from megappo.trainer.objectives import conventions
from megappo.trainer.run import Run
from megappo.trainer.statistics import as_metrics, field_statistics, value_statistics

Metrics = dict[str, float]


@dataclass(frozen=True)
class Judged:
    """A step's rows with their advantages, and what is known of all rows of all ranks.

    Attributes:
        rows: this rank's, with `advantages`, `returns` where there are values, and `rollout_is_weights` where they are
            not all 1.
        log_prob_diff: the mean over the tokens of |old_log_probs - rollout_log_probs|.
        kl_penalty: the mean over the tokens of the KL to the reference; None where the rewards have none in them.
    """

    rows: Rows
    log_prob_diff: float
    kl_penalty: float | None
    metrics: Metrics


def add_advantages(run: Run, rows: Rows) -> Judged:
    """From scored rows to advantages; all ranks together.

    Args:
        rows: at their owners, where all responses to a prompt are together.
    """
    penalty = _kl_penalty(run, rows) if run.config.algorithm.use_kl_in_reward else None
    rewards, metrics = _token_level_rewards(run, rows, penalty)
    advantages, returns = _estimate(run, rows, rewards)
    whitened = _whitened(run, advantages, rows.response_mask)
    limit = run.config.algorithm.advantages_clip
    added = {"advantages": whitened if limit is None else whitened.clamp(-limit, limit)}
    added |= {"returns": returns} if run.config.has_values else {}
    weights, correction_metrics = _correct(run, rows)
    rows = replace(rows, fields=rows.fields | added | weights)
    names = [name for name in ("advantages", "returns", "values") if name in rows.fields]
    difference = (rows.fields["old_log_probs"] - rows.fields["rollout_log_probs"]).abs()
    shown = {name: rows.fields[name] for name in names} | {"rollout/log_prob_diff": difference}
    if limit is not None:
        shown["advantages/clipped"] = (whitened.abs() > limit).float()
    if penalty is not None:
        shown["reward/kl_penalty"] = penalty
    found = field_statistics(run.exchange, rows, shown)
    metrics |= as_metrics(found) | correction_metrics
    if run.config.has_values:
        metrics["critic/vf_explained_var"] = explained_variance(
            rows.fields["values"], returns, rows.response_mask, group=run.exchange.group
        )
    kl_penalty = None if penalty is None else found["reward/kl_penalty"].mean
    return Judged(rows, found["rollout/log_prob_diff"].mean, kl_penalty, metrics)


def _token_level_rewards(run: Run, rows: Rows, penalty: torch.Tensor | None) -> tuple[torch.Tensor, Metrics]:
    """Shaped scores on each response's last token, minus the KL penalty of each token where there is one."""
    scores, metrics = shape_scores(
        rows.fields["scores"],
        rows.response_lengths,
        _prompts(run, rows),
        run.config.reward,
        run.reward_moments,
        max_response_length=run.config.rollout.max_response_length,
        group=run.exchange.group,
    )
    shown = {"reward/shaped": scores}
    if "baselines" in rows.fields:
        shown["reward/baseline"] = rows.fields["baselines"]
    metrics |= as_metrics(value_statistics(run.exchange, shown))
    if penalty is None:
        return compute_token_level_rewards(scores, rows.response_mask), metrics
    metrics["reward/kl_coef"] = run.kl.value
    return compute_token_level_rewards(scores, rows.response_mask, penalty, run.kl.value), metrics


def _kl_penalty(run: Run, rows: Rows) -> torch.Tensor:
    kind, fields = run.config.algorithm.kl_penalty, rows.fields
    if kind == "full":
        return fields["full_kl"]
    return kl_estimate(fields["old_log_probs"], fields["ref_log_probs"], kind, conventions=conventions(run.config))


def _prompts(run: Run, rows: Rows) -> torch.Tensor:
    """[b] int64: the number of each row's prompt."""
    return rows.ids // run.config.rollout.n


def _estimate(run: Run, rows: Rows, rewards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns; of a decoupled or length-adaptive GAE each with its own lambda."""
    algorithm, fields, mask = run.config.algorithm, rows.fields, rows.response_mask
    inputs = {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "values": fields.get("values"),
        "bootstrap_values": fields["bootstrap_values"] * fields["truncated"] if "bootstrap_values" in fields else None,
        "baselines": fields.get("baselines"),
        "groups": _prompts(run, rows),
        "group": run.exchange.group,
        **{key: getattr(algorithm, key) for key in algorithm.method.reads},
    }
    estimator = algorithm.method.function
    lam = algorithm.lam if algorithm.lam_alpha is None else length_adaptive_lam(mask, algorithm.lam_alpha)
    critic_lam = algorithm.lam if algorithm.critic_lam is None else algorithm.critic_lam
    advantages, returns = estimate(estimator, **(inputs | {"lam": lam}))
    if algorithm.lam_alpha is not None or algorithm.critic_lam is not None:
        _, returns = estimate(estimator, **(inputs | {"lam": critic_lam}))
    return advantages, returns


def _whitened(run: Run, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Whitened over the tokens of all ranks where the config says so, or, left open, the estimator's method."""
    algorithm = run.config.algorithm
    chosen = algorithm.whiten_advantages
    if algorithm.method.whitens if chosen is None else chosen:
        whitening = conventions(run.config).whitening_of(algorithm.adv_estimator)
        return whiten(advantages, mask, group=run.exchange.group, whitening=whitening)
    return advantages


def _correct(run: Run, rows: Rows) -> tuple[dict[str, torch.Tensor], Metrics]:
    """The importance weights against the mismatch between engine and trainer, where there are any."""
    correction, fields = run.config.algorithm.rollout_correction, rows.fields
    weights, metrics = rollout_is_weights(
        fields["old_log_probs"], fields["rollout_log_probs"], rows.response_mask, correction, group=run.exchange.group
    )
    return ({"rollout_is_weights": weights} if correction.is_on else {}), metrics

"""PPO's experience of a step: advantages and returns of its scored rows, from their log-probs and values."""

from dataclasses import replace

import torch

from megappo.batch.exchange import Batch, Exchange
from megappo.batch.row_metrics import log_prob_diff, of_tokens
from megappo.batch.rows import Rows
from megappo.batch.trajectories import Trajectories
from megappo.config.schema import Config
from megappo.observe.metrics import Reduced
from megappo.ppo.advantages import (
    compute_token_level_rewards,
    estimate,
    gae_over_turns,
    length_adaptive_lam,
    lowest_share,
    whiten,
)
from megappo.ppo.corrections import rollout_is_weights
from megappo.ppo.estimators import reinforce_plus_plus
from megappo.ppo.kl import kl_estimate
from megappo.ppo.reductions import Unreduced
from megappo.ppo.reward_shaping import RunningMoments, shape_scores
from megappo.trainer.objectives import conventions
from megappo.trainer.progress import Experience, Progress
from megappo.trainer.statistics import logs_histograms, over_ranks, row_metrics, spread
from megappo.trainer.value_metrics import calibration, value_metrics


def add_advantages(
    config: Config, exchange: Exchange, progress: Progress, step: int, batch: Batch, metrics: Reduced
) -> Experience:
    """Compute the advantages of scored rows; all ranks together.

    The rows get `shaped_scores`, `advantages` and, if the run has values, `returns`; with a KL penalty in the rewards
    `kl_penalty`, with teachers before the update `distillation_kl`, with advantages_clip `clipped_advantages`, with a
    rollout correction `rollout_is_weights`. The metrics compare the engines' log-probs with the actor's, where these
    are known.

    Args:
        progress: has the KL coefficient, and the moments of all scores before, to which these are added.
        batch: all responses to a prompt are at one owner.
        metrics: the step's metrics so far.
    """
    rows, kl_coef, compared = batch.rows, progress.kl.value, Unreduced()
    if "old_log_probs" in rows.fields:
        weights, compared = _compared(config, exchange, rows)
        if config.algorithm.rollout_correction.is_on:
            rows = replace(rows, fields=rows.fields | {"rollout_is_weights": weights})
    rows, shaping_metrics = with_advantages(config, exchange, kl_coef, rows, progress.reward_moments)
    values_compared = value_metrics(rows) | (calibration(exchange, rows) if logs_histograms(step) else {})
    of_values = {f"critic/{name}": part for name, part in values_compared.items()}
    taught = _by_teacher(config, rows)
    metrics = metrics | row_metrics(exchange, rows, step, compared | shaping_metrics | of_values | taught)
    # Statistics of the rows that the run itself reads.
    values: Unreduced = {"num_tokens": (rows.response_mask, "sum")}
    if config.penalizes_kl:
        values["kl_penalty"] = (of_tokens("kl_penalty")(rows), "mean")
        metrics["reward/kl_coef"] = kl_coef
    reduced = over_ranks(exchange, values)
    num_tokens = metrics["rollout/trained_tokens"] = reduced["num_tokens"]
    kl_penalty = reduced.get("kl_penalty") if num_tokens else None
    return Experience(step, replace(batch, rows=rows), metrics, kl_penalty)


def compare_engines(config: Config, exchange: Exchange, experience: Experience) -> None:
    """Add the metrics that compare the engines' log-probs with the actor's, where the update computes these; all ranks
    together."""
    _, values = _compared(config, exchange, experience.batch.rows)
    experience.metrics |= over_ranks(exchange, values)


def _compared(config: Config, exchange: Exchange, rows: Rows) -> tuple[torch.Tensor, Unreduced]:
    """Return the importance weights of the trainer against the engines, and the metrics that compare their log-probs;
    all ranks together."""
    old, sampled = rows.fields["old_log_probs"], rows.fields["rollout_log_probs"]
    correction = config.algorithm.rollout_correction
    weights, values = rollout_is_weights(old, sampled, rows.response_mask, correction, group=exchange.group)
    differences = log_prob_diff(rows)
    if differences is not None:
        values |= spread("rollout/log_prob_diff", differences)
    return weights, values


def with_advantages(
    config: Config, exchange: Exchange, kl_coef: float, rows: Rows, reward_moments: RunningMoments
) -> tuple[Rows, Unreduced]:
    """Return the rows with the fields that `add_advantages` names, without corrections, and metrics of the shaping of
    their scores; all ranks together.

    Args:
        reward_moments: moments of all earlier scores; these scores are added.
    """
    rows = replace(rows, fields=rows.fields | _kl_fields(config, rows) | _ensemble_fields(config, exchange, rows))
    trajectories = Trajectories(rows)
    joined = trajectories.joined
    scores, shaping_metrics = shape_scores(
        joined.fields["scores"],
        joined.response_mask.sum(dim=1).long(),
        joined.prompt_ids,
        config.reward,
        reward_moments,
        max_response_length=config.rollout.max_response_length,
        process_group=exchange.group,
    )
    if config.teachers and not config.distillation.task_reward:
        joined, scores = _without_task_reward(joined, scores)
    advantages, returns = _advantages(config, exchange, kl_coef, joined, scores)
    final = _whitened_and_clipped(config, exchange, advantages, joined)
    added = {"shaped_scores": scores, **final}
    if config.has_values:
        added["returns"] = returns
    return trajectories.spread(**added), shaping_metrics


def _kl_fields(config: Config, rows: Rows) -> dict[str, torch.Tensor]:
    """Return `kl_penalty`, the KL of each token to the reference, and `distillation_kl`, the KL to its row's teacher,
    before their coefficients, as far as the run has them before the update."""

    def kl_to(others: str, kind: str) -> torch.Tensor:
        if kind == "full":
            return rows.fields["full_kl"]
        return kl_estimate(rows.old_log_probs, rows.fields[others], kind, conventions=conventions(config))

    found = {}
    if config.penalizes_kl:
        found["kl_penalty"] = kl_to("ref_log_probs", config.algorithm.kl_penalty)
    if config.distilled_at in ("reward", "advantage"):
        kl = kl_to("teacher_log_probs", config.distillation.kl_kind)
        found["distillation_kl"] = torch.where(rows.fields["teacher"][:, None] > 0, kl, 0.0)
    return found


def _ensemble_fields(config: Config, exchange: Exchange, rows: Rows) -> dict[str, torch.Tensor]:
    """Return the means of the critics' values, the standard deviation between them, and where they agree or disagree
    most (mask_agreed, mask_disputed), if there are several; all ranks together.

    Source: Liu et al. 2025 (AsyPPO, arXiv 2510.01656).
    """
    algorithm = config.algorithm
    if config.critic.ensemble == 1:
        return {}
    values = _of_critics(config, rows, "values")
    stds = values.std(dim=0, correction=0)
    found = {"values": values.mean(dim=0), "value_std": stds}
    if algorithm.bootstrap_truncated:
        found["bootstrap_values"] = _of_critics(config, rows, "bootstrap_values").mean(dim=0)
    for name, share, by in (("agreed", algorithm.mask_agreed, stds), ("disputed", algorithm.mask_disputed, -stds)):
        if share:
            found[name] = lowest_share(by, rows.response_mask, share, group=exchange.group).float()
    return found


def _of_critics(config: Config, rows: Rows, name: str) -> torch.Tensor:
    """Return a field of each critic, one after the other."""
    return torch.stack([rows.fields[f"{name}_{number}"] for number in range(1, config.critic.ensemble + 1)])


def _by_teacher(config: Config, rows: Rows) -> Unreduced:
    """Return the mean KL to each teacher, over the tokens of its rows, if there are several."""
    kl = rows.fields.get("distillation_kl")
    if kl is None or len(config.teachers) == 1:
        return {}
    metrics: Unreduced = {}
    teachers = rows.response_mask * rows.fields["teacher"][:, None]
    for number, name in enumerate(config.teachers, 1):
        metrics[f"distillation/kl/teacher/{name}"] = kl[teachers == number], "mean"
    return metrics


def _without_task_reward(rows: Rows, scores: torch.Tensor) -> tuple[Rows, torch.Tensor]:
    """Return rows and shaped scores in which a row with a teacher has score 0."""
    has_none = rows.fields["teacher"] > 0
    fields = dict(rows.fields)
    if "turn_rewards" in fields:
        fields["turn_rewards"] = fields["turn_rewards"].masked_fill(has_none[:, None], 0.0)
    return replace(rows, fields=fields), scores.masked_fill(has_none, 0.0)


def _advantages(
    config: Config, exchange: Exchange, kl_coef: float, rows: Rows, scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns of the rows' rewards: the shaped scores on each response's last token, minus the
    penalty of each token: its KL to the reference, and to its row's teacher if distillation.signal is reward.

    Rewards of an environment and of steps are a part of the scores. They stay on their own tokens, scaled like the
    scores; the remaining score (of the reward function, the length penalty) is on the last token. The penalty is a
    part of the rewards, or subtracted after the baseline: see `Conventions.token_kl_gamma`. With turns as actions, the
    advantage of each token has its own KL alone, and returns have none, as in AReaL.
    """
    penalties = _penalties(config, kl_coef, rows)
    by_turn = config.algorithm.gae_level == "turn"
    gamma = 0.0 if by_turn else conventions(config).token_kl_gamma
    compares = config.algorithm.method.compares_responses
    after_baseline = penalties and gamma is not None and (compares or by_turn)
    turn_rewards = rows.fields.get("turn_rewards")
    if turn_rewards is not None:
        turn_rewards = turn_rewards * config.reward.scale
        scores = scores - turn_rewards.sum(dim=1)
    penalty = None if after_baseline or not penalties else sum(coef * kl for coef, kl in penalties)
    rewards = compute_token_level_rewards(scores, rows.response_mask, penalty, 1.0)
    if turn_rewards is not None:
        rewards = rewards + turn_rewards
    advantages, returns = _estimate(config, exchange, rows, rewards)
    if after_baseline:
        for coef, kl in penalties:
            later, _ = reinforce_plus_plus(kl, rows.response_mask, gamma)
            advantages = advantages - coef * later
    return advantages, returns


def _penalties(config: Config, kl_coef: float, rows: Rows) -> list[tuple[float, torch.Tensor]]:
    """Return the KLs that tokens' rewards are reduced by, [B, R] each, after their coefficients."""
    coefs = {"kl_penalty": kl_coef}
    if config.distilled_at == "reward":
        coefs["distillation_kl"] = config.distillation.coef
    return [(coef, rows.fields[name]) for name, coef in coefs.items() if name in rows.fields]


def _estimate(
    config: Config, exchange: Exchange, rows: Rows, rewards: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns. In decoupled and length-adaptive GAE they have different lambdas."""
    algorithm = config.algorithm
    mask = rows.response_mask
    inputs = {  # `estimate` passes on what the estimator has as parameters
        **rows.fields,  # the critic's `values` for gae
        "old_log_probs": rows.old_log_probs if algorithm.method.needs_old_log_probs else None,
        **{key: getattr(algorithm, key) for key in algorithm.method.reads},
        "token_level_rewards": rewards,
        "response_mask": mask,
        "bootstrap_values": None,
        "groups": rows.prompt_ids,
        "group": exchange.group,
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


def _whitened_and_clipped(
    config: Config, exchange: Exchange, advantages: torch.Tensor, rows: Rows
) -> dict[str, torch.Tensor]:
    """Return `advantages`, whitened over the tokens of all ranks (whiten_advantages, or the estimator's default), minus
    the KL to teachers if distillation.signal is advantage, 0 where critics agree, and clipped; `clipped_advantages` is
    1 where clipping changed them."""
    mask = rows.response_mask
    algorithm = config.algorithm
    whitens = algorithm.method.whitens if algorithm.whiten_advantages is None else algorithm.whiten_advantages
    if whitens:
        whitening = conventions(config).whitening_of(algorithm.adv_estimator)
        advantages = whiten(advantages, mask, group=exchange.group, whitening=whitening)
    if config.distilled_at == "advantage":
        advantages = advantages - config.distillation.coef * rows.fields["distillation_kl"] * mask
    if "agreed" in rows.fields:
        advantages = advantages.masked_fill(rows.fields["agreed"].bool(), 0.0)
    limit = algorithm.advantages_clip
    if limit is None:
        return {"advantages": advantages}
    return {"advantages": advantages.clamp(-limit, limit), "clipped_advantages": (advantages.abs() > limit).float()}

"""PPO's losses as the train engine calls them: from a micro-batch's outputs to its part of the mini-batch's loss."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from megappo.batch.rows import Rows
from megappo.config.methods import ValueSupport
from megappo.config.schema import Actor, Config
from megappo.models.megatron_engine import Outputs
from megappo.models.train_engine import LossFn
from megappo.observe.metrics import OnDevice
from megappo.ppo.conventions import DEFAULT, PRESETS, Conventions
from megappo.ppo.losses import entropy_loss, kl_loss, policy_kl, policy_loss, value_loss
from megappo.ppo.policy_losses import Result
from megappo.ppo.reductions import Metrics, Normaliser, token_mean
from megappo.ppo.supervised import nll_loss
from megappo.ppo.value_losses import ERRORS, ValueInputs, token_errors, values_of
from megappo.runtime import platform

SELECTED = "selected"
"""Field with 1 on the tokens that the policy loss selects in the whole mini-batch."""
LOSS_WEIGHTS = "loss_weights"
"""Field with the factor of each row's losses, if the reward function returns one."""

LossPart = tuple[torch.Tensor, dict[str, OnDevice]]
"""A micro-batch's part of the mini-batch's loss and metrics."""


def conventions(config: Config) -> Conventions:
    """Return the numerical conventions of algorithm.preset."""
    return DEFAULT if config.algorithm.preset is None else PRESETS[config.algorithm.preset]


def positive_mask(rows: Rows) -> torch.Tensor:
    """Return [B, R], 1 on tokens with mask 1 of responses whose score, before it is shaped, is above 0."""
    return rows.response_mask * (rows.fields["scores"] > 0)[:, None]


class ActorLoss:
    """Policy loss - entropy bonus + KL loss + positive_nll_coef x negative log-likelihood of the responses with a score
    above 0; with teachers, if distillation.signal is loss, also + coef x KL to the rows' teachers; with a shared
    backbone also + value_coef x value loss. A `LossFn`.

    Args:
        num_tokens: tokens with mask 1 of the whole mini-batch.
        num_sequences: rows of the whole mini-batch that count (`Conventions.counts_empty_rows`).
        num_positive_tokens: tokens with 1 in `positive_mask` of the whole mini-batch.
    Attributes:
        old_log_probs: row number -> the log-probs that it was called with, if the policy before the update is the one
            that is updated (`Config.old_log_probs`).
    Source of the likelihood term: Yue et al. 2025 (VAPO, arXiv 2504.05118), positive example LM loss.
    """

    def __init__(
        self,
        config: Config,
        num_tokens: int,
        num_sequences: int,
        num_positive_tokens: int = 0,
    ):
        self.config = config
        self._positive = Normaliser(num_positive_tokens, 0, 0)
        self._shared = _shared(config, num_tokens, num_sequences)
        of_teachers = {
            "kl_loss_coef": config.distillation.coef,
            "kl_loss_type": config.distillation.kl_kind,
            "kl_loss_unbiased": False,
        }
        self._distilled_actor = config.actor.model_copy(update=of_teachers)
        self._policy_kl = []
        self.old_log_probs = {}

    @property
    def policy_kl(self) -> float:
        """Return this shard's part of the mini-batch's mean KL to the old policy, if actor.target_kl is set."""
        return float(sum(self._policy_kl))

    def __call__(self, outputs: Outputs, rows: Rows) -> LossPart:
        config = self.config
        actor = self.config.actor
        log_probs = outputs["log_probs"]
        mask = rows.response_mask
        fields = rows.fields
        if config.old_log_probs == "update":
            old = log_probs.detach()
            self.old_log_probs |= zip(rows.ids.tolist(), old, strict=True)
        else:
            old = rows.old_log_probs
        shared = self._shared | {"loss_weights": fields.get(LOSS_WEIGHTS)}
        if actor.target_kl is not None:
            self._policy_kl.append(policy_kl(log_probs, old, mask, **self._shared).double())
        loss, loss_metrics = policy_loss(
            log_probs,
            old,
            fields["advantages"],
            mask,
            actor,
            rollout_is_weights=fields.get("rollout_is_weights"),
            turns=fields.get("turns"),
            selected=fields[SELECTED].bool() if SELECTED in fields else None,
            **shared,
        )
        log_ratios = (log_probs.detach() - old).masked_fill(mask == 0, math.nan)
        loss_metrics = {"pg_loss": loss, **loss_metrics, "log_ratio/histogram": (log_ratios, "histogram")}
        # Without a bonus the entropy is only a metric: keep it out of the backward pass.
        entropy = outputs["entropy"] if actor.entropy_coeff else outputs["entropy"].detach()
        if "disputed" in fields:
            entropy = torch.where(fields["disputed"].bool(), entropy.detach(), entropy)
        terms = [entropy_loss(entropy, mask, actor, **shared)]

        def kl_term(others: str, mask: torch.Tensor, settings: Actor) -> Result:
            """Return the KL to a model as a loss to add; `others` names its log-probs, unless the kind is full."""
            kl = outputs["full_kl"] if settings.kl_loss_type == "full" else None
            ref = fields.get(others, log_probs)
            return kl_loss(log_probs, ref, mask, settings, old_log_probs=old, kl=kl, **shared)

        if actor.use_kl_loss:
            terms.append(kl_term("ref_log_probs", mask, actor))
        if config.distilled_at == "loss":
            taught = mask * (fields["teacher"] > 0)[:, None]
            distilled, of_teachers = kl_term("teacher_log_probs", taught, self._distilled_actor)
            terms.append((distilled, {"distillation_loss": of_teachers["kl_loss"]}))
        if actor.positive_nll_coef:
            nll, _ = nll_loss(log_probs, positive_mask(rows), self._positive, shared["loss_weights"])
            terms.append((actor.positive_nll_coef * nll, {"positive_nll_loss": nll.detach()}))
        for term, term_metrics in terms:
            loss = loss + term
            loss_metrics |= term_metrics
        metrics = prefixed("actor", loss_metrics)
        if config.algorithm.shared_backbone:
            term, value_metrics = _value_loss(config, outputs, rows, shared)
            loss = loss + config.algorithm.value_coef * term
            metrics |= value_metrics
        return loss, metrics


def critic_loss(
    config: Config, num_tokens: int, num_sequences: int, *, name: str = "critic", old: str = "values"
) -> LossFn:
    """Return a critic's value loss; arguments as in `ActorLoss`.

    Args:
        name: the critic's.
        old: field of its values before the update.
    """
    shared = _shared(config, num_tokens, num_sequences)

    def loss_fn(outputs: Outputs, rows: Rows) -> LossPart:
        return _value_loss(config, outputs, rows, shared | {"loss_weights": rows.fields.get(LOSS_WEIGHTS)}, name, old)

    return loss_fn


def value_readers(config: Config, support: ValueSupport | None, *, trains: bool) -> dict[str, Callable[..., Any]]:
    """Return the arguments of `value_head` for a head of several outputs; {} for a head whose output is the value.

    Args:
        trains: with the loss of each token.
    """
    if support is None:
        return {}
    centers = torch.tensor(support.centers, device=platform.device())

    def errors(outputs: torch.Tensor, returns: torch.Tensor) -> Outputs:
        return token_errors(ValueInputs(outputs, returns, centers, conventions(config)), config.critic)

    read = {"read": partial(values_of, centers=centers)}
    return read | {"errors": errors} if trains else read


def _shared(config: Config, num_tokens: int, num_sequences: int) -> dict[str, Any]:
    """Return the arguments that all losses of a mini-batch have in common."""
    normaliser = Normaliser(num_tokens, num_sequences, config.rollout.max_response_length)
    return {"normaliser": normaliser, "conventions": conventions(config)}


def _value_loss(
    config: Config,
    outputs: Outputs,
    rows: Rows,
    shared: dict[str, Any],
    name: str = "critic",
    old: str = "values",
) -> LossPart:
    values = outputs["values"]
    returns = rows.fields["returns"]
    mask = rows.response_mask
    loss, metrics = value_loss(
        values, rows.fields[old], returns, mask, config.critic, errors=outputs.get(ERRORS), **shared
    )
    for metric, numbers in outputs.items():
        if metric.startswith("vf_"):
            metrics[metric] = token_mean(numbers, mask, shared["normaliser"])
    return loss, prefixed(name, {"vf_loss": loss, **metrics})


def prefixed(component: str, metrics: Metrics) -> dict[str, OnDevice]:
    """Return the metrics under the component's name. A metric without a reduction is a sum."""
    prefixed = {}
    for name, metric in metrics.items():
        values, reduction = metric if isinstance(metric, tuple) else (metric, "sum")
        prefixed[f"{component}/{name}"] = OnDevice.of(values, reduction)
    return prefixed

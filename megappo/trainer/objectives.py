"""PPO's losses as the engine takes them: from a micro-batch's outputs to its part of the mini-batch's loss."""

from typing import Any

import torch

from megappo.batch.rows import Rows
from megappo.config.schema import Config
from megappo.models.megatron_engine import Outputs
from megappo.models.train_engine import LossFn
from megappo.observe.metrics import OnDevice
from megappo.ppo.aggregation import Metrics, Normaliser
from megappo.ppo.conventions import DEFAULT, PRESETS, Conventions
from megappo.ppo.losses import entropy_loss, kl_loss, policy_kl, policy_loss, value_loss

SELECTED = "selected"
"""Field with 1 on the tokens that the policy loss chose in the whole mini-batch."""
LOSS_WEIGHTS = "loss_weights"
"""Field of what each row's losses are multiplied by, where a reward function tells that."""

Fields = dict[str, torch.Tensor]
Part = tuple[torch.Tensor, dict[str, OnDevice]]


def conventions(config: Config) -> Conventions:
    """The numerical conventions that algorithm.preset names."""
    return DEFAULT if config.algorithm.preset is None else PRESETS[config.algorithm.preset]


class ActorLoss:
    """Policy loss - entropy bonus + KL loss, and with a shared backbone + value_coef x value loss: a `LossFn`.

    Args:
        num_tokens, num_sequences: of the whole mini-batch: tokens with mask 1; rows that count (`counts_empty_rows`).
    """

    def __init__(self, config: Config, num_tokens: int, num_sequences: int):
        self.config = config
        self._shared = _shared(config, num_tokens, num_sequences)
        self._policy_kl: list[torch.Tensor] = []

    @property
    def policy_kl(self) -> float:
        """This shard's part of the mean KL to the policy before the update, for actor.target_kl: the sum over the
        micro-batches so far."""
        return float(sum(self._policy_kl))

    def __call__(self, outputs: Outputs, rows: Rows) -> Part:
        config, actor, log_probs = self.config, self.config.actor, outputs["log_probs"]
        mask, fields = _on(log_probs.device, rows)
        old, shared = fields["old_log_probs"], self._shared | _weights(fields)
        if actor.target_kl is not None:
            self._policy_kl.append(policy_kl(log_probs, old, mask, **self._shared).double())
        loss, found = policy_loss(
            log_probs,
            old,
            fields["advantages"],
            mask,
            actor,
            rollout_is_weights=fields.get("rollout_is_weights"),
            selected=fields[SELECTED].bool() if SELECTED in fields else None,
            **shared,
        )
        found = {"pg_loss": loss, **found}
        # Without a bonus the entropy is only a metric: keep it out of the backward pass.
        entropy = outputs["entropy"] if actor.entropy_coeff else outputs["entropy"].detach()
        parts = [entropy_loss(entropy, mask, actor, **shared)]
        if actor.use_kl_loss:
            ref = fields.get("ref_log_probs", log_probs)
            full = outputs["full_kl"] if actor.kl_loss_type == "full" else None
            parts.append(kl_loss(log_probs, ref, mask, actor, old_log_probs=old, kl=full, **shared))
        for part, of_part in parts:
            loss, found = loss + part, found | of_part
        metrics = _named("actor", found)
        if config.algorithm.shared_backbone:
            part, of_values = _value_loss(config, outputs, mask, fields, shared)
            loss, metrics = loss + config.algorithm.value_coef * part, metrics | of_values
        return loss, metrics


def critic_loss(config: Config, num_tokens: int, num_sequences: int) -> LossFn:
    """The critic's value loss; arguments as in `ActorLoss`."""
    shared = _shared(config, num_tokens, num_sequences)

    def loss_fn(outputs: Outputs, rows: Rows) -> Part:
        mask, fields = _on(outputs["values"].device, rows)
        return _value_loss(config, outputs, mask, fields, shared | _weights(fields))

    return loss_fn


def _shared(config: Config, num_tokens: int, num_sequences: int) -> dict[str, Any]:
    """What every loss of a mini-batch takes."""
    normaliser = Normaliser(num_tokens, num_sequences, config.rollout.max_response_length)
    return {"normaliser": normaliser, "conventions": conventions(config)}


def _weights(fields: Fields) -> Fields:
    """What every loss of a micro-batch takes besides."""
    return {LOSS_WEIGHTS: fields[LOSS_WEIGHTS]} if LOSS_WEIGHTS in fields else {}


def _value_loss(config: Config, outputs: Outputs, mask: torch.Tensor, fields: Fields, shared: dict[str, Any]) -> Part:
    old, returns = fields["values"], fields["returns"]
    loss, metrics = value_loss(outputs["values"], old, returns, mask, config.critic, **shared)
    return loss, _named("critic", {"vf_loss": loss, **metrics})


def _named(component: str, metrics: Metrics) -> dict[str, OnDevice]:
    """A loss's metrics under a component's name."""
    parts = {name: part if isinstance(part, tuple) else (part, "sum") for name, part in metrics.items()}
    return {f"{component}/{name}": OnDevice.of(*part) for name, part in parts.items()}


def _on(device: torch.device, rows: Rows) -> tuple[torch.Tensor, Fields]:
    """The mask and all fields, on the device."""
    return rows.response_mask.to(device), {name: value.to(device) for name, value in rows.fields.items()}

"""PPO's losses as the engine takes them: from a micro-batch's outputs to its part of the mini-batch's loss."""

import torch

from megappo.batch.rows import Rows
from megappo.config.schema import Config
from megappo.models.train_engine import LossFn, Outputs
from megappo.observe.metrics import Metric
from megappo.ppo.aggregation import Metrics, Normaliser
from megappo.ppo.conventions import DEFAULT, PRESETS, Conventions
from megappo.ppo.losses import entropy_loss, kl_loss, value_loss
from megappo.ppo.surrogate import Result, Tokens

SELECTED = "selected"
"""Field with 1 on the tokens that the policy loss chose in the whole mini-batch."""

Fields = dict[str, torch.Tensor]
Part = tuple[torch.Tensor, dict[str, Metric]]


def conventions(config: Config) -> Conventions:
    """The numerical conventions that algorithm.preset names."""
    return DEFAULT if config.algorithm.preset is None else PRESETS[config.algorithm.preset]


class ActorLoss:
    """Policy loss - entropy bonus + KL loss, and with a shared backbone + value_coef x value loss: a `LossFn`.

    Args:
        num_tokens, num_sequences: of the whole mini-batch: tokens with mask 1, rows with any.
    """

    def __init__(self, config: Config, num_tokens: int, num_sequences: int):
        self.config = config
        self.normaliser = Normaliser(num_tokens, num_sequences, config.rollout.max_response_length)
        self._policy_kl: list[torch.Tensor] = []

    @property
    def policy_kl(self) -> float:
        """This shard's part of the mean KL to the policy before the update, of the micro-batches so far."""
        return float(sum(self._policy_kl))

    def __call__(self, outputs: Outputs, rows: Rows) -> Part:
        config, normaliser = self.config, self.normaliser
        mask, fields = _on(outputs["log_probs"].device, rows)
        tokens = _tokens(config, outputs, fields, mask, normaliser)
        self._policy_kl.append(tokens.policy_kl.double())
        loss, found = config.actor.method.function(tokens, config.actor)
        found = {"pg_loss": loss, **found}
        for part, part_metrics in (
            _entropy_loss(config, outputs, mask, normaliser),
            *([_kl_loss(config, outputs, fields, mask, normaliser)] if config.actor.use_kl_loss else []),
        ):
            loss, found = loss + part, found | part_metrics
        metrics = _named("actor", found)
        if config.algorithm.shared_backbone:
            value_part, value_metrics = _value_loss(config, outputs, fields, mask, normaliser)
            loss, metrics = loss + config.algorithm.value_coef * value_part, metrics | value_metrics
        return loss, metrics


def critic_loss(config: Config, num_tokens: int, num_sequences: int) -> LossFn:
    """The critic's value loss; arguments as in `ActorLoss`."""
    normaliser = Normaliser(num_tokens, num_sequences, config.rollout.max_response_length)

    def loss_fn(outputs: Outputs, rows: Rows) -> Part:
        mask, fields = _on(outputs["values"].device, rows)
        return _value_loss(config, outputs, fields, mask, normaliser)

    return loss_fn


def _tokens(config: Config, outputs: Outputs, fields: Fields, mask: torch.Tensor, normaliser: Normaliser) -> Tokens:
    return Tokens(
        outputs["log_probs"],
        fields["old_log_probs"],
        fields["advantages"],
        mask,
        rollout_is_weights=fields.get("rollout_is_weights"),
        selected=fields[SELECTED].bool() if SELECTED in fields else None,
        normaliser=normaliser,
        conventions=conventions(config),
        opsm_delta=config.actor.opsm_delta,
    )


def _entropy_loss(config: Config, outputs: Outputs, mask: torch.Tensor, normaliser: Normaliser) -> Result:
    # Without a bonus the entropy is only a metric: keep it out of the backward pass.
    entropy = outputs["entropy"] if config.actor.entropy_coeff else outputs["entropy"].detach()
    return entropy_loss(entropy, mask, config.actor, normaliser=normaliser, conventions=conventions(config))


def _kl_loss(config: Config, outputs: Outputs, fields: Fields, mask: torch.Tensor, normaliser: Normaliser) -> Result:
    log_probs = outputs["log_probs"]
    return kl_loss(
        log_probs,
        fields.get("ref_log_probs", log_probs),
        mask,
        config.actor,
        old_log_probs=fields["old_log_probs"],
        kl=outputs["full_kl"] if config.actor.kl_loss_type == "full" else None,
        normaliser=normaliser,
        conventions=conventions(config),
    )


def _value_loss(config: Config, outputs: Outputs, fields: Fields, mask: torch.Tensor, normaliser: Normaliser) -> Part:
    loss, metrics = value_loss(
        outputs["values"],
        fields["values"],
        fields["returns"],
        mask,
        config.critic,
        normaliser=normaliser,
        conventions=conventions(config),
    )
    return loss, _named("critic", {"vf_loss": loss, **metrics})


def _named(component: str, metrics: Metrics) -> dict[str, Metric]:
    """A loss's metrics under a component's name."""
    parts = {name: part if isinstance(part, tuple) else (part, "sum") for name, part in metrics.items()}
    return {f"{component}/{name}": Metric.of(*part) for name, part in parts.items()}


def _on(device: torch.device, rows: Rows) -> tuple[torch.Tensor, Fields]:
    """The mask and all fields, on the device."""
    return rows.response_mask.to(device), {name: value.to(device) for name, value in rows.fields.items()}

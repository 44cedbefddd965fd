"""PPO's losses as the engine takes them: from a micro-batch's outputs to its part of the mini-batch's loss."""

import torch

from megappo.config.schema import Actor, Critic
from megappo.data.batch import Rows
from megappo.models.engine import LossFn, Outputs
from megappo.ppo.losses import POLICY_LOSSES, entropy_loss, value_loss


def actor_loss(config: Actor, num_tokens: int) -> LossFn:
    """Clipped policy loss minus the entropy bonus; `num_tokens` response tokens in the whole mini-batch."""

    def loss_fn(outputs: Outputs, rows: Rows) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        log_probs = outputs["log_probs"]
        mask, old_log_probs, advantages = _on(log_probs.device, rows, "old_log_probs", "advantages")
        loss, metrics = POLICY_LOSSES["clip"](log_probs, old_log_probs, advantages, mask, config, num_tokens=num_tokens)
        # Without a bonus the entropy is only a metric: keep it out of the backward pass.
        entropy = outputs["entropy"] if config.entropy_coeff else outputs["entropy"].detach()
        bonus, entropy_metrics = entropy_loss(entropy, mask, config, num_tokens=num_tokens)
        return loss + bonus, {"pg_loss": loss, **metrics, **entropy_metrics}

    return loss_fn


def critic_loss(config: Critic, num_tokens: int) -> LossFn:
    """Clipped value loss; `num_tokens` response tokens in the whole mini-batch."""

    def loss_fn(outputs: Outputs, rows: Rows) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        values = outputs["values"]
        mask, old_values, returns = _on(values.device, rows, "values", "returns")
        loss, metrics = value_loss(values, old_values, returns, mask, config, num_tokens=num_tokens)
        return loss, {"vf_loss": loss, **metrics}

    return loss_fn


def _on(device: torch.device, rows: Rows, *names: str) -> list[torch.Tensor]:
    return [rows.response_mask.to(device), *(rows.fields[name].to(device) for name in names)]

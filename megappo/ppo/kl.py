"""KL divergence between policy and reference: estimators per token, and the controller of the penalty's coefficient."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megappo.ppo.conventions import DEFAULT, EXP_LIMIT, KL_KINDS, Conventions

VERL_NAMES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
"""verl's names for some kinds, also accepted."""


def kl_estimate(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    kind: str,
    *,
    conventions: Conventions = DEFAULT,
) -> Tensor:
    """Estimate KL(policy, reference) at each sampled token from its two log-probs.

    With q = ref_log_probs - log_probs: k1 = -q; abs = |q|; k2 = q^2 / 2; k3 = e^q - 1 - q. k1+ and k3+ have the value
    of k1 and k3 and the gradient of k2, whose expectation is the gradient of the KL. The expected gradient of k1 and k3
    is not: it lacks the term estimate x grad log_prob, for the policy's influence on which tokens are sampled.
    conventions.kl_true_gradient adds it; k3 then has k2's gradient, and k1 has k2's gradient plus grad log_prob, whose
    expectation is 0.

    Args:
        log_probs, ref_log_probs: [B, R] float32, in nats.
        kind: one of KL_KINDS or of VERL_NAMES.
        conventions: kl_input_clamp of q and kl_output_clamp of the estimate, for the kinds in kl_clamped; by default
            +-20 and +-10 for k3 and k3+. The gradient of k1+ and k3+ is never clamped, and takes no part in
            kl_true_gradient, whose gradient is 0 where a clamp holds.

    Returns:
        [B, R] float32, differentiable in log_probs. Padding is not masked.

    Raises:
        ValueError: unknown kind, or full.
    Source: Schulman, "Approximating KL divergence" (2020); clamps and straight-through gradient as verl's kl_penalty;
        the true gradient as NeMo-RL's calculate_kl with its importance weight exp(x - sg(x)).
    """
    kind = VERL_NAMES.get(kind, kind)
    if kind not in KL_KINDS:
        raise ValueError(
            f"unknown KL estimator {kind!r}: choose one of {', '.join(KL_KINDS)}; the KL over the full vocabulary "
            "needs more than the sampled tokens' log-probs: the model's head computes it"
        )
    q = ref_log_probs - log_probs
    is_clamped = kind in conventions.kl_clamped
    bounded = _clamp(q, conventions.kl_input_clamp) if is_clamped else q
    value = FORMULAE[kind.removesuffix("+")](bounded)
    if conventions.kl_true_gradient:
        own = torch.where(bounded == q, log_probs - log_probs.detach(), 0.0)
        value = value + value.detach() * own
    if is_clamped:
        value = _clamp(value, conventions.kl_output_clamp)
    if not kind.endswith("+"):
        return value
    k2 = 0.5 * q.square()
    return value.detach() + (k2 - k2.detach())


def _k3(q: Tensor) -> Tensor:
    # expm1: e^q - 1 would lose all digits of a small q.
    return torch.expm1(q.clamp(max=EXP_LIMIT)) - q


FORMULAE: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": torch.neg,
    "abs": torch.abs,
    "k2": lambda q: 0.5 * q.square(),
    "k3": _k3,
}
"""Kind, without its "+" -> the estimate as a function of q."""


def _clamp(x: Tensor, limit: float | None) -> Tensor:
    return x if limit is None else x.clamp(-limit, limit)


class KLController:
    """The coefficient of the KL penalty; an adaptive one changes so that the KL per token approaches target_kl.

    Args:
        config: algorithm.kl_ctrl.
    Source: Ziegler et al. 2019, section 2.2.
    """

    def __init__(self, config: Any):
        self.config = config
        self.value: float = config.kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Multiply an adaptive value by 1 + clip(current_kl / target_kl - 1, -0.2, 0.2) * n_steps / horizon.

        Args:
            current_kl: mean KL per response token of this step, over all ranks.
            n_steps: responses of this step, over all ranks.

        Raises:
            FloatingPointError: current_kl is not finite.
        """
        if self.config.type == "fixed":
            return
        if not math.isfinite(current_kl):
            raise FloatingPointError(f"cannot adapt kl_coef: the KL to the reference is {current_kl}")
        error = min(max(current_kl / self.config.target_kl - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * n_steps / self.config.horizon

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take an adaptive value from a checkpoint; a fixed one stays the config's."""
        if self.config.type == "adaptive":
            self.value = state["value"]

"""KL divergence between policy and reference: estimators per token, and controllers of the penalty's coefficient."""

import math
from typing import Protocol

import torch

KINDS = ("k1", "abs", "k2", "k3")
"""Estimators by their name in algorithm.kl_penalty."""


def kl_estimate(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, kind: str) -> torch.Tensor:
    """Estimate KL(policy, reference) at each sampled token from its two log-probs.

    With q = ref_log_probs - log_probs: k1 = -q; abs = |q|; k2 = q^2 / 2; k3 = e^q - 1 - q, with q clamped to +-20 and
    the result to +-10.

    Args:
        log_probs, ref_log_probs: [B, R] float32, in nats.
        kind: one of KINDS.

    Returns:
        [B, R] float32, differentiable in log_probs. Padding is not masked.

    Raises:
        ValueError: unknown kind.
    Source: Schulman, "Approximating KL divergence" (2020); clamps as verl's kl_penalty.
    """
    q = ref_log_probs - log_probs
    if kind == "k1":
        return -q
    if kind == "abs":
        return q.abs()
    if kind == "k2":
        return 0.5 * q.square()
    if kind == "k3":
        q = q.clamp(-20.0, 20.0)
        return (torch.expm1(q) - q).clamp(-10.0, 10.0)
    raise ValueError(f"unknown KL estimator {kind!r}: choose one of {', '.join(KINDS)}")


class KLController(Protocol):
    """The coefficient of the KL penalty, `value`, and how it follows the measured KL."""

    value: float

    def update(self, current_kl: float, n_steps: int) -> None: ...

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, float]) -> None: ...


class FixedKLController:
    """Keeps the coefficient; a checkpoint does not change it, so a resumed run follows its config."""

    def __init__(self, kl_coef: float):
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing to adapt."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Nothing to restore."""


class AdaptiveKLController:
    """Steers the coefficient so that the KL per token approaches target_kl.

    Source: Ziegler et al. 2019, section 2.2.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: int):
        self.value = init_kl_coef
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """value *= 1 + clip(current_kl / target_kl - 1, -0.2, 0.2) * n_steps / horizon.

        Args:
            current_kl: mean KL per response token of this step, over all ranks.
            n_steps: responses of this step, over all ranks.

        Raises:
            ValueError: current_kl is not finite.
        """
        if not math.isfinite(current_kl):
            raise ValueError(f"cannot adapt kl_coef: the KL to the reference is {current_kl}; check the log-probs")
        error = min(max(current_kl / self.target_kl - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class KLControllerConfig(Protocol):
    """The keys of algorithm.kl_ctrl."""

    @property
    def type(self) -> str: ...
    @property
    def kl_coef(self) -> float: ...
    @property
    def target_kl(self) -> float: ...
    @property
    def horizon(self) -> int: ...


def kl_controller(config: KLControllerConfig) -> KLController:
    """Build the controller that algorithm.kl_ctrl names."""
    if config.type == "fixed":
        return FixedKLController(config.kl_coef)
    if config.type == "adaptive":
        return AdaptiveKLController(config.kl_coef, config.target_kl, config.horizon)
    raise ValueError(f"unknown KL controller {config.type!r}: choose fixed or adaptive")

"""What public systems do differently in the last digits of one formula, and presets that follow one of them.

| attribute                | megappo, verl | slime               | OpenRLHF            | NeMo-RL         |
| ------------------------ | ------------- | ------------------- | ------------------- | --------------- |
| whiten_ddof              | 1             | 1                   | 0                   | 1               |
| whiten_eps               | 1e-8          | 1e-8                | 1e-8                | 1e-8            |
| whitening divides by     | sqrt(var+eps) | sqrt(var+eps)       | sqrt(max(var, eps)) | sqrt(var+eps)   |
| log_ratio_clamp          | 20            | none                | 20                  | none            |
| kl_input_clamp           | 20            | none                | none                | 20              |
| kl_output_clamp          | 10            | 10                  | 10                  | 10              |
| kl_clamped               | k3, k3+       | k3, k3+             | all                 | all             |
| value_loss_factor        | 0.5           | 1                   | 0.5                 | 0.5             |
| loss_agg_mode            | token-mean    | seq-mean-token-mean | token-mean          | token-mean      |

Read from: verl's trainer/ppo/core_algos.py (kl_penalty_forward, compute_policy_loss_vanilla, compute_value_loss) and
utils/torch_functional.py (masked_whiten); slime's utils/ppo_utils.py and utils/distributed_utils.py, our k3 being what
it calls low_var_kl; OpenRLHF's models/utils.py (compute_approx_kl), models/loss.py and its experience maker; NeMo-RL's
algorithms/loss/loss_functions.py (ClippedPGLossConfig) and algorithms/utils.py.
No preset follows a normaliser per micro-batch or per rank: the loss never depends on how the mini-batch was cut. slime
computes the whitening's variance as E[x^2] - E[x]^2, which is the same number with less precision.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Conventions:
    """Choices that papers leave open and systems make differently; the defaults are verl's.

    Attributes:
        whiten_ddof: 1 = the variance divides by count - 1, 0 = by count.
        whiten_eps: keeps the whitening finite where the variance is 0.
        whiten_clamps_variance: False = rsqrt(variance + whiten_eps); True = rsqrt(max(variance, whiten_eps)).
        log_ratio_clamp: log-ratios of two policies are clamped to +- this before exp; None = not.
        kl_input_clamp: q = ref_log_probs - log_probs is clamped to +- this; None = not.
        kl_output_clamp: a KL estimate is clamped to +- this; None = not.
        kl_clamped: the estimators that both KL clamps apply to.
        value_loss_factor: of the squared error in the value loss.
        loss_agg_mode: where neither the config nor the policy loss's method says one.
    """

    whiten_ddof: int = 1
    whiten_eps: float = 1e-8
    whiten_clamps_variance: bool = False
    log_ratio_clamp: float | None = 20.0
    kl_input_clamp: float | None = 20.0
    kl_output_clamp: float | None = 10.0
    kl_clamped: frozenset[str] = frozenset({"k3", "k3+"})
    value_loss_factor: float = 0.5
    loss_agg_mode: str = "token-mean"


_EVERY_ESTIMATOR = frozenset({"k1", "abs", "k2", "k3", "k1+", "k3+"})

DEFAULT = Conventions()

PRESETS: dict[str, Conventions] = {
    "verl": DEFAULT,
    "slime": Conventions(
        log_ratio_clamp=None, kl_input_clamp=None, value_loss_factor=1.0, loss_agg_mode="seq-mean-token-mean"
    ),
    "openrlhf": Conventions(
        whiten_ddof=0, whiten_clamps_variance=True, kl_input_clamp=None, kl_clamped=_EVERY_ESTIMATOR
    ),
    "nemo_rl": Conventions(log_ratio_clamp=None, kl_clamped=_EVERY_ESTIMATOR),
}
"""algorithm.preset -> its conventions; the table above."""

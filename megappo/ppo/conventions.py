"""Numerical conventions in which public systems differ, and presets that follow one of them.

| attribute           | megappo, verl | slime               | miles               | OpenRLHF           | NeMo-RL       |
| ------------------- | ------------- | ------------------- | ------------------- | ------------------ | ------------- |
| whitening.ddof      | 1             | 1                   | 1                   | 0                  | 1             |
| whitening.eps       | 1e-8          | 1e-8                | 1e-8                | 1e-8               | 1e-8          |
| it divides by       | sqrt(var+eps) | sqrt(var+eps)       | sqrt(var+eps)       | sqrt(max(var,eps)) | sqrt(var+eps) |
| reinforce_whitening | the same      | the same            | the same            | the same           | as OpenRLHF's |
| log_ratio_clamp     | 20            | none                | 20                  | 20                 | none          |
| kl_input_clamp      | 20            | none                | 20                  | none               | 20            |
| kl_output_clamp     | 10            | 10                  | 10                  | 10                 | 10            |
| kl_clamped          | k3, k3+       | k3, k3+             | k3, k3+             | all                | all           |
| kl_true_gradient    | no            | no                  | no                  | no                 | yes           |
| value_loss_factor   | 0.5           | 1                   | 1                   | 0.5                | 0.5           |
| loss_agg_mode       | token-mean    | seq-mean-token-mean | seq-mean-token-mean | token-mean         | token-mean    |
| counts_empty_rows   | verl: yes     | yes                 | yes                 | no                 | no            |
| token_kl_gamma      | none          | 0                   | 0                   | 1                  | 0             |

Read from: verl's trainer/ppo/core_algos.py (kl_penalty_forward, compute_policy_loss_vanilla, compute_value_loss) and
utils/torch_functional.py (masked_whiten); slime's utils/ppo_utils.py and utils/distributed_utils.py, our k3 is its
low_var_kl; miles' backends/training_utils/loss_hub; OpenRLHF's models/utils.py (compute_approx_kl),
models/loss.py and its experience maker; NeMo-RL's algorithms/loss/loss_functions.py (ClippedPGLossFn),
algorithms/utils.py (calculate_kl) and algorithms/advantage_estimator.py.
No preset follows:
- A normaliser per micro-batch or per rank: the loss never depends on how the mini-batch was cut.
- Losses for which a system clamps the log-ratio differently than for PPO's clip. verl: gspo, gmpo, clip_cov, kl_cov;
  see there. OpenRLHF: its 20 is ppo's, its gspo clamps nothing.
- miles takes a log-ratio that is NaN or infinite as 0. Here an infinite one is clamped like any other; NaN makes the
  loss NaN, too, and a run skips the optimizer step.
- The unbiased KL loss (`losses.kl_loss`): the estimate is clamped here, before the ratio; in slime, miles and NeMo-RL
  the product with the ratio, whose gradient vanishes where the policy moved most.
- NeMo-RL whitens gdpo's advantages over responses, by the standard deviation with ddof 1 and no eps; here over tokens.
- A group of one response: the estimators refuse it here. NeMo-RL gives 0, verl's grpo the score itself.
- KL in the reward of grpo: slime, miles and NeMo-RL have none. With their presets it is as for reinforce++'s baseline.
- The variance of the whitening in slime and miles is E[x^2] - E[x]^2: the same number with less precision.
`none` of log_ratio_clamp is EXP_LIMIT.
"""

from dataclasses import dataclass, replace

EXP_LIMIT = 88.0
"""exp of more overflows float32. An infinity that a clip bounds would still make the gradient 0 x inf."""
KL_KINDS = ("k1", "abs", "k2", "k3", "k1+", "k3+")
"""Estimators of the KL from the two log-probs of a sampled token, `megappo.ppo.kl.kl_estimate`."""


@dataclass(frozen=True)
class Whitening:
    """(x - mean) * rsqrt(variance + eps).

    Attributes:
        ddof: 1 = the variance divides by count - 1, 0 = by count.
        eps: keeps it finite where the variance is 0.
        clamps_variance: True = rsqrt(max(variance, eps)) instead.
    """

    ddof: int = 1
    eps: float = 1e-8
    clamps_variance: bool = False


@dataclass(frozen=True)
class Conventions:
    """Choices that papers leave open and systems make differently. Defaults are verl's, except counts_empty_rows.

    Attributes:
        whitening: how advantages are whitened.
        reinforce_whitening: how the advantages of reinforce_plus_plus and reinforce_plus_plus_baseline are whitened.
        log_ratio_clamp: log-ratios of two policies are clamped to +- this before exp; None = to +- EXP_LIMIT.
        kl_input_clamp: q = ref_log_probs - log_probs is clamped to +- this; None = not.
        kl_output_clamp: a KL estimate is clamped to +- this; None = not.
        kl_clamped: the estimators that both KL clamps apply to.
        kl_true_gradient: True = a KL estimate also has the gradient of the probability that its token was sampled with,
            estimate x grad log_prob; see `kl_estimate`.
        value_loss_factor: factor of the squared error in the value loss.
        loss_agg_mode: averaging where neither the config nor the policy loss's method sets one.
        counts_empty_rows: True = the seq-mean modes divide by all rows of a mini-batch; False = by rows with a token.
        token_kl_gamma: where estimators compare the responses to a prompt, the KL in the reward is subtracted after the
            baseline, from a token's advantage: the sum from the token on, with this discount (0 = its own, 1 = of all).
            None = the response's whole KL is subtracted from its score, before the comparison.
    """

    whitening: Whitening = Whitening()
    reinforce_whitening: Whitening = Whitening()
    log_ratio_clamp: float | None = 20.0
    kl_input_clamp: float | None = 20.0
    kl_output_clamp: float | None = 10.0
    kl_clamped: frozenset[str] = frozenset({"k3", "k3+"})
    kl_true_gradient: bool = False
    value_loss_factor: float = 0.5
    loss_agg_mode: str = "token-mean"
    counts_empty_rows: bool = False
    token_kl_gamma: float | None = None

    @property
    def log_ratio_bound(self) -> float:
        """Log-ratios are clamped to +- this before exp."""
        return EXP_LIMIT if self.log_ratio_clamp is None else self.log_ratio_clamp

    def whitening_of(self, adv_estimator: str) -> Whitening:
        """Return the whitening of an algorithm.adv_estimator's advantages."""
        return self.reinforce_whitening if adv_estimator.startswith("reinforce_plus_plus") else self.whitening


_BIASED = Whitening(ddof=0, clamps_variance=True)

DEFAULT = Conventions()

_BY_SAMPLES = Conventions(
    value_loss_factor=1.0, loss_agg_mode="seq-mean-token-mean", counts_empty_rows=True, token_kl_gamma=0.0
)

PRESETS: dict[str, Conventions] = {
    "verl": replace(DEFAULT, counts_empty_rows=True),
    "slime": replace(_BY_SAMPLES, log_ratio_clamp=None, kl_input_clamp=None),
    "miles": _BY_SAMPLES,
    "openrlhf": Conventions(
        whitening=_BIASED,
        reinforce_whitening=_BIASED,
        kl_input_clamp=None,
        kl_clamped=frozenset(KL_KINDS),
        token_kl_gamma=1.0,
    ),
    "nemo_rl": Conventions(
        reinforce_whitening=_BIASED,
        log_ratio_clamp=None,
        kl_clamped=frozenset(KL_KINDS),
        kl_true_gradient=True,
        token_kl_gamma=0.0,
    ),
}
"""algorithm.preset -> its conventions; the table above."""

"""The methods of PPO: what each advantage estimator and each policy loss reads, needs and averages by. One entry each.

The values that the config's keys may have, the checks for keys that nothing reads and what a step does follow from it.
Without torch: the functions stand in megappo.ppo, in ESTIMATORS and POLICY_LOSSES, under the same names.
"""

from dataclasses import dataclass

CLIP_RANGE = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")


@dataclass(frozen=True)
class Estimator:
    """An algorithm.adv_estimator.

    Attributes:
        reads: keys of `algorithm` that not all estimators read.
        needs_values: and so a critic, or a shared backbone.
        compares_responses: to a prompt, with each other; there must be several.
        needs_greedy_baseline: the score of the greedy response to each prompt.
        whitens: the method whitens the advantages over the whole batch.
    """

    reads: tuple[str, ...] = ()
    needs_values: bool = False
    compares_responses: bool = False
    needs_greedy_baseline: bool = False
    whitens: bool = False


@dataclass(frozen=True)
class PolicyLoss:
    """An actor.policy_loss.

    Attributes:
        reads: keys of `actor` that not all policy losses read.
        loss_agg_mode: the averaging that belongs to the method, for a config that leaves it open.
        clips_below: the ratio is clipped to 1 - epsilon, so that epsilon must be below 1.
        selects_tokens: it treats some tokens of the whole mini-batch apart, which takes a forward pass of their own.
    """

    reads: tuple[str, ...] = ()
    loss_agg_mode: str | None = None
    clips_below: bool = False
    selects_tokens: bool = False


ESTIMATORS = {
    "gae": Estimator(("gamma", "lam"), needs_values=True, whitens=True),
    "grpo": Estimator(("norm_adv_by_std_in_grpo",), compares_responses=True),
    "rloo": Estimator(compares_responses=True),
    "reinforce_plus_plus": Estimator(("gamma",), whitens=True),
    "reinforce_plus_plus_baseline": Estimator(compares_responses=True, whitens=True),
    "remax": Estimator(needs_greedy_baseline=True),
    "opo": Estimator(compares_responses=True),
    "gpg": Estimator(compares_responses=True),
}
"""By algorithm.adv_estimator."""

POLICY_LOSSES = {
    "clip": PolicyLoss((*CLIP_RANGE, "clip_ratio_c"), clips_below=True),
    "gspo": PolicyLoss(CLIP_RANGE, loss_agg_mode="seq-mean-token-mean", clips_below=True),
    "cispo": PolicyLoss(CLIP_RANGE),
    "sapo": PolicyLoss(("tau_pos", "tau_neg"), loss_agg_mode="seq-mean-token-mean"),
    "gpg": PolicyLoss(),
    "clip_cov": PolicyLoss(
        (*CLIP_RANGE, "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"), clips_below=True, selects_tokens=True
    ),
    "kl_cov": PolicyLoss(("kl_cov_ratio", "ppo_kl_coef"), selects_tokens=True),
    "gmpo": PolicyLoss(CLIP_RANGE, loss_agg_mode="seq-mean-token-mean"),
}
"""By actor.policy_loss."""

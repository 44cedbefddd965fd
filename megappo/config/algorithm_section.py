"""Keys of the advantages, the KL to the reference, the correction for engine and trainer mismatch, and group filtering."""

from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, StrictBool
from pydantic_core import PydanticCustomError

from megappo.config.methods import ESTIMATORS, Estimator
from megappo.config.section import HAS_VALUES, KeyRule, ReadIf, Section, Usual, key
from megappo.config.values import (
    EXPLAINED,
    AtLeastOne,
    Fraction,
    KLKind,
    NonNegativeFloat,
    OneOf,
    OpenFraction,
    Positive,
    PositiveFloat,
    Rejection,
    TokenCount,
)

_WHITENING = ", ".join(name for name, method in ESTIMATORS.items() if method.whitens)
_WITH_VALUES = ", ".join(name for name, method in ESTIMATORS.items() if method.needs_values)

Bounds = tuple[PositiveFloat, PositiveFloat]

ADAPTS_KL = ReadIf(("algorithm.kl_ctrl.type",), lambda run: run.algorithm.kl_ctrl.type == "adaptive")
KL_IN_REWARD = ReadIf(("algorithm.use_kl_in_reward",), lambda run: run.algorithm.use_kl_in_reward)
WEIGHTS_ROWS = ReadIf(("algorithm.rollout_correction.level",), lambda run: run.algorithm.rollout_correction.level != "none")
FILTERS = ReadIf(("algorithm.filter_groups.enable",), lambda run: run.algorithm.filter_groups.enable)
ONE_BACKBONE = ReadIf(("algorithm.shared_backbone",), lambda run: run.algorithm.shared_backbone)


def check_rejections(bounds_by_name: Mapping[str, float | tuple[float, float]]) -> Mapping[str, float | tuple[float, float]]:
    """Refuse bounds that do not suit a divergence: k1 takes two of them, or one above 1; k2 and k3 take the largest."""
    for name, bounds in bounds_by_name.items():
        low, high = bounds if isinstance(bounds, tuple) else (1 / bounds, bounds)
        if name.endswith("k1"):
            if low > high:
                raise PydanticCustomError(EXPLAINED, f"{name} leaves no ratio: set two ascending bounds, or one above 1")
        elif isinstance(bounds, tuple):
            raise PydanticCustomError(EXPLAINED, f"{name} must be one number, the largest {name[-2:]}: drop the lower")
    return bounds_by_name


class KLCtrl(Section):
    rules = (
        KeyRule(
            lambda control: control.type == "adaptive" and not control.kl_coef,
            "algorithm.kl_ctrl.kl_coef 0 stays 0, as algorithm.kl_ctrl.type adaptive multiplies it: set it above 0",
        ),
    )

    type: Literal["fixed", "adaptive"] = key("fixed", "fixed: keep kl_coef; adaptive: steer it towards target_kl")
    kl_coef: NonNegativeFloat = key(0.001, "weight of the KL penalty in the reward", usual=Usual(0, 1, "the penalty outweighs scores of 0 to 1"))
    horizon: TokenCount = key(10000, "adaptive: responses over which the coefficient adapts", read_if=ADAPTS_KL)
    target_kl: PositiveFloat = key(0.1, "adaptive: KL per response token to hold", read_if=ADAPTS_KL)


class RolloutCorrection(Section):
    rules = (
        KeyRule(
            lambda own: own.reject_geometric is not None and not own.reject_geometric[0] < 1 < own.reject_geometric[1],
            "algorithm.rollout_correction.reject_geometric {reject_geometric} must enclose 1: set such as [0.999, 1.001]",
        ),
        KeyRule(
            lambda own: own.level != "none" and own.threshold_lower is not None and own.threshold_lower >= own.threshold,
            "algorithm.rollout_correction.threshold_lower {threshold_lower} must be below "
            "algorithm.rollout_correction.threshold {threshold}: lower it",
        ),
        KeyRule(
            lambda own: own.level != "none" and own.mode == "mask" and own.threshold_lower is None and own.threshold <= 1,
            "algorithm.rollout_correction.threshold {threshold} must be above 1: raise it, as with mode mask the lower "
            "one is 1 / threshold",
        ),
    )

    level: Literal["none", "token", "sequence", "geometric"] = key("none", "importance weights pi_trainer / pi_engine by token, response (product) or response (geometric mean)")
    mode: Literal["truncate", "mask"] = key("truncate", "a weight beyond the thresholds is bounded (truncate: TIS) or set to 0 (mask: IcePop)", read_if=WEIGHTS_ROWS)
    threshold: AtLeastOne = key(2.0, "largest weight", read_if=WEIGHTS_ROWS)
    threshold_lower: PositiveFloat | None = key(None, "smallest weight; null = none (truncate), 1 / threshold (mask)", read_if=WEIGHTS_ROWS)
    normalize: StrictBool = key(False, "divide the weights by their mean over the batch", read_if=WEIGHTS_ROWS)
    reject: Annotated[dict[Rejection, PositiveFloat | Bounds], AfterValidator(check_rejections)] = key({}, "reject tokens (token_*) or responses (seq_*) whose divergence between engine and trainer passes a bound, such as {seq_mean_k1: [0.999, 1.001], token_k3: 0.1}. k1 is the log of pi_engine / pi_trainer; its bounds are two of that ratio, or u for 1 / u and u. k2 = k1^2 / 2 and k3 = e^-k1 - 1 + k1 take the largest. sum, mean and max are over a response. Names: " + ", ".join(get_args(Rejection)))
    reject_geometric: Bounds | None = key(None, "reject responses whose geometric-mean ratio is outside, such as [0.999, 1.001]; null = off")
    veto_threshold: OpenFraction | None = key(None, "reject responses with a token whose ratio is below this, such as 1e-4; null = off")

    @property
    def is_on(self) -> bool:
        """True if rows get weights. Metrics are computed in any case."""
        rejects = self.reject or self.reject_geometric is not None or self.veto_threshold is not None
        return self.level != "none" or bool(rejects)


class FilterGroups(Section):
    enable: StrictBool = key(False, "train on groups whose scores differ, and draw further prompts to replace the others (DAPO's dynamic sampling)")
    metric: str = key("score", "number that must differ among the responses to a prompt: score, or the name of one that the reward function returns beside it", read_if=FILTERS)
    max_num_gen_batches: Positive = key(10, "batches of prompts that a step may draw; then the first groups without a difference fill the batch", read_if=FILTERS)


class Algorithm(Section):
    method_key, methods = "adv_estimator", ESTIMATORS
    rules = (
        KeyRule(
            lambda algorithm: algorithm.mask_truncated and algorithm.bootstrap_truncated,
            "algorithm.mask_truncated and algorithm.bootstrap_truncated are both true: drop one",
        ),
        KeyRule(
            lambda algorithm: algorithm.method.needs_score_components and algorithm.use_kl_in_reward,
            "algorithm.use_kl_in_reward true has no effect, as algorithm.adv_estimator {adv_estimator} takes the scores "
            "one by one, not their sum: set it to false (actor.use_kl_loss true is the KL beside it)",
        ),
    )

    preset: Literal["verl", "slime", "miles", "openrlhf", "nemo_rl"] | None = key(None, "numerical conventions of another system (whitening, clamps, KL gradient, KL in the reward with a baseline, factor of the value loss, averaging); null = megappo's")
    adv_estimator: Annotated[str, OneOf(ESTIMATORS)] = key("gae", f"advantage estimator; only {_WITH_VALUES} needs a critic")
    gamma: Fraction = key(1.0, "discount per token", usual=Usual(0.9, 1, "a reward is forgotten within some tokens"))
    lam: Fraction = key(1.0, "GAE's lambda")
    lam_alpha: PositiveFloat | None = key(None, "length-adaptive lambda of the actor, 1 - 1 / (lam_alpha x response tokens), in place of lam (VAPO: 0.05); null = off", read_if=HAS_VALUES)
    critic_lam: Fraction | None = key(None, "lambda of the critic's returns (decoupled GAE); null = lam", read_if=HAS_VALUES)
    gae_level: Literal["token", "turn"] = key("token", "gae: unit of action. turn: each turn of an episode has one reward, value and advantage, and gamma and lam are per turn")
    bootstrap_truncated: StrictBool = key(False, "take the critic's value, instead of 0, for the future of a truncated response", read_if=HAS_VALUES)
    mask_truncated: StrictBool = key(False, "leave truncated responses, and episodes that did not end, out of losses and advantages, and with them the last response of a group whose responses are compared (DAPO's overlong filtering)")
    norm_adv_by_std_in_grpo: StrictBool = key(True, "grpo: divide by the group's standard deviation; false = Dr. GRPO")
    whiten_advantages: StrictBool | None = key(None, f"shift and scale advantages to mean 0, variance 1 over all response tokens of a step; null = for {_WHITENING}")
    advantages_clip: PositiveFloat | None = key(None, "clip advantages to +- this, after whitening; null = off")
    use_kl_in_reward: StrictBool = key(True, "subtract kl_coef x KL(policy, reference) from each token's reward; builds a reference")
    kl_penalty: KLKind = key("k1", "KL estimator of that penalty", read_if=KL_IN_REWARD)
    kl_ctrl: KLCtrl = key(KLCtrl(), "KL coefficient", read_if=KL_IN_REWARD)
    rollout_correction: RolloutCorrection = key(RolloutCorrection(), "weights that correct for the mismatch between engine and trainer")
    filter_groups: FilterGroups = key(FilterGroups(), "which groups of responses a step trains on")
    shared_backbone: StrictBool = key(False, "gae: one model with a policy head and a value head instead of a separate critic; the critic's value_clip, huber_delta and loss_agg_mode still apply", read_if=HAS_VALUES)
    value_coef: NonNegativeFloat = key(0.5, "shared_backbone: weight of the value loss in the combined loss", read_if=ONE_BACKBONE)

    @property
    def method(self) -> Estimator:
        """Entry of adv_estimator: what it reads and needs."""
        return ESTIMATORS[self.adv_estimator]

"""The keys of advantages, the KL to the reference, the mismatch between engine and trainer, and dynamic sampling."""

from typing import Annotated, Literal, get_args

from pydantic import Field

from megappo.config.conditions import HAS_VALUES, ReadIf
from megappo.config.kinds import (
    Fraction,
    KLKind,
    NonNegativeFloat,
    OneOf,
    OpenFraction,
    Positive,
    PositiveFloat,
    Rejection,
    Tokens,
)
from megappo.config.methods import ESTIMATORS, Estimator
from megappo.config.section import Section

_WHITENING = ", ".join(name for name, method in ESTIMATORS.items() if method.whitens)
_WITH_VALUES = ", ".join(name for name, method in ESTIMATORS.items() if method.needs_values)


class KLCtrl(Section):
    read_if = (
        ReadIf("horizon target_kl", "algorithm.kl_ctrl.type"),
    )

    type: Literal["fixed", "adaptive"] = Field("fixed", description="keep kl_coef, or steer it towards target_kl")
    kl_coef: NonNegativeFloat = Field(0.001, description="weight of the KL penalty in the reward")
    horizon: Tokens = Field(10000, description="adaptive: responses over which the coefficient adapts")
    target_kl: PositiveFloat = Field(0.1, description="adaptive: KL per response token to hold")


class RolloutCorrection(Section):
    read_if = (
        ReadIf("mode threshold threshold_lower normalize", "algorithm.rollout_correction.level"),
    )

    level: Literal["none", "token", "sequence", "geometric"] = Field("none", description="importance weights pi_trainer / pi_engine by token, response (product) or response (geometric mean)")
    mode: Literal["truncate", "mask"] = Field("truncate", description="beyond the thresholds: bound the weight (TIS), or make it 0 (IcePop)")
    threshold: Annotated[float, Field(ge=1)] = Field(2.0, description="largest weight")
    threshold_lower: PositiveFloat | None = Field(None, description="smallest weight; null = none (truncate), 1 / threshold (mask)")
    normalize: bool = Field(False, description="divide the weights by their mean over the batch")
    reject: dict[Rejection, PositiveFloat | tuple[PositiveFloat, PositiveFloat]] = Field({}, description="give tokens (token_*) or responses (seq_*) weight 0 whose divergence of engine and trainer passes a bound, such as {seq_mean_k1: [0.999, 1.001], token_k3: 0.1}: k1 is the log of pi_engine / pi_trainer and takes two bounds of that ratio, or u for 1 / u and u; k2 = k1^2 / 2 and k3 = e^-k1 - 1 + k1 take the largest; sum, mean and max are over a response; names: " + ", ".join(get_args(Rejection)))
    reject_geometric: tuple[PositiveFloat, PositiveFloat] | None = Field(None, description="reject responses whose geometric-mean ratio lies outside, such as [0.999, 1.001]; null = off")
    veto_threshold: OpenFraction | None = Field(None, description="reject responses with a token whose ratio is below this, such as 1e-4; null = off")

    @property
    def is_on(self) -> bool:
        """Whether there are weights; the metrics are there in any case."""
        rejects = self.reject or self.reject_geometric is not None or self.veto_threshold is not None
        return self.level != "none" or bool(rejects)


class FilterGroups(Section):
    read_if = (
        ReadIf("metric max_num_gen_batches", "algorithm.filter_groups.enable"),
    )

    enable: bool = Field(False, description="train on groups whose scores differ, and take further prompts in place of the others (DAPO's dynamic sampling)")
    metric: str = Field("score", description="what is to differ among the responses to a prompt: score, or the name of a number that the reward function tells beside it")
    max_num_gen_batches: Positive = Field(10, description="batches of prompts that a step may take; then the first groups without a difference make up what lacks")


class Algorithm(Section):
    read_if = (
        HAS_VALUES,
        ReadIf("kl_penalty kl_ctrl", "algorithm.use_kl_in_reward"),
        ReadIf("value_coef", "algorithm.shared_backbone"),
    )

    preset: Literal["verl", "slime", "miles", "openrlhf", "nemo_rl"] | None = Field(None, description="numerical conventions of another system (whitening, clamps, KL gradient, KL in the reward with a baseline, value loss factor, averaging); null = megappo's")
    adv_estimator: Annotated[str, OneOf(ESTIMATORS)] = Field("gae", description=f"advantage estimator; all but {_WITH_VALUES} do without a critic")
    gamma: Fraction = Field(1.0, description="discount per token")
    lam: Fraction = Field(1.0, description="GAE's lambda")
    lam_alpha: PositiveFloat | None = Field(None, description="length-adaptive lambda of the actor, 1 - 1 / (lam_alpha x response tokens), in place of lam (VAPO: 0.05); null = off")
    critic_lam: Fraction | None = Field(None, description="lambda of the critic's returns (decoupled GAE); null = lam")
    gae_level: Literal["token", "turn"] = Field("token", description="gae: what is one action; turn: each turn of an episode has one reward, value and advantage, and gamma and lam are per turn")
    bootstrap_truncated: bool = Field(False, description="value a truncated response's future by the critic instead of 0")
    mask_truncated: bool = Field(False, description="leave truncated responses, and episodes that were not ended, out of losses and advantages; where the responses to a prompt are compared (by the estimator, or for reward.normalize group) also the only one that is left (DAPO's overlong filtering)")
    norm_adv_by_std_in_grpo: bool = Field(True, description="grpo: divide by the group's standard deviation; false = Dr. GRPO")
    whiten_advantages: bool | None = Field(None, description=f"shift and scale advantages to mean 0, variance 1 over all response tokens of a step; null = for {_WHITENING}")
    advantages_clip: PositiveFloat | None = Field(None, description="clip advantages to +- this, after whitening; null = off")
    use_kl_in_reward: bool = Field(True, description="subtract kl_coef x KL(policy, reference) from each token's reward; builds a reference")
    kl_penalty: KLKind = Field("k1", description="KL estimator of that penalty")
    kl_ctrl: KLCtrl = Field(KLCtrl(), description="KL coefficient")
    rollout_correction: RolloutCorrection = Field(RolloutCorrection(), description="weights against the mismatch between engine and trainer")
    filter_groups: FilterGroups = Field(FilterGroups(), description="which groups of responses a step trains on")
    shared_backbone: bool = Field(False, description="gae: one model with a policy and a value head instead of a separate critic; of the critic's keys only value_clip, huber_delta and loss_agg_mode are then read")
    value_coef: NonNegativeFloat = Field(0.5, description="shared_backbone: weight of the value loss in the combined loss")

    @property
    def method(self) -> Estimator:
        """What adv_estimator reads and needs."""
        return ESTIMATORS[self.adv_estimator]

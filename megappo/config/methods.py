"""Tables that extensions may add to: advantage estimators, policy losses, length penalties, transports of weights.

One entry per method; extensions may add to them until the config is read. The values of the config's keys, the checks
for keys that nothing reads, and the work of a step follow from these entries. This module does not import torch:
functions of this package are named here, and imported when they are called.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from megappo.table import Function, Table, resolved

CLIP_RANGE = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")


@dataclass(frozen=True)
class Method:
    """A method: a length penalty, or the part that estimators and policy losses share.

    Attributes:
        source: the function.
        reads: keys of its section of the config that only some methods of its kind use.
    """

    source: Function
    reads: tuple[str, ...] = ()

    @property
    def function(self) -> Callable[..., Any]:
        return resolved(self.source)


@dataclass(frozen=True)
class Estimator(Method):
    """An algorithm.adv_estimator. Its function takes some of the inputs of `megappo.ppo.advantages.estimate`.

    Attributes:
        needs_values: it needs values, from a critic or a shared backbone.
        compares_responses: it compares the responses to a prompt, so there must be several.
        needs_greedy_baseline: it needs the score of the greedy response to each prompt.
        needs_score_components: it takes the several scores of each response, not their sum.
        needs_old_log_probs: it takes the actor's log-probs before the step's first update.
        whitens: it whitens the advantages over the whole batch.
    """

    needs_values: bool = False
    compares_responses: bool = False
    needs_greedy_baseline: bool = False
    needs_score_components: bool = False
    needs_old_log_probs: bool = False
    whitens: bool = False


@dataclass(frozen=True)
class PolicyLoss(Method):
    """An actor.policy_loss. Its function takes `megappo.ppo.policy_losses.PolicyInputs` and the actor section.

    Attributes:
        loss_agg_mode: the averaging that belongs to the method, for a config that sets none.
        selection: a function as `megappo.ppo.covariance.select_for_clip_cov` that selects tokens of the whole
            mini-batch for special treatment by the loss. It takes a forward pass of its own.
        needs_engine_log_probs: it is defined by the ratio to the log-probs that sampled (algorithm.old_log_probs).
        needs_turns: it takes the turns of episodes.
    """

    loss_agg_mode: str | None = None
    selection: Function | None = None
    needs_engine_log_probs: bool = False
    needs_turns: bool = False

    @property
    def select(self) -> Callable[..., Any] | None:
        return None if self.selection is None else resolved(self.selection)


@dataclass(frozen=True)
class ValueLoss(Method):
    """A critic.value_loss. Its function takes `megappo.ppo.value_losses.ValueInputs` and the critic section.

    Attributes:
        outputs: meaning of the value head's outputs: the value; logits of critic.value_bins classes, whose centers are
            spaced evenly over critic.value_range; or critic.value_bins quantiles.
    """

    outputs: Literal["value", "classes", "quantiles"] = "value"


@dataclass(frozen=True)
class ValueSupport:
    """Meaning of the several outputs of a value head.

    Attributes:
        size: number of outputs.
        centers: values of the classes whose logits the outputs are; () for quantiles.
    """

    size: int
    centers: tuple[float, ...] = ()

    def __str__(self) -> str:
        if not self.centers:
            return f"{self.size} quantiles"
        return f"{self.size} classes from {self.centers[0]:g} to {self.centers[-1]:g}"


def in_words(support: ValueSupport | None) -> str:
    """Return the meaning of a value head's outputs; None stands for one output."""
    return "with one output" if support is None else f"of {support}"


ADVANTAGES = "megappo.ppo.advantages"
ESTIMATES = "megappo.ppo.estimators"
LOSSES = "megappo.ppo.policy_losses"
COVARIANCE = "megappo.ppo.covariance"
VALUES = "megappo.ppo.value_losses"

ESTIMATORS = Table(
    "advantage estimator",
    {
        "gae": Estimator(f"{ADVANTAGES}:gae", ("gamma", "lam", "gae_level"), needs_values=True, whitens=True),
        "grpo": Estimator(f"{ESTIMATES}:grpo", ("norm_adv_by_std_in_grpo",), compares_responses=True),
        "rloo": Estimator(f"{ESTIMATES}:rloo", compares_responses=True),
        "reinforce_plus_plus": Estimator(f"{ESTIMATES}:reinforce_plus_plus", ("gamma",), whitens=True),
        "reinforce_plus_plus_baseline": Estimator(
            f"{ESTIMATES}:reinforce_plus_plus_baseline", compares_responses=True, whitens=True
        ),
        "remax": Estimator(f"{ESTIMATES}:remax", needs_greedy_baseline=True),
        "opo": Estimator(f"{ESTIMATES}:opo", compares_responses=True),
        "gpg": Estimator(f"{ESTIMATES}:gpg", compares_responses=True),
        "grpo_passk": Estimator(f"{ESTIMATES}:grpo_passk", ("norm_adv_by_std_in_grpo",), compares_responses=True),
        "gdpo": Estimator(
            f"{ESTIMATES}:gdpo",
            ("norm_adv_by_std_in_grpo",),
            compares_responses=True,
            needs_score_components=True,
            whitens=True,
        ),
        "optimal_token_baseline": Estimator(
            f"{ESTIMATES}:optimal_token_baseline", compares_responses=True, needs_old_log_probs=True
        ),
    },
)
"""Estimators by algorithm.adv_estimator."""

SHAPING = "megappo.ppo.reward_shaping"
LENGTH_PENALTIES = Table(
    "length penalty",
    {
        "none": Method(f"{SHAPING}:no_penalty"),
        "overlong": Method(f"{SHAPING}:overlong_penalty", ("overlong_buffer", "length_penalty_factor")),
        "linear": Method(f"{SHAPING}:linear_penalty", ("length_penalty_factor",)),
    },
)
"""Penalties by reward.length_penalty: (response_lengths [B], max_response_length, reward section) -> addend [B]."""

BY_SEQUENCE = "seq-mean-token-mean"
POLICY_LOSSES = Table(
    "policy loss",
    {
        "clip": PolicyLoss(f"{LOSSES}:clip", (*CLIP_RANGE, "clip_ratio_c")),
        "gspo": PolicyLoss(f"{LOSSES}:gspo", CLIP_RANGE, BY_SEQUENCE),
        "clip_turn": PolicyLoss(f"{LOSSES}:clip_turn", CLIP_RANGE, needs_turns=True),
        "cispo": PolicyLoss(f"{LOSSES}:cispo", CLIP_RANGE),
        "sapo": PolicyLoss(f"{LOSSES}:sapo", ("tau_pos", "tau_neg"), BY_SEQUENCE),
        "gpg": PolicyLoss(f"{LOSSES}:gpg"),
        "clip_cov": PolicyLoss(
            f"{COVARIANCE}:clip_cov",
            (*CLIP_RANGE, "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"),
            selection=f"{COVARIANCE}:select_for_clip_cov",
        ),
        "kl_cov": PolicyLoss(
            f"{COVARIANCE}:kl_cov", ("kl_cov_ratio", "ppo_kl_coef"), selection=f"{COVARIANCE}:select_for_kl_cov"
        ),
        "gmpo": PolicyLoss(f"{LOSSES}:gmpo", CLIP_RANGE, BY_SEQUENCE),
        "dppo_tv": PolicyLoss(f"{LOSSES}:dppo_tv", (*CLIP_RANGE, "clip_ratio_c")),
        "dppo_kl": PolicyLoss(f"{LOSSES}:dppo_kl", (*CLIP_RANGE, "clip_ratio_c")),
        "dro": PolicyLoss(f"{LOSSES}:dro", ("dro_beta",)),
        "dis": PolicyLoss(f"{LOSSES}:dis", CLIP_RANGE, needs_engine_log_probs=True),
    },
)
"""Losses by actor.policy_loss."""

BINS = ("value_bins", "value_range")
VALUE_LOSSES = Table(
    "value loss",
    {
        "mse": ValueLoss(f"{VALUES}:mse", ("value_clip",)),
        "huber": ValueLoss(f"{VALUES}:huber", ("value_clip", "huber_delta")),
        "hl_gauss": ValueLoss(f"{VALUES}:hl_gauss", (*BINS, "hl_gauss_width"), "classes"),
        "two_hot": ValueLoss(f"{VALUES}:two_hot", BINS, "classes"),
        "quantile": ValueLoss(f"{VALUES}:quantile", ("value_bins", "huber_delta"), "quantiles"),
    },
)
"""Losses by critic.value_loss."""

GPU_BUCKET_BYTES, CPU_BUCKET_BYTES = 2 * 2**30, 128 * 2**20
"""rollout.sync.bucket_bytes where it is null."""


@dataclass(frozen=True)
class Transport:
    """A rollout.sync.transport.

    Attributes:
        engine_endpoint: class of the endpoint at an engine's owner, made from (Link, EngineClient): a Receiver if
            `sender` is set, else a Sender, as the owner then passes on its own weights.
        sender: class of the Sender on one of the actor's ranks, made from (Link), which serves all engines. None = each
            engine's owner must be one of the actor's ranks.
        needs_other_gpu: the sending rank must not be on the engine's GPUs, as both are in one NCCL group.
        each_stage: with `sender`: each pipeline stage of the actor has a Sender for its own tensors if all engines'
            transports allow it. `TensorSpec.sender_index` is then the index of a tensor's Sender in `Link.addresses`.
        each_rank: without `sender`, on GPUs: all of the engine's ranks make the endpoint if they are the actor's, so
            that each passes on the tensors on its own GPU. They have `Link.peers`; all but the owner get no client.
        adapters: entry for sending adapters alone to engines that have the other weights (actor.lora), all in one
            bucket. None = the transport cannot do that.
    """

    engine_endpoint: Function
    sender: Function | None = None
    needs_other_gpu: bool = False
    each_stage: bool = False
    each_rank: bool = False
    adapters: "Transport | None" = None


TRANSPORTS: Table[Transport] = Table(
    "transport",
    {
        "ipc": Transport(
            "megappo.sync.ipc:HandleSender",
            each_rank=True,
            adapters=Transport("megappo.sync.ipc:AdapterHandles", each_rank=True),
        ),
        "broadcast": Transport(
            "megappo.sync.broadcast:BroadcastReceiver",
            "megappo.sync.broadcast:BroadcastSender",
            needs_other_gpu=True,
            each_stage=True,
        ),
        "disk": Transport(
            "megappo.sync.disk:DiskReader",
            "megappo.sync.disk:DiskWriter",
            adapters=Transport("megappo.sync.disk:AdapterReader", "megappo.sync.disk:AdapterWriter"),
        ),
    },
)
"""Value of rollout.sync.transport -> its transport."""

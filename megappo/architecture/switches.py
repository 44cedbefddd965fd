"""What of the update can be on or off: kernels of the layers, messages that go while layers compute. One table decides,
of a model, its layout and the machine, and says why; nothing else does. Without torch.

Nothing here changes what is computed, but for rounding. What is not known to be right stays off and says so.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megappo.architecture.architecture import Architecture
from megappo.config.schema import Parallel

FLASH_HEAD_SIZE = 256
"""The largest that flash attention's kernels take."""


@dataclass(frozen=True)
class Setting:
    """Under what a component's model runs.

    Attributes:
        data: data-parallel shards.
        dtype: of the weights.
        is_trained: has gradients.
        on_gpu: CUDA is there.
        has_te: its layers are TransformerEngine's.
        has_varlen: torch has the attention of packs that torch's layers call.
    """

    architecture: Architecture
    parallel: Parallel
    data: int
    dtype: str
    is_trained: bool
    on_gpu: bool
    has_te: bool
    has_varlen: bool = True


class Need(NamedTuple):
    """What a switch cannot be on without, and why it is off where that lacks."""

    is_met: Callable[[Setting], bool]
    why_off: str


@dataclass(frozen=True)
class Switch:
    """Something that is on wherever all of its needs are met.

    Attributes:
        name: TransformerConfig's or DistributedDataParallelConfig's field, or our own name for it.
        gain: why it is on.
        concerns: whether it is about such a model and layout at all, on whatever machine.
        needs: in the order in which the first that lacks is told.
    """

    name: str
    gain: str
    concerns: Callable[[Setting], bool]
    needs: tuple[Need, ...]

    def why_off(self, setting: Setting) -> str:
        """ "" where it is on."""
        return next((need.why_off for need in self.needs if not need.is_met(setting)), "")


class Decision(NamedTuple):
    """What became of a switch, and why."""

    name: str
    is_on: bool
    reason: str


GPU = Need(lambda on: on.on_gpu, "there is no GPU")
TE = Need(lambda on: on.has_te, "the layers are torch's, not TransformerEngine's")


def _always(setting: Setting) -> bool:
    return True


def _has_experts(setting: Setting) -> bool:
    return setting.architecture.experts is not None


def _reduces(setting: Setting) -> bool:
    """Whether several ranks have a part of the same gradient."""
    return setting.is_trained and setting.data * setting.parallel.context > 1


def _fits_flash(setting: Setting) -> bool:
    return setting.architecture.head_size % 8 == 0 and setting.architecture.head_size <= FLASH_HEAD_SIZE


LAYERS = (
    Switch(
        "apply_rope_fusion",
        "one kernel rotates queries, one keys",
        concerns=_always,
        needs=(TE, Need(lambda on: on.architecture.latent is None, "latent attention's kernel rotates by YaRN alone")),
    ),
    Switch("bias_activation_fusion", "one kernel computes an MLP's activation", concerns=_always, needs=(TE,)),
    Switch(
        "moe_grouped_gemm",
        "one kernel multiplies by the weights of all experts",
        concerns=_has_experts,
        needs=(TE, Need(lambda on: on.parallel.expert_tensor == 1, "not known to be right where experts are cut")),
    ),
    Switch("moe_permute_fusion", "one kernel sorts tokens by expert", concerns=_has_experts, needs=(TE,)),
    Switch(
        "use_te_activation_func",
        "stands for the torch layers' own activation, which passes over memory few times",
        concerns=lambda on: not on.has_te,
        needs=(),
    ),
)
"""Fields of TransformerConfig. What is not among them stays off: fusions with biases and dropout, of which there are
none, and of what attention keeps no more."""
OWN = (
    Switch(
        "gradient_accumulation_fusion",
        "TransformerEngine's products add up to the weights' gradients where these are kept",
        concerns=lambda on: on.is_trained and on.has_te,
        needs=(),
    ),
    Switch(
        "varlen_attn",
        "one kernel attends within all sequences of a pack",
        concerns=lambda on: not on.has_te,
        needs=(
            GPU,
            Need(lambda on: on.has_varlen, "this torch's takes no groups of heads"),
            Need(lambda on: on.dtype == "bf16", "flash attention takes no fp32"),
            Need(lambda on: on.architecture.latent is None, "flash attention takes no keys and values of unequal size"),
            Need(_fits_flash, f"flash attention takes heads of a multiple of 8 up to {FLASH_HEAD_SIZE} only"),
            Need(lambda on: on.parallel.context == 1, "context parallelism attends to a part of each sequence"),
        ),
    ),
    Switch(
        "known_shapes",
        "stages need not tell each other the shapes of what they send",
        concerns=lambda on: on.parallel.pipeline > 1,
        needs=(
            Need(lambda on: on.parallel.virtual_pipeline == 1, "virtual stages take micro-batches in another order"),
        ),
    ),
    Switch(
        "pinned_copies",
        "micro-batches are copied while the GPU computes",
        concerns=_always,
        needs=(GPU,),
    ),
)
"""Read by our own code."""
REDUCTION = (
    Switch(
        "overlap_grad_reduce",
        "gradients are summed over ranks while earlier layers compute theirs",
        concerns=_reduces,
        needs=(GPU,),
    ),
    Switch(
        "overlap_param_gather",
        "weights are gathered from their ranks while later layers wait for theirs",
        concerns=_reduces,
        needs=(Need(lambda on: False, "all that reads weights would have to wait: not tried on a GPU yet"),),
    ),
)
"""Fields of DistributedDataParallelConfig."""
SWITCHES = (*LAYERS, *OWN, *REDUCTION)


def decide(setting: Setting) -> frozenset[str]:
    """The names of what is on."""
    return frozenset(one.name for one in SWITCHES if one.concerns(setting) and not one.why_off(setting))


def decisions(setting: Setting) -> Iterator[Decision]:
    """What is to be said of those that concern the model and its layout."""
    for one in SWITCHES:
        if one.concerns(setting):
            why_off = one.why_off(setting)
            yield Decision(one.name, not why_off, why_off or one.gain)

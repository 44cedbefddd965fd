"""Switches of an update: kernels of the layers, and messages that go while layers compute. One table decides from a
model, its layout and the machine, and gives the reason. Without torch.

Switches change the rounding of results only. One that is not known to be right stays off, with that reason.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megappo.architecture.architecture import Architecture
from megappo.config.schema import Parallel

FLASH_HEAD_SIZE = 256
"""The largest that flash attention's kernels take."""


@dataclass(frozen=True)
class SwitchContext:
    """The model, layout and machine of a component, by which switches are decided.

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
    """A condition of a switch, and the reason for which it is off where the condition is not met."""

    is_met: Callable[[SwitchContext], bool]
    why_off: str


@dataclass(frozen=True)
class Switch:
    """Something that is on wherever all of its needs are met.

    Attributes:
        name: TransformerConfig's or DistributedDataParallelConfig's field, or our own name for it.
        gain: why it is on.
        needs: the reason for which it is off is the first that is not met.
        concerns: it has a meaning for such a model and layout, on any machine.
    """

    name: str
    gain: str
    needs: tuple[Need, ...] = ()
    concerns: Callable[[SwitchContext], bool] = lambda context: True


class Decision(NamedTuple):
    """State of a switch, and the reason."""

    name: str
    is_on: bool
    reason: str


GPU = Need(lambda on: on.on_gpu, "there is no GPU")
TE = Need(lambda on: on.has_te, "the layers are torch's, not TransformerEngine's")


def _has_experts(context: SwitchContext) -> bool:
    return context.architecture.experts is not None


def _reduces(context: SwitchContext) -> bool:
    """Several ranks have a part of the same gradient."""
    return context.is_trained and context.data * context.parallel.context > 1


def _fits_flash(context: SwitchContext) -> bool:
    return context.architecture.head_size % 8 == 0 and context.architecture.head_size <= FLASH_HEAD_SIZE


LAYERS = (
    Switch(
        "apply_rope_fusion",
        "one kernel rotates queries, one keys",
        needs=(TE, Need(lambda on: on.architecture.latent is None, "latent attention's kernel rotates by YaRN alone")),
    ),
    Switch("bias_activation_fusion", "one kernel computes an MLP's activation", needs=(TE,)),
    Switch(
        "moe_grouped_gemm",
        "one kernel multiplies by the weights of all experts",
        concerns=_has_experts,
        needs=(TE, Need(lambda on: on.parallel.expert_tensor == 1, "not known to be right where experts are cut")),
    ),
    Switch("moe_permute_fusion", "one kernel sorts tokens by expert", concerns=_has_experts, needs=(TE,)),
    Switch(
        "use_te_activation_func",
        "the torch layers' own activation, which passes over memory few times",
        concerns=lambda on: not on.has_te,
    ),
)
"""Fields of TransformerConfig. Others stay off: fusions with biases and dropout, of which there are
none, and in attention, which keeps no scores."""
OWN = (
    Switch(
        "gradient_accumulation_fusion",
        "TransformerEngine's products add up to the weights' gradients where these are kept",
        concerns=lambda on: on.is_trained and on.has_te,
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
        "stages need not send each other the shapes of their messages",
        concerns=lambda on: on.parallel.pipeline > 1,
        needs=(
            Need(lambda on: on.parallel.virtual_pipeline == 1, "virtual stages take micro-batches in another order"),
        ),
    ),
    Switch(
        "pinned_copies",
        "micro-batches are copied while the GPU computes",
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


def decide(context: SwitchContext) -> frozenset[str]:
    """Return the names of the switches that are on."""
    return frozenset(decision.name for decision in decisions(context) if decision.is_on)


def decisions(context: SwitchContext) -> Iterator[Decision]:
    """Decide the switches that concern the model and its layout."""
    for switch in SWITCHES:
        if switch.concerns(context):
            why_off = next((need.why_off for need in switch.needs if not need.is_met(context)), None)
            yield Decision(switch.name, why_off is None, why_off or switch.gain)

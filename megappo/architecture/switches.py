"""Switches of an update: kernels of the layers, and messages that go while layers compute. One function decides from a
model, its layout and the machine, and gives the reason. Without torch.

Switches change the rounding of results only. One that is not known to be right stays off, with that reason.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megappo.architecture.architecture import Architecture
from megappo.config.sections import Parallel

FLASH_HEAD_SIZE = 256
"""The largest that flash attention's kernels take."""
CUDNN_PACKS = (90, 120)
"""Range of compute capabilities, times ten, without its end, in which TransformerEngine's cuDNN attention takes packed
rows.

Source: TransformerEngine 2.11.0, fused_attn.cpp (nvte_get_fused_attn_backend), dot_product_attention/utils.py."""
CUDNN_HEAD_SIZE, CUDNN_LATENT_SIZES = 128, (192, 128)
"""Largest head size that it trains on all of these GPUs (9.0 has no limit), and a pair of query and value sizes that
newer GPUs take as well."""
LAYERS = (
    *("apply_rope_fusion", "bias_activation_fusion", "moe_grouped_gemm", "moe_permute_fusion"),
    "use_te_activation_func",
)
"""Fields of TransformerConfig. Others stay off: fusions with biases and dropout, of which there are none, and in
attention, which keeps no scores."""
OWN = ("gradient_accumulation_fusion", "varlen_attn", "delta_rule_kernel", "known_shapes", "pinned_copies")
"""Read by our own code."""
REDUCTION = ("overlap_grad_reduce", "overlap_param_gather")
"""Fields of DistributedDataParallelConfig."""


@dataclass(frozen=True)
class SwitchContext:
    """The model, layout and machine of a component, by which switches are decided.

    Attributes:
        data: data-parallel shards.
        dtype: dtype of the weights.
        is_trained: has gradients.
        capability: compute capability of its GPU, times ten; None without a GPU.
        has_te: its layers are TransformerEngine's.
        has_varlen: torch has the attention of packs that torch's layers call.
        has_fla: the package fla-core is there.
    """

    architecture: Architecture
    parallel: Parallel
    data: int
    dtype: str
    is_trained: bool
    capability: int | None
    has_te: bool
    has_varlen: bool = True
    has_fla: bool = False

    @property
    def no_gpu(self) -> str:
        """Reason for a switch that needs a GPU to be off; "" with a GPU."""
        return "" if self.capability else "there is no GPU"


class Decision(NamedTuple):
    """State of a switch, and the reason."""

    name: str
    is_on: bool
    reason: str


def decide(context: SwitchContext) -> frozenset[str]:
    """Return the names of the switches that are on."""
    return frozenset(decision.name for decision in decisions(context) if decision.is_on)


def decisions(context: SwitchContext) -> Iterator[Decision]:
    """Decide the switches that have a meaning for the model and its layout, on any machine."""
    for name, gain, why_off in (*_of_layers(context), *_of_our_own(context), *_of_reduction(context)):
        yield Decision(name, not why_off, why_off or gain)


def te_fault(
    architecture: Architecture,
    parallel: Parallel,
    dtype: str,
    capability: int | None,
) -> str:
    """Return what of a model, in its layout, TransformerEngine cannot compute; "" if it can.

    Without a kernel for packed rows, TransformerEngine 2.11.0 would not fail, but pad them and keep the scores of all
    heads, longest row times longest row.

    Args:
        capability: compute capability of the GPU, times ten; None if it is unknown: then the dtype is not read, either.
    """
    if any(architecture.windows) and parallel.context > 1:
        return "a sliding window with context parallelism"
    if architecture.family.sinks:
        return "attention sinks of packed rows"  # dot_product_attention/utils.py, get_attention_backend
    if architecture.full_heads:
        return "layers with different heads"
    if capability is None:
        return ""
    if dtype == "fp32":
        return "attention of packed rows in fp32"
    if not CUDNN_PACKS[0] <= capability < CUDNN_PACKS[1]:
        return f"attention of packed rows on GPUs of compute capability {capability / 10}"
    sizes = architecture.attention_sizes
    if max(sizes) > CUDNN_HEAD_SIZE and capability != CUDNN_PACKS[0] and sizes != CUDNN_LATENT_SIZES:
        return f"attention of packed rows with heads of {max(sizes)} on GPUs of compute capability {capability / 10}"
    return ""


def te_refusal(fault: str) -> str:
    """Return the error for layers of TransformerEngine that cannot compute a model.

    Args:
        fault: what they cannot compute, see `te_fault`.
    """
    return (
        f"model.layer_spec: TransformerEngine does not compute {fault}: set it to auto, which then takes the layers of "
        "torch"
    )


Reasons = Iterator[tuple[str, str, str]]
"""Name of a switch, what it gains, and why it is off: "" where it is on."""


def _of_layers(context: SwitchContext) -> Reasons:
    fault = te_fault(context.architecture, context.parallel, context.dtype, context.capability)
    why_torch = f", which does not compute {fault}" if fault else ""
    no_te = "" if context.has_te else f"the layers are torch's, not TransformerEngine's{why_torch}"
    family = context.architecture.family
    unrotated = "latent attention's kernel rotates by YaRN alone" if family.latent_attention else ""
    if family.rope_interleaved:  # megatron-core 0.16.1, rope_utils.py: it takes no `interleaved`
        unrotated = "the kernel for packs rotates halves of a head, not neighbours"
    elif context.architecture.vision:
        unrotated = "the kernel for packs knows no positions of images"
    elif context.architecture.rope.scales_part:
        unrotated = "the kernel for packs scales no cosines and sines"
    are_cut = "not known to be right where experts are cut" if context.parallel.expert_tensor > 1 else ""
    yield "apply_rope_fusion", "one kernel rotates queries, one keys", no_te or unrotated
    other = "" if family.activation == "silu" else "Megatron has no kernel of this activation"
    yield "bias_activation_fusion", "one kernel computes an MLP's activation", no_te or other
    if context.architecture.experts is not None:
        yield "moe_grouped_gemm", "one kernel multiplies by the weights of all experts", no_te or are_cut
        yield "moe_permute_fusion", "one kernel sorts tokens by expert", no_te
    if not context.has_te:
        yield "use_te_activation_func", "the torch layers' own activation, which passes over memory few times", other


def _of_our_own(context: SwitchContext) -> Reasons:
    no_gpu = context.no_gpu
    is_virtual = "virtual stages take micro-batches in another order" if context.parallel.virtual_pipeline > 1 else ""
    if context.is_trained and context.has_te:
        gain = "TransformerEngine's matrix products add directly to the weights' gradients"
        yield "gradient_accumulation_fusion", gain, ""
    if not context.has_te:
        yield "varlen_attn", "one kernel attends within all sequences of a pack", no_gpu or _no_varlen(context)
    if context.architecture.linear:
        why_off = no_gpu or ("" if context.has_fla else "the package fla-core is not installed")
        yield "delta_rule_kernel", "kernels of fla-core compute linear attention", why_off
    if context.parallel.pipeline > 1:
        yield "known_shapes", "stages need not send each other the shapes of their messages", is_virtual
    yield "pinned_copies", "micro-batches are copied while the GPU computes", no_gpu


def _no_varlen(context: SwitchContext) -> str:
    """Return why flash attention's kernel for packs does not serve a model on a GPU; "" where it does."""
    head_size = context.architecture.head_size
    if not context.has_varlen:
        return "this torch version's varlen_attn takes no groups of heads"
    if context.architecture.family.sinks:
        return "flash attention has no attention sinks"
    if context.dtype != "bf16":
        return "flash attention does not take fp32"
    if context.architecture.latent is not None:
        return "flash attention needs keys and values of the same size"
    if head_size % 8 or head_size > FLASH_HEAD_SIZE:
        return f"flash attention needs a head size that is a multiple of 8, at most {FLASH_HEAD_SIZE}"
    return "context parallelism attends to a part of each sequence" if context.parallel.context > 1 else ""


def _of_reduction(context: SwitchContext) -> Reasons:
    if not context.is_trained or context.data * context.parallel.context == 1:  # no rank has the same weights
        return
    gain = "gradients are summed over ranks while earlier layers compute theirs"
    yield "overlap_grad_reduce", gain, context.no_gpu
    untried = "everything that reads weights would have to wait: not tried on a GPU yet"
    yield "overlap_param_gather", "weights are gathered from their ranks while later layers wait for theirs", untried

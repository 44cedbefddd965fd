"""Models of a run: their parameters in any layout, and the bytes that one takes on its ranks and on their hosts.

The estimates are for TransformerEngine's layers, whose attention keeps no scores, with full micro-batches.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from math import prod

from megappo.architecture.architecture import DELTA_CHUNK, DTYPES, Architecture
from megappo.architecture.families import HeadKind
from megappo.architecture.flops import Flops, flops_of
from megappo.architecture.model_folder import shape_folder
from megappo.architecture.parameters import (
    LOGITS_AT_A_TIME,
    StageSize,
    expert_stacks,
    hf_tensors_of,
    list_parameters,
    padded_vocab_size,
    stage_of_layers,
    stage_sizes,
    tower_size,
)
from megappo.architecture.parsing import read_architecture
from megappo.config.methods import ValueSupport
from megappo.config.model_sections import Learner, Lora, Optim
from megappo.config.sections import Parallel
from megappo.config.values import ParameterGroup, TensorKind
from megappo.placement.components import ComponentSpec
from megappo.placement.layout import Layout
from megappo.placement.run_plan import BatchSplit

FP32_COPIES = 3
"""Memory for a chunk of logits, in fp32 copies of it: logits, probabilities, and both in the weights' dtype."""
INNER_COPIES = {"silu": 3, "gelu_pytorch_tanh": 4, "quick_gelu": 8}
"""Memory that an MLP keeps for its backward pass, in inner sizes, by its activation: gate, up and their product; GELU
of the gate; with quick GELU both cut off, its sigmoid, the offset, and the product as weighted by the router."""

TOWER_COPIES = 16
"""Assumed: tensors as wide as hidden states that a block of a vision tower holds at a time, its MLP's and pixels."""
KEY_COPIES, VALUE_COPIES, CHUNK_SQUARES = 8, 6, 5
"""Copies in fp32 that linear attention in torch keeps of all heads' keys (queries, keys, with their scales), of their
values, and of the squares of a chunk's tokens."""


class Shape:
    """A model with a head, in any layout. `stages(parallel, ...)` returns its `stage_sizes`."""

    def __init__(self, architecture: Architecture):
        self.architecture = architecture
        self.stages = cache(partial(stage_sizes, architecture))

    @cached_property
    def flops(self) -> Flops:
        return flops_of(self.architecture)

    @property
    def size(self) -> int:
        """Parameters of the whole model."""
        return sum(self.stages(Parallel())[0]) + self.tower

    @cached_property
    def tower(self) -> int:
        """Parameters of its vision tower, 0 without one."""
        return tower_size(self.architecture)

    @cached_property
    def largest_tensor(self) -> int:
        """Numbers in the largest tensor that an engine takes whole: a matrix, or all experts of a layer in a stack."""
        tensors = hf_tensors_of(list_parameters(self.architecture, num_experts=1)) | expert_stacks(self.architecture)
        return max(prod(tensor.shape) for tensor in tensors.values())

    @property
    def expert_share(self) -> float:
        """Share of the parameters that experts have."""
        return self.stages(Parallel())[0].experts / self.size


def read_shape(
    folder: str,
    head: HeadKind = "policy",
    lora: Lora | None = None,
    frozen: tuple[ParameterGroup, ...] = (),
    support: ValueSupport | None = None,
) -> Shape:
    """Return the shape of a folder's model, or the one that ships where it is missing, with a head, adapters and frozen
    parameters."""
    architecture = read_architecture(shape_folder(folder), head).with_lora(lora).with_frozen(frozen)
    return Shape(replace(architecture, support=support))


class Shapes:
    """The models of a run's folders, each read once. `at` takes the arguments of `read_shape`."""

    def __init__(self) -> None:
        self.at = cache(read_shape)

    def of(self, spec: ComponentSpec) -> Shape:
        """Return the shape of a component."""
        return self.at(spec.folder.value, spec.head, spec.lora, spec.frozen, spec.support)


@dataclass(frozen=True)
class PlacedModel:
    """A model on its ranks. `stage` is the number of a pipeline stage.

    Attributes:
        dtype: dtype of the weights.
    """

    spec: ComponentSpec
    layout: Layout
    shape: Shape
    split: BatchSplit
    dtype: str

    @property
    def parallel(self) -> Parallel:
        """The layout as the config has it."""
        return self.spec.parallel.value

    @property
    def settings(self) -> Learner | None:
        """The config's section of a trained model."""
        return self.spec.training.settings if self.spec.training else None

    @property
    def nbytes(self) -> int:
        """Bytes of a weight."""
        return DTYPES[self.dtype].nbytes

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on a rank."""
        return self.spec.max_tokens.value / self.parallel.context

    def states(self, stage: int) -> dict[TensorKind, float]:
        """Return the bytes that a rank keeps from step to step."""
        size = self.shape.stages(self.parallel, beside_base=self.spec.base is not None)[stage]
        optim = self.settings.optim if self.settings else None
        return state_bytes(size, self._trained(stage), self.layout, self.dtype, optim)

    def on_host(self, stage: int) -> float:
        """Return the bytes of optimizer states that a rank has in host memory, by offload_fraction."""
        if self.settings is None:
            return 0.0
        optim = self.settings.optim
        return optim.offload_fraction * optimizer_bytes(self._trained(stage), self.layout, self.dtype, optim)

    def _trained(self, stage: int) -> StageSize:
        return self.shape.stages(self.parallel, trained=True)[stage]

    def copied(self, stage: int) -> dict[TensorKind, float]:
        """Return the part of the states that is offloaded to pinned host memory; gradients are freed instead."""
        kinds = set(self.spec.offload.value) - {"gradients"}
        return {kind: size for kind, size in self.states(stage).items() if kind in kinds}

    def activations(self, stage: int, *, trains: bool) -> float:
        """Return the bytes of a pass through a stage's layers. Without a backward pass it keeps one layer's bytes.

        With full recomputation only the input of each layer is kept, and one layer at a time is computed again;
        selective recomputation gains nothing where attention keeps no scores.
        """
        architecture = self.shape.architecture
        layers = []
        for layer, its_stage in enumerate(stage_of_layers(architecture, self.parallel)):
            if its_stage == stage:
                layers.append(self.tokens * self._layer_bytes(layer))
        largest = max(layers, default=0.0)
        if not trains:
            return largest
        in_flight = self._in_flight(stage)
        if self.settings is not None and self.settings.recompute == "full":
            layer_input = self.tokens * self.nbytes * architecture.hidden_size / self._sharing
            return in_flight * len(layers) * layer_input + largest
        return max(in_flight * sum(layers), largest)

    def tower(self, stage: int) -> float:
        """Return the bytes of a vision tower's weights on a rank of the first stage; 0 on others."""
        return 0 if stage else self.nbytes * self.shape.tower

    @property
    def feature_bytes(self) -> float:
        """Bytes of the features of an image's token."""
        vision = self.shape.architecture.vision
        return (1 + len(vision.deepstack_layers)) * self.shape.architecture.hidden_size * self.nbytes if vision else 0

    def images(self, stage: int, prompt_length: int) -> float:
        """Return the bytes that a pass takes for images: the tower, its activations for an image that fills a prompt,
        and features of a micro-batch of images alone."""
        vision = self.shape.architecture.vision
        if vision is None or stage:
            return 0.0
        block = TOWER_COPIES * self.nbytes * prompt_length * vision.sizes["merged_size"]
        return self.tower(stage) + block + self.tokens * self.feature_bytes

    def expert_activations(self, stage: int) -> float:
        """Return the part of an update's `activations` that grows with the tokens that a rank's experts get: 0 if each
        rank has all experts, which then get its own tokens."""
        experts = self.shape.architecture.experts
        if self.parallel.expert == 1 or experts is None:
            return 0.0
        one_more = replace(self.shape.architecture, experts=replace(experts, top_k=experts.top_k + 1))
        with_it = replace(self, shape=Shape(one_more)).activations(stage, trains=True)
        return experts.top_k * (with_it - self.activations(stage, trains=True))

    def _layer_bytes(self, layer: int) -> float:
        """Return the bytes that a layer keeps for its backward pass, per token that the rank holds of a micro-batch.

        These are inputs of norms, of attention and of the MLP (sharded over tensor-parallel ranks
        if `sequence` is on); queries, keys, values and the output of attention, and queries and keys before their
        norms, if any; gate, up and their product of the MLP, and GELU of the gate. A mixture of experts keeps its
        input, its output and the same three for each expert of a token, assuming that experts are chosen equally often.

        Linear attention keeps queries, keys and values before and after the convolution, in fp32 for all heads, what
        each chunk makes of them, and the state of each chunk.

        Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4,
        without attention's scores and dropout, for gated MLPs and fewer key-value heads.
        """
        architecture = self.shape.architecture
        heads = architecture.num_heads
        latent, linear = architecture.latent, architecture.linear
        experts = architecture.experts
        num_norms = sum(name is not None for name in architecture.family.norms)
        between = (2 + num_norms) * architecture.hidden_size  # what lies between the cut matrices
        in_fp32 = 4.0 * heads  # attention's: fp32
        if linear and architecture.is_linear(layer):
            cut = 2 * (2 * linear.keys + linear.values) + 3 * linear.values
            keys = linear.value_heads * linear.key_size
            in_fp32 = 4 * (KEY_COPIES * keys + VALUE_COPIES * linear.values + linear.state / DELTA_CHUNK)
            in_fp32 += 4 * CHUNK_SQUARES * linear.value_heads * DELTA_CHUNK
        elif latent:
            between += (latent.q_rank or 0) + latent.kv_rank
            cut = 2 * heads * (latent.plain_size + latent.rope_size + latent.v_size)
        else:
            own, copies = architecture.heads_of(layer), 3 if architecture.qk_layernorm else 2
            cut = copies * (heads + own.kv_heads) * own.size
            cut += 2 * heads * own.size if linear else 0  # output gates, and their product
            cut += own.kv_heads * own.size if architecture.family.value_norms else 0
        inner = INNER_COPIES[architecture.family.activation]
        if layer < architecture.num_dense_layers:
            cut += inner * architecture.ffn_size
        elif experts:
            in_and_out = 2 * architecture.hidden_size * self.parallel.expert_tensor
            between += experts.top_k * (in_and_out + inner * experts.ffn_size)
            cut += inner * (experts.shared_ffn_size or 0)
        return self.nbytes * (between / self._sharing + cut / self.parallel.tensor) + in_fp32 / self.parallel.tensor

    @property
    def _sharing(self) -> int:
        """Ranks that share the tokens between the blocks."""
        return self.parallel.tensor if self.parallel.sequence else 1

    def _in_flight(self, stage: int) -> float:
        """Return the most micro-batches whose activations a stage keeps at a time, counted in all of its layers.

        Source: Narayanan et al. 2021, section 2.2: one forward, one backward; Korthikanti et al. 2022, section 4.2.3,
        for several chunks on a stage, of which the first stage keeps 1 + (p - 1) / (p v) times as much.
        """
        stages = self.layout.pipeline
        chunks = self.layout.virtual_pipeline
        kept: float = stages - stage
        if chunks > 1:
            kept = (2 * (kept - 1) + (chunks - 1) * stages + 1) / chunks
        return min(kept, self.split.micro_batches[1])

    def head(self, response_share: float, *, trains: bool) -> float:
        """Return the bytes of a pass through a policy's head: hidden states of all tokens and a copy of the states that
        predict responses, with a gradient of each for the backward pass; the logits of a limited number of words at a
        time; and the weight's gradient, if the backward pass allocates one instead of adding to the buffer.

        Args:
            response_share: share of a row's tokens that predict a response.
        """
        hidden = self.shape.architecture.hidden_size
        predicting = self.tokens * response_share
        tensor = self.parallel.tensor
        words = padded_vocab_size(self.shape.architecture.vocab_size, tensor) / tensor
        states = hidden * (self.tokens + predicting) * self.nbytes
        copies = FP32_COPIES + (self.shape.architecture.logit_cap is not None)  # one more for the slope of the cap
        logits = min(predicting * words, LOGITS_AT_A_TIME["cuda"]) * 4 * copies
        if not trains:
            return states + logits
        nbytes = 2 * states + hidden * predicting * 4 + logits
        if self.spec.lora is None and self.layout.data * self.parallel.context > 1:
            nbytes += hidden * words * self.nbytes
        return nbytes

    def saved(self, gpus_per_node: int) -> dict[int, float]:
        """Return node -> bytes that a save copies there; none of a model that is not trained."""
        nodes: dict[int, float] = defaultdict(float)
        if self.settings is None:
            return nodes
        layout = self.layout
        trained = self.shape.stages(self.parallel, trained=True)
        written = trained if self.spec.lora else self.shape.stages(self.parallel)  # adapters are saved alone
        of_states = state_bytes_per_parameter("bf16", self.settings.optim)  # weights in fp32 are saved twice
        for ranks, *sizes in zip(layout.stages, trained, written, strict=True):
            states, weights = (size.dense * layout.tensor + size.experts * layout.expert_run for size in sizes)
            each = (of_states * states + self.nbytes * weights) / len(ranks)
            for rank in ranks:
                nodes[rank // gpus_per_node] += each
        return nodes


def state_bytes(
    size: StageSize, trained: StageSize, layout: Layout, dtype: str, optim: Optim | None
) -> dict[TensorKind, float]:
    """Return the bytes that a rank keeps of a model from step to step.

    A parameter has, in bytes, its weight of `dtype` (fp32 4, bf16 2), an fp32 gradient 4, and the optimizer's states,
    of which a share may be in host memory.

    Args:
        size: parameters of the rank's stage.
        trained: parameters of the stage that training changes.
        optim: None for a frozen model.
    Source: Megatron Core's developer guide, "Distributed Optimizer": bf16 6 + 12/d, fp32 8 + 8/d bytes per parameter.
    """
    states: dict[TensorKind, float] = {"weights": DTYPES[dtype].nbytes * sum(size)}
    if optim is not None:
        states["gradients"] = 4 * sum(trained)
        states["optimizer"] = (1 - optim.offload_fraction) * optimizer_bytes(trained, layout, dtype, optim)
    return states


def optimizer_bytes(trained: StageSize, layout: Layout, dtype: str, optim: Optim) -> float:
    """Return the bytes of a rank's optimizer states, on the device and in host memory. A distributed optimizer shards
    them over the ranks that hold the same parameters."""
    parameters: float = sum(trained)
    if optim.distributed:
        parameters = trained.dense / (layout.data * layout.context) + trained.experts / layout.expert_replicas
    return state_bytes_per_parameter(dtype, optim) * parameters


def state_bytes_per_parameter(dtype: str, optim: Optim) -> int:
    """Return the bytes of a parameter's two moments (fp32 4, bf16 2 each), and of its main parameter 4 where weights
    are in bf16."""
    return 2 * DTYPES[optim.moments_dtype].nbytes + (0 if dtype == "fp32" else 4)

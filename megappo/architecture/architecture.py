"""A model as its config.json describes it, see `parsing.read_architecture`; and number formats by their names."""

import re
from collections.abc import Mapping
from dataclasses import asdict, field, replace
from itertools import product
from math import log, sqrt
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from megappo.architecture.families import (
    LANGUAGE_MODEL,
    LINEAR_BLOCK,
    ORIGINAL,
    REWARD_MODELS,
    WITH_VISION,
    Family,
    HeadKind,
    RawValues,
)
from megappo.architecture.vision import Vision, text_values
from megappo.config.methods import ValueSupport
from megappo.config.model_sections import Lora
from megappo.config.values import ParameterGroup

_LABELS = ("id2label", "label2id")
SUPPORT_KEY = "value_support"
"""Key of config.json: a ValueSupport of the folder's value head."""
CHECKED = ConfigDict(strict=True, allow_inf_nan=False)
"""Values are of the declared types, or a pydantic.ValidationError names the other values."""
Size = Annotated[int, Field(ge=1, le=2**31 - 1)]
MOST_LAYERS = 10_000
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


class Dtype(NamedTuple):
    """A number format.

    Attributes:
        torch: its name in torch, in config.json and to SGLang.
        safetensors: its name in the header of a safetensors file.
        nbytes: bytes of one number.
    """

    torch: str
    safetensors: str
    nbytes: int


DTYPES = {
    "fp32": Dtype("float32", "F32", 4),
    "bf16": Dtype("bfloat16", "BF16", 2),
    "fp16": Dtype("float16", "F16", 2),
    "fp64": Dtype("float64", "F64", 8),
    "int32": Dtype("int32", "I32", 4),
    "int64": Dtype("int64", "I64", 8),
}
"""Models compute in one of the first two (`model.dtype`)."""
BY_SAFETENSORS = {dtype.safetensors: name for name, dtype in DTYPES.items()}
BY_TORCH = {dtype.torch: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: object) -> str:
    """Return the config's name of a torch dtype."""
    return BY_TORCH[str(dtype).removeprefix("torch.")]


DELTA_CHUNK = 64
"""Tokens that the delta rule of linear attention computes at a time, as the package `fla` does."""


def all_but_every(every: float, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer False if it is an `every`-th layer (numbered from 1), else True."""
    return tuple(number % every != 0 for number in range(1, min(num_layers, MOST_LAYERS) + 1))


def expert_number_bytes(num_experts: int, top_k: int) -> int:
    """Return the bytes in which rows hold the number of an expert, from 1. Where all `top_k` of a token are 0, its
    experts are unknown; so number 256 may be a 0 in one byte beside others."""
    return 1 if num_experts < 256 or (num_experts == 256 and top_k > 1) else 2


@dataclass(frozen=True, config=CHECKED)
class Experts:
    """A mixture of experts; every layer has one but the first `num_dense_layers`.

    Attributes:
        count: experts of a layer, of which each token goes to `top_k`.
        ffn_size: an expert's inner size; the shared expert's is `shared_ffn_size`, None without one.
        renormalizes: the chosen experts' probabilities are divided by their sum.
        scaling: then they are multiplied by this; None = not.
        groups: number of groups of experts, and how many of them a token reaches; None where it reaches all.
    """

    count: Size
    top_k: Size
    ffn_size: Size
    shared_ffn_size: Count | None
    num_dense_layers: Count
    renormalizes: bool
    scaling: float | None
    groups: tuple[Size, Size] | None


@dataclass(frozen=True, config=CHECKED)
class Heads:
    """Heads of a layer's attention.

    Attributes:
        size: numbers of a query, a key or a value of one head.
        kv_heads: number of heads of keys and values.
        keys_are_values: one matrix computes both; only the keys are then rotated and have norms with weights.
    """

    size: Size
    kv_heads: Size
    keys_are_values: bool = False


@dataclass(frozen=True, config=CHECKED)
class LatentAttention:
    """Sizes of latent vectors (`q_rank` None: queries have none) and of a head's parts: q and k without positions,
    their rotary part, v."""

    q_rank: Size | None
    kv_rank: Size
    plain_size: Size
    rope_size: Size
    v_size: Size


@dataclass(frozen=True, config=CHECKED)
class LinearAttention:
    """Sizes of linear attention by the gated delta rule. Each key head has as many value heads.

    Attributes:
        key_size, value_size: sizes of a head.
        kernel: tokens that the convolution of queries, keys and values reads.
        layers: for each layer, True where it has linear attention; the others have an output gate.
        full_interval: `full_attention_interval` of config.json, if it is there.
    """

    key_heads: Size
    value_heads: Size
    key_size: Size
    value_size: Size
    kernel: Size
    layers: tuple[bool, ...]
    full_interval: int | None

    @property
    def keys(self) -> int:
        """Numbers of all heads' keys."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """Numbers of all heads' values."""
        return self.value_heads * self.value_size

    @property
    def state(self) -> int:
        """Numbers in the state of a sequence."""
        return self.values * self.key_size


@dataclass(frozen=True, config=CHECKED)
class Rope:
    """Rotary positions.

    Attributes:
        base: base period.
        kind: kind of scaling.
        numbers: numbers of that kind, by their names in config.json.
        part: part of each head, from its beginning, that is rotated; latent attention names its own.
        divisors: what each frequency is divided by; () = nothing.
    """

    base: Positive
    kind: str
    numbers: Mapping[str, int | float]
    part: Annotated[float, Field(gt=0, le=1)] = 1.0
    divisors: tuple[Positive, ...] = ()

    @property
    def magnitude(self) -> float:
        """Factor of cosines and sines."""
        growth = log(max(self.numbers.get("factor", 1), 1))
        if self.kind == "longrope":
            return sqrt(1 + growth / log(self.numbers[ORIGINAL]))
        if self.kind != "yarn":
            return 1.0
        return (0.1 * self.numbers["mscale"] * growth + 1) / (0.1 * self.numbers["mscale_all_dim"] * growth + 1)

    @property
    def scales_part(self) -> bool:
        """True if only a part of each head has the factor, so that the scores cannot be multiplied by it instead."""
        return self.part < 1 and self.magnitude != 1


@dataclass(frozen=True, config=CHECKED)
class Scales:
    """Factors that a model multiplies by.

    Attributes:
        embedding: factor of embeddings.
        attention: factor of the products of queries and keys; None = 1 / sqrt(size of a head).
        blocks: factor of what attention and MLP add to the residual.
        logits: factor of logits.
    """

    embedding: Positive = 1.0
    attention: Positive | None = None
    blocks: Positive = 1.0
    logits: Positive = 1.0


@dataclass(frozen=True, config=CHECKED)
class Architecture:
    """A model, as its config.json describes it, and the head that is put on it.

    Attributes:
        name: name of the language model, a key of FAMILIES.
        named: the name in config.json: the same, or a reward model's.
        file: config.json.
        head_dim: size of a head, if it is not `hidden_size` / `num_heads`.
        ffn_size: inner size of the layers without experts.
        scales: factors in the layers and around them.
        tied: the output layer is the embedding.
        qkv_bias: queries, keys and values have a bias.
        qk_layernorm: queries and keys have norms.
        sliding_window: tokens that some layer attends to at most; None where nothing limits them.
        windows: for each layer, True where it attends to `sliding_window` tokens at most; () where `sliding_window` is
            a limit to rows instead, as nothing computes it.
        unrotated: for each layer, True where queries and keys have no rotary positions; () where all have them.
        local_rope_base: rotary base of the layers with a window; None = as in all layers.
        full_heads: heads of the layers without a window; None = as in all layers.
        logit_cap: cap * tanh(x / cap) replaces each logit x; None = no cap.
        vision: vision tower before the layers; None = text only.
        num_further_layers: layers after the last one, which predict further tokens and are not loaded.
        head: what reads the last hidden states.
        value_bias: a value head has a bias.
        support: meaning of a value head's outputs; None = one, the value.
        stored_support: meaning of the outputs of the folder's own value head, by its config.json.
        scores_rows: a value head scores a whole row, at its last token: it is exported as *ForSequenceClassification.
        lora: the adapters beside the matrices, which are trained instead of these.
        frozen: groups of parameters that are not trained.
        raw_config: all of config.json, to be written again.
    """

    name: str
    named: str
    family: Family
    file: Path
    hidden_size: Size
    num_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)]
    num_heads: Size
    num_kv_heads: Size
    head_dim: Size | None
    ffn_size: Size
    vocab_size: Size
    max_positions: Size
    norm_eps: Positive
    rope: Rope
    scales: Scales
    experts: Experts | None
    latent: LatentAttention | None
    linear: LinearAttention | None
    tied: bool
    qkv_bias: bool
    qk_layernorm: bool
    sliding_window: Size | None
    windows: tuple[bool, ...]
    unrotated: tuple[bool, ...]
    local_rope_base: Positive | None
    full_heads: Heads | None
    logit_cap: Positive | None
    vision: Vision | None
    num_further_layers: Count
    raw_config: RawValues = field(repr=False)
    head: HeadKind = "policy"
    value_bias: bool = False
    support: ValueSupport | None = None
    stored_support: ValueSupport | None = None
    scores_rows: bool = False
    lora: Lora | None = None
    frozen: tuple[ParameterGroup, ...] = ()

    @property
    def text_config(self) -> RawValues:
        """Keys of config.json about the language model, which may be nested."""
        return text_values(self.raw_config) if self.vision else self.raw_config

    @property
    def reads_images_as(self) -> tuple[Any, ...]:
        """Properties that models share if they read images in the same rows alike; () without a vision tower."""
        vision = self.vision
        if vision is None:
            return ()
        return self.family.vision, vision.image_token, vision.patch_size, vision.merge_size, vision.temporal_patch_size

    @property
    def choice_bytes(self) -> int:
        """Bytes in which rows hold the experts that a token goes to in all layers."""
        experts = self.experts
        if experts is None:
            return 0
        number_bytes = expert_number_bytes(experts.count, experts.top_k)
        return (self.num_layers - experts.num_dense_layers) * experts.top_k * number_bytes

    @property
    def is_reward_model(self) -> bool:
        """True if the folder is a reward model's, or a critic's."""
        return self.named.endswith(REWARD_MODELS)

    @property
    def scores_steps(self) -> bool:
        """True if a reward model of this kind scores the steps of a response, False if it scores the whole."""
        return self.named.endswith(REWARD_MODELS[0])

    @property
    def num_labels(self) -> int:
        """Numbers per token of a reward model's head, by config.json; it does not list transformers' default of 2."""
        return len(self.raw_config.get("id2label") or ()) or self.raw_config.get("num_labels") or 2

    @property
    def num_values(self) -> int:
        """Outputs of a value head."""
        return self.support.size if self.support else 1

    def takes_head(self, num_outputs: int) -> bool:
        """Return whether the folder's own value head, which has this number of outputs, fits this architecture."""
        return num_outputs == self.num_values and self.stored_support == self.support

    @property
    def pad_token(self) -> int | None:
        """The token behind a text that a reward model does not read; None if there is none."""
        return self.text_config.get("pad_token_id")

    @property
    def head_size(self) -> int:
        """Numbers of a head's queries and keys."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def attention_sizes(self) -> tuple[int, int]:
        """Size of a head's queries, and of its values."""
        latent = self.latent
        if latent is None:
            return self.head_size, self.head_size
        return latent.plain_size + latent.rope_size, latent.v_size

    def heads_of(self, layer: int) -> Heads:
        """Return the heads of a layer."""
        if self.full_heads and not self.windows[layer]:
            return self.full_heads
        return Heads(self.head_size, self.num_kv_heads)

    @property
    def row_limit(self) -> tuple[str, int]:
        """Key of config.json that limits the tokens of a row, windows aside, and the limit."""
        if self.rope.kind == "longrope":  # beyond it SGLang takes the long factors for all rows of a batch
            return ORIGINAL, int(self.rope.numbers[ORIGINAL])
        return "max_position_embeddings", self.max_positions

    @property
    def num_experts(self) -> int:
        """Experts of each layer that has them, 0 in a dense model."""
        return self.experts.count if self.experts else 0

    @property
    def num_dense_layers(self) -> int:
        """The first layers, which have no experts: all of a dense model's."""
        return self.experts.num_dense_layers if self.experts else self.num_layers

    @property
    def stacks(self) -> dict[str, list[str]]:
        """Names of the matrices that are stacked by rows in the files, by the name of the stack."""
        found = {}
        for layer, ((block, stack), parts) in product(range(self.num_layers), self.family.fused.items()):
            if block == LINEAR_BLOCK and not self.is_linear(layer):
                continue
            prefix = f"model.layers.{layer}.{block}."
            found[prefix + stack] = [prefix + part for part in parts]
        return found

    @property
    def num_linear_layers(self) -> int:
        """Layers with linear attention."""
        return sum(self.linear.layers) if self.linear else 0

    def is_linear(self, layer: int) -> bool:
        """Return whether a layer has linear attention."""
        return self.linear is not None and self.linear.layers[layer]

    @property
    def ties_output(self) -> bool:
        """True if the output layer is the embedding; a value head never is."""
        return self.tied and self.head != "value"

    def with_head(self, head: HeadKind) -> Self:
        """Return the same model under another head."""
        return replace(self, head=head)

    def with_padding(self, token: int | None) -> Self:
        """Return the architecture whose config.json names this padding token."""
        return replace(self, raw_config={**self.raw_config, "pad_token_id": token})

    def with_lora(self, lora: Lora | None) -> Self:
        """Return the same model with these adapters; None = without any."""
        return replace(self, lora=lora)

    def with_frozen(self, frozen: tuple[ParameterGroup, ...]) -> Self:
        """The same model, of which these groups of parameters are not trained."""
        return replace(self, frozen=frozen)

    def predicts_further(self, tensor: str) -> bool:
        """Return whether a tensor is in the layers after the last one (multi-token prediction)."""
        if self.linear and tensor.startswith("mtp."):
            return True
        layer = re.match(r"model\.layers\.(\d+)\.", tensor)
        return layer is not None and 0 <= int(layer[1]) - self.num_layers < self.num_further_layers

    def hf_config(self) -> dict[str, Any]:
        """Return config.json of the exported model: with a value head, transformers gives its outputs per token."""
        dropped = ("quantization_config", SUPPORT_KEY, *(() if self.head == "policy" else _LABELS))
        kept = {key: value for key, value in self.raw_config.items() if key not in dropped}
        if self.head == "policy":
            return {**kept, "architectures": [self.name]}
        named = self.name.removesuffix(LANGUAGE_MODEL).removesuffix(WITH_VISION)
        ending = REWARD_MODELS[1 if self.scores_rows else 0]
        kept |= {"architectures": [named + ending], "num_labels": self.num_values}
        return kept | ({SUPPORT_KEY: asdict(self.support)} if self.support else {})

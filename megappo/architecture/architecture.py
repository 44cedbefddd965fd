"""A model as its config.json describes it. See `parsing.read_architecture`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from megappo.architecture.families import LANGUAGE_MODEL, REWARD_MODELS, Family, HeadKind
from megappo.config.schema import Lora

_LABELS = ("id2label", "label2id")


@dataclass(frozen=True)
class Experts:
    """A mixture of experts; every layer has one but the first `num_dense_layers`.

    Attributes:
        count: experts of a layer, of which each token goes to `top_k`.
        ffn_size: an expert's inner size; the shared expert's is `shared_ffn_size`, None without one.
        renormalizes: the chosen experts' probabilities are divided by their sum.
        scaling: then they are multiplied by this; None = not.
        groups: of experts, and how many of them a token reaches; None where it reaches all.
    """

    count: int
    top_k: int
    ffn_size: int
    shared_ffn_size: int | None
    num_dense_layers: int
    renormalizes: bool
    scaling: float | None
    groups: tuple[int, int] | None


@dataclass(frozen=True)
class LatentAttention:
    """Sizes of latent vectors (`q_rank` None: queries have none) and of a head's parts: q and k without positions,
    their rotary part, v."""

    q_rank: int | None
    kv_rank: int
    plain_size: int
    rope_size: int
    v_size: int


@dataclass(frozen=True)
class Rope:
    """Rotary positions: base period, kind of scaling, and the numbers of that kind by their names in config.json."""

    base: float
    kind: str
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class Architecture:
    """A model, as its config.json describes it, and the head that is put on it.

    Attributes:
        name: of the language model, a key of FAMILIES.
        named: the name in config.json: the same, or a reward model's.
        file: config.json.
        ffn_size: inner size of the layers without experts.
        tied: the output layer is the embedding.
        sliding_window: tokens that some layer attends to at most; None where nothing limits them.
        num_further_layers: layers after the last one, which predict further tokens and are not loaded.
        head: what reads the last hidden states.
        value_bias: a value head has a bias.
        lora: the adapters beside the matrices, which are trained instead of these.
        raw_config: all of config.json, to be written again.
    """

    name: str
    named: str
    family: Family
    file: Path
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: Rope
    experts: Experts | None
    latent: LatentAttention | None
    tied: bool
    sliding_window: int | None
    num_further_layers: int
    raw_config: Mapping[str, Any] = field(repr=False)
    head: HeadKind = "policy"
    value_bias: bool = False
    lora: Lora | None = None

    @property
    def is_reward_model(self) -> bool:
        """The folder is a reward model's, or a critic's."""
        return self.named.endswith(REWARD_MODELS)

    @property
    def num_experts(self) -> int:
        """Experts of each layer that has them, 0 in a dense model."""
        return self.experts.count if self.experts else 0

    @property
    def num_dense_layers(self) -> int:
        """The first layers, which have no experts: all of a dense model's."""
        return self.experts.num_dense_layers if self.experts else self.num_layers

    @property
    def ties_output(self) -> bool:
        """The output layer is the embedding; a value head never is."""
        return self.tied and self.head != "value"

    def with_head(self, head: HeadKind) -> Self:
        """The same model under another head."""
        return replace(self, head=head)

    def with_lora(self, lora: Lora | None) -> Self:
        """The same model with these adapters; None = without any."""
        return replace(self, lora=lora)

    def predicts_further(self, tensor: str) -> bool:
        """Return whether a tensor is in the layers after the last one (DeepSeek-V3's multi-token prediction)."""
        further = range(self.num_layers, self.num_layers + self.num_further_layers)
        return tensor.startswith(tuple(f"model.layers.{layer}." for layer in further))

    def hf_config(self) -> dict[str, Any]:
        """config.json of the model as it is exported: with a value head, transformers gives one number per token."""
        if self.head == "policy":
            return {**self.raw_config, "architectures": [self.name]}
        kept = {key: value for key, value in self.raw_config.items() if key not in _LABELS}
        return {**kept, "architectures": [self.name.removesuffix(LANGUAGE_MODEL) + REWARD_MODELS[0]], "num_labels": 1}

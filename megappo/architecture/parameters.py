"""A model's parameters: the Hugging Face tensors that each Megatron parameter is made of, and how it is cut."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from megappo.architecture.architecture import Architecture
from megappo.architecture.families import ExpertFormat, SharedExpertFormat
from megappo.config.schema import Lora, Parallel

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
VALUE_HEAD = "score.weight"
VALUE_BIAS = "score.bias"
OUTPUT_LAYER = "output_layer"
SECOND_HEAD = "value_head"
ROUTER_BIAS = "router.expert_bias"
ADAPTER = "_adapter"
"""Ends the name of a module with adapters, after the name of the linear layer that it adapts."""
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
"""End the names of adapters as PEFT writes them, after the name of the matrix without ".weight"."""
LOGITS_AT_A_TIME = {"cpu": 2**21, "cuda": 2**25}
"""Logits that a policy's head computes at a time, on each kind of device: on a CPU as many as its caches hold."""


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter (or a router's bias, which is a buffer).

    Attributes:
        megatron: its name in the local layer spec, and, after a blank, in TransformerEngine's where that differs.
        hf: the tensors it holds, stacked along dimension 0: name -> symbolic sizes, with blanks between.
        shard_dim: dimension cut over tensor-parallel ranks, an expert's over expert-tensor-parallel ones; None =
            replicated.
        by_kv_head: the stacked tensors alternate per KV head (q q k v, q q k v, ...), not once per shard.
        expert: number of the expert it belongs to, which only some of the expert-parallel ranks hold.
        with_next: an engine needs its tensors and the next rule's in one bucket.
    """

    megatron: str
    hf: Mapping[str, str]
    shard_dim: int | None = None
    by_kv_head: bool = False
    expert: int | None = None
    with_next: bool = False


# Names outside the layers are complete; inside, they come after the layer's number.
_MODEL = (
    Rule("embedding.word_embeddings.weight", {EMBEDDING: "vocab hidden"}, shard_dim=0),
    Rule("decoder.final_layernorm.weight", {"model.norm.weight": "hidden"}),
)
_NORMS = (
    Rule("input_layernorm.weight self_attention.linear_qkv.layer_norm_weight", {"input_layernorm.weight": "hidden"}),
    Rule("pre_mlp_layernorm.weight mlp.linear_fc1.layer_norm_weight", {"post_attention_layernorm.weight": "hidden"}),
)
_QKV = {f"self_attn.{name}_proj.weight": f"{size} hidden" for name, size in (("q", "q"), ("k", "kv"), ("v", "kv"))}
_ATTENTION = (
    Rule("self_attention.linear_qkv.weight", _QKV, shard_dim=0, by_kv_head=True),
    Rule("self_attention.linear_proj.weight", {"self_attn.o_proj.weight": "hidden q"}, shard_dim=1),
)
# Rotary dimensions need no reordering: with latent attention Megatron takes them in Hugging Face's pairs.
_LATENT_ATTENTION = (
    Rule(
        "self_attention.linear_kv_down_proj.weight",
        {"self_attn.kv_a_proj_with_mqa.weight": "kv_latent_and_rope hidden"},
    ),
    Rule(
        "self_attention.kv_layernorm.weight self_attention.linear_kv_up_proj.layer_norm_weight",
        {"self_attn.kv_a_layernorm.weight": "kv_latent"},
    ),
    Rule("self_attention.linear_kv_up_proj.weight", {"self_attn.kv_b_proj.weight": "k_and_v kv_latent"}, shard_dim=0),
    Rule("self_attention.linear_proj.weight", {"self_attn.o_proj.weight": "hidden v"}, shard_dim=1),
)
_QUERY = (Rule("self_attention.linear_q_proj.weight", {"self_attn.q_proj.weight": "q hidden"}, shard_dim=0),)
# The last of these comes before the first of _LATENT_ATTENTION: SGLang makes one matrix of the two, and silently
# takes neither from a bucket that lacks the other.
_LATENT_QUERY = (
    Rule(
        "self_attention.q_layernorm.weight self_attention.linear_q_up_proj.layer_norm_weight",
        {"self_attn.q_a_layernorm.weight": "q_latent"},
    ),
    Rule("self_attention.linear_q_up_proj.weight", {"self_attn.q_b_proj.weight": "q q_latent"}, shard_dim=0),
    Rule("self_attention.linear_q_down_proj.weight", {"self_attn.q_a_proj.weight": "q_latent hidden"}, with_next=True),
)
_MLP = (
    Rule(
        "mlp.linear_fc1.weight", {"mlp.gate_proj.weight": "ffn hidden", "mlp.up_proj.weight": "ffn hidden"}, shard_dim=0
    ),
    Rule("mlp.linear_fc2.weight", {"mlp.down_proj.weight": "hidden ffn"}, shard_dim=1),
)
_QKV_BIASES = {"self_attn.q_proj.bias": "q", "self_attn.k_proj.bias": "kv", "self_attn.v_proj.bias": "kv"}
_QKV_BIAS = (Rule("self_attention.linear_qkv.bias", _QKV_BIASES, shard_dim=0, by_kv_head=True),)
_QK_NORMS = (
    Rule("self_attention.q_layernorm.weight", {"self_attn.q_norm.weight": "head"}),
    Rule("self_attention.k_layernorm.weight", {"self_attn.k_norm.weight": "head"}),
)

_ADAPTED = _ATTENTION + _MLP


@dataclass(frozen=True)
class HFTensor:
    """A Hugging Face tensor, and the shard of it that each rank holds (see `Rule`).

    The last ranks' shards of a padded vocabulary reach beyond `shape`: that part is padding. Of the tensors with an
    `expert`, an expert-parallel rank holds those of its run of experts only. One `with_next` is exported in one bucket
    with the tensor after it.
    """

    name: str
    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    shard_dim: int | None
    expert: int | None = None
    with_next: bool = False


@dataclass(frozen=True)
class Parameter:
    """One Megatron parameter: it holds `groups` times (rows of every tensor), along dimension 0.

    Attributes:
        names: with layers and experts numbered over the whole model, one for each layer spec that has its own.
        layer: None outside the layers.
        is_buffer: a router's bias, which is no parameter to torch and stays in fp32.
    """

    names: tuple[str, ...]
    layer: int | None
    hf_tensors: tuple[HFTensor, ...]
    groups: int
    is_buffer: bool

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of the parameter on each rank."""
        return (sum(hf.shard_shape[0] for hf in self.hf_tensors), *self.hf_tensors[0].shard_shape[1:])


def list_parameters(
    architecture: Architecture, *, tensor: int = 1, expert_tensor: int = 1, num_experts: int | None = None
) -> list[Parameter]:
    """Every parameter of the model under its head, and routers' biases, in the order of the rules.

    Args:
        tensor: tensor-parallel ranks, for which the vocabulary is padded.
        expert_tensor: ranks that cut each expert.
        num_experts: of each layer, the first so many; None = all.
    """
    sizes = _sizes(architecture)
    shard_sizes = {**sizes, "vocab": padded_vocab_size(architecture.vocab_size, tensor)}
    rules: list[tuple[int | None, Rule]] = [(None, rule) for rule in _MODEL + _output_rules(architecture)]
    rules += [(number, rule) for number, table in enumerate(_layer_rules(architecture, num_experts)) for rule in table]
    return [
        _parameter(rule, layer, sizes, shard_sizes, tensor if rule.expert is None else expert_tensor)
        for layer, rule in rules
    ]


def is_adapter(name: str) -> bool:
    """Return whether a Megatron parameter is an adapter's."""
    return f"{ADAPTER}." in name


def adapted_modules(architecture: Architecture) -> set[str]:
    """Names, without their beginnings, of the matrices that can have adapters."""
    rules = [rule for of_layer in _layer_rules(architecture.with_lora(None), num_experts=1) for rule in of_layer]
    return {name.split(".")[-2] for rule in rules if rule in _ADAPTED for name in rule.hf}


def is_trained(name: str, architecture: Architecture) -> bool:
    """Return whether a Megatron parameter is trained where its model is: all are, or with adapters only these and a
    value head."""
    is_value_head = name.startswith(SECOND_HEAD) or (architecture.head == "value" and name.startswith(OUTPUT_LAYER))
    return architecture.lora is None or is_adapter(name) or is_value_head


def by_name(parameters: Iterable[Parameter]) -> dict[str, Parameter]:
    """Parameters by their names under either layer spec."""
    return {name: parameter for parameter in parameters for name in parameter.names}


def hf_tensors_of(parameters: Iterable[Parameter]) -> dict[str, HFTensor]:
    """Every Hugging Face tensor of the model by name, once, in the order of the rules."""
    return {hf.name: hf for parameter in parameters for hf in parameter.hf_tensors}


def hf_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model's Hugging Face tensors; a tied head, being the embedding, is not among them."""
    return {name: hf.shape for name, hf in hf_tensors_of(list_parameters(architecture)).items()}


class StageSize(NamedTuple):
    """Numbers in the parameters that a rank of a pipeline stage holds: of experts, and of all else."""

    dense: int
    experts: int


def stage_sizes(architecture: Architecture, parallel: Parallel, *, trained: bool = False) -> list[StageSize]:
    """Sizes of each pipeline stage; the model fits the layout.

    Args:
        trained: count trained parameters only (see `is_trained`).
    """
    stages, local_experts = stage_of_layers(architecture, parallel), architecture.num_experts // parallel.expert
    dense, experts = [0] * parallel.pipeline, [0] * parallel.pipeline
    cut = {"tensor": parallel.tensor, "expert_tensor": parallel.expert_tensor}
    for parameter in list_parameters(architecture, **cut, num_experts=1):  # all of a layer are alike
        hf, is_head = parameter.hf_tensors[0], parameter.names[0].startswith(OUTPUT_LAYER)
        is_tied_here = is_head and hf.name == EMBEDDING and parallel.pipeline == 1
        if parameter.is_buffer or is_tied_here or (trained and not is_trained(parameter.names[0], architecture)):
            continue
        outside = 0 if hf.name == EMBEDDING and not is_head else -1
        stage, size = outside if parameter.layer is None else stages[parameter.layer], prod(parameter.shard_shape)
        if hf.expert is None:
            dense[stage] += size
        else:
            experts[stage] += size * local_experts
    return [StageSize(*sizes) for sizes in zip(dense, experts, strict=True)]


def stage_of_layers(architecture: Architecture, parallel: Parallel) -> list[int]:
    """The pipeline stage of each layer; the model fits the layout."""
    chunks = parallel.num_chunks
    split = parallel.pipeline_split or (architecture.num_layers // chunks,) * chunks
    return [chunk % parallel.pipeline for chunk, layers in enumerate(split) for _ in range(layers)]


def padded_vocab_size(vocab_size: int, tensor: int) -> int:
    """The next multiple of `tensor`; rows from vocab_size on are padding."""
    return -(-vocab_size // tensor) * tensor


def _layer_rules(architecture: Architecture, num_experts: int | None) -> list[tuple[Rule, ...]]:
    """The rules of every layer."""
    attention = _NORMS + _attention_rules(architecture)
    num_dense, written = architecture.num_dense_layers, architecture.family.experts
    count = architecture.num_experts if num_experts is None else num_experts
    experts = _expert_rules(written, count) if written else ()
    rules = [attention + _MLP] * num_dense + [attention + experts] * (architecture.num_layers - num_dense)
    return [of_layer + _adapter_rules(of_layer, architecture.lora) for of_layer in rules]


def _adapter_rules(rules: tuple[Rule, ...], lora: Lora | None) -> tuple[Rule, ...]:
    """Rules of a layer's adapters: one for each Hugging Face matrix, as a linear layer may hold several. Of a
    [in -> rank] and b [rank -> out] that one is cut which has the dimension along which the layer is cut."""
    targets = lora.modules if lora is not None else ()
    found: list[Rule] = []
    for rule in rules if targets else ():
        for name, symbols in rule.hf.items() if rule in _ADAPTED else ():
            matrix = name.removesuffix(".weight")
            module = matrix.split(".")[-1]
            if module in targets:
                megatron = f"{rule.megatron.removesuffix('.weight')}{ADAPTER}.{module}"
                out, into = symbols.split()
                a, b = {matrix + LORA_A: f"rank {into}"}, {matrix + LORA_B: f"{out} rank"}
                found.append(Rule(f"{megatron}.a", a, shard_dim=rule.shard_dim or None))
                found.append(Rule(f"{megatron}.b", b, shard_dim=None if rule.shard_dim else 0))
    return tuple(found)


def _attention_rules(architecture: Architecture) -> tuple[Rule, ...]:
    latent, family = architecture.latent, architecture.family
    if latent:
        return (_QUERY if latent.q_rank is None else _LATENT_QUERY) + _LATENT_ATTENTION
    return _ATTENTION + (_QKV_BIAS if family.qkv_bias else ()) + (_QK_NORMS if family.qk_layernorm else ())


def _expert_rules(experts: ExpertFormat, count: int) -> tuple[Rule, ...]:
    router = Rule("mlp.router.weight", {f"{experts.block}.gate.weight": "experts hidden"})
    rules = [router, *(_shared_expert_rules(experts.shared) if experts.shared else ())]
    if experts.router_bias:
        rules.append(Rule(f"mlp.{ROUTER_BIAS}", {f"{experts.block}.gate.e_score_correction_bias": "experts"}))
    for expert in range(count):
        hf = f"{experts.block}.experts.{expert}"
        gate_up = {f"{hf}.{name}.weight": "expert_ffn hidden" for name in (experts.gate, experts.up)}
        down = {f"{hf}.{experts.down}.weight": "hidden expert_ffn"}
        rules.append(Rule(_expert_names(expert, "linear_fc1"), gate_up, shard_dim=0, expert=expert))
        rules.append(Rule(_expert_names(expert, "linear_fc2"), down, shard_dim=1, expert=expert))
    return tuple(rules)


def _expert_names(expert: int, layer: str) -> str:
    """Names of an expert's weight: with a layer of its own, and as one of many in TransformerEngine's grouped layer."""
    return f"mlp.experts.local_experts.{expert}.{layer}.weight mlp.experts.{layer}.weight{expert}"


def _shared_expert_rules(shared: SharedExpertFormat) -> tuple[Rule, ...]:
    megatron, hf = "mlp.shared_experts", f"mlp.{shared.module}"
    gate_up = {f"{hf}.{name}_proj.weight": "shared_ffn hidden" for name in ("gate", "up")}
    down = {f"{hf}.down_proj.weight": "hidden shared_ffn"}
    matrices = (
        Rule(f"{megatron}.linear_fc1.weight", gate_up, shard_dim=0),
        Rule(f"{megatron}.linear_fc2.weight", down, shard_dim=1),
    )
    gate = Rule(f"{megatron}.gate_weight", {f"{hf}_gate.weight": "one hidden"})
    return (*matrices, gate) if shared.gated else matrices


def _output_rules(architecture: Architecture) -> tuple[Rule, ...]:
    def value_head(module: str) -> tuple[Rule, ...]:
        weight, bias = Rule(f"{module}.weight", {VALUE_HEAD: "one hidden"}), Rule(f"{module}.bias", {VALUE_BIAS: "one"})
        return (weight, bias) if architecture.value_bias else (weight,)

    if architecture.head == "value":
        return value_head(OUTPUT_LAYER)
    # Tied, with pipeline stages: the last stage has a copy of the embedding for its output layer.
    source = EMBEDDING if architecture.tied else LM_HEAD
    output_layer = Rule(f"{OUTPUT_LAYER}.weight", {source: "vocab hidden"}, shard_dim=0)
    return (output_layer, *value_head(SECOND_HEAD)) if architecture.head == "policy_value" else (output_layer,)


def _sizes(architecture: Architecture) -> dict[str, int]:
    """Sizes by their symbols in the rules."""
    experts, latent, heads = architecture.experts, architecture.latent, architecture.num_heads
    sizes = {"one": 1, "hidden": architecture.hidden_size, "vocab": architecture.vocab_size}
    sizes["ffn"] = architecture.ffn_size
    sizes["rank"] = architecture.lora.rank if architecture.lora else 0
    if latent:
        sizes["q"], sizes["q_latent"] = heads * (latent.plain_size + latent.rope_size), latent.q_rank or 0
        sizes["kv_latent"], sizes["kv_latent_and_rope"] = latent.kv_rank, latent.kv_rank + latent.rope_size
        sizes["k_and_v"], sizes["v"] = heads * (latent.plain_size + latent.v_size), heads * latent.v_size
    else:
        head, kv_heads = architecture.head_size, architecture.num_kv_heads
        sizes |= {"head": head, "q": heads * head, "kv": kv_heads * head, "kv_heads": kv_heads}
    if experts:
        sizes |= {"experts": experts.count, "expert_ffn": experts.ffn_size, "shared_ffn": experts.shared_ffn_size or 0}
    return sizes


def _parameter(
    rule: Rule, layer: int | None, sizes: Mapping[str, int], shard_sizes: Mapping[str, int], ways: int
) -> Parameter:
    """A rule's parameter in one layer, cut over `ways` ranks."""
    model, decoder = ("", "") if layer is None else (f"model.layers.{layer}.", f"decoder.layers.{layer}.")
    hf_tensors = []
    for name, symbols in rule.hf.items():
        shape = tuple(sizes[symbol] for symbol in symbols.split())
        shard = [shard_sizes[symbol] for symbol in symbols.split()]
        if rule.shard_dim is not None:
            shard[rule.shard_dim] //= ways
        hf_tensors.append(HFTensor(model + name, shape, tuple(shard), rule.shard_dim, rule.expert, rule.with_next))
    names = tuple(decoder + name for name in rule.megatron.split())
    groups = sizes["kv_heads"] // ways if rule.by_kv_head else 1
    return Parameter(names, layer, tuple(hf_tensors), groups, names[0].endswith(ROUTER_BIAS))

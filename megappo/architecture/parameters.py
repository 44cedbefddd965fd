"""Model families as tables: which Hugging Face tensors each Megatron parameter is made of. Data only."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megappo.architecture.families import (
    FAMILIES,
    Experts,
    Family,
    HeadKind,
    SharedExpert,
    family_of,
    has_bias,
    is_tied,
    num_dense_layers,
    num_experts,
    num_key_value_heads,
)

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
VALUE_HEAD = "score.weight"
VALUE_BIAS = "score.bias"
OUTPUT_LAYER = "output_layer"
SECOND_HEAD = "value_head"
ROUTER_BIAS = "router.expert_bias"


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter (or a router's bias, which is a buffer).

    Attributes:
        megatron: its name in the local layer spec, and in TransformerEngine's where that differs.
        hf: names and symbolic shapes of the tensors it holds, stacked along dimension 0.
        shard_dim: dimension cut over tensor-parallel ranks, an expert's over expert-tensor-parallel ones; None =
            replicated.
        by_kv_head: the stacked tensors alternate per KV head (q q k v, q q k v, ...), not once per shard.
        expert: number of the expert it belongs to, which only some of the expert-parallel ranks hold.
        with_next: its tensors and the next rule's are of use to an engine only together.
    """

    megatron: tuple[str, ...]
    hf: tuple[tuple[str, tuple[str, ...]], ...]
    shard_dim: int | None = None
    by_kv_head: bool = False
    expert: int | None = None
    with_next: bool = False


# Names outside the layers are complete; inside, they come after the layer's number.
_MODEL = (
    Rule(("embedding.word_embeddings.weight",), ((EMBEDDING, ("vocab", "hidden")),), shard_dim=0),
    Rule(("decoder.final_layernorm.weight",), (("model.norm.weight", ("hidden",)),)),
)
_NORMS = (
    Rule(
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        (("input_layernorm.weight", ("hidden",)),),
    ),
    Rule(
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        (("post_attention_layernorm.weight", ("hidden",)),),
    ),
)
_ATTENTION = (
    Rule(
        ("self_attention.linear_qkv.weight",),
        (
            ("self_attn.q_proj.weight", ("q", "hidden")),
            ("self_attn.k_proj.weight", ("kv", "hidden")),
            ("self_attn.v_proj.weight", ("kv", "hidden")),
        ),
        shard_dim=0,
        by_kv_head=True,
    ),
    Rule(("self_attention.linear_proj.weight",), (("self_attn.o_proj.weight", ("hidden", "q")),), shard_dim=1),
)
# Rotary dimensions need no reordering: with latent attention Megatron takes them in Hugging Face's pairs.
_LATENT_ATTENTION = (
    Rule(
        ("self_attention.linear_kv_down_proj.weight",),
        (("self_attn.kv_a_proj_with_mqa.weight", ("kv_latent_and_rope", "hidden")),),
    ),
    Rule(
        ("self_attention.kv_layernorm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight"),
        (("self_attn.kv_a_layernorm.weight", ("kv_latent",)),),
    ),
    Rule(
        ("self_attention.linear_kv_up_proj.weight",),
        (("self_attn.kv_b_proj.weight", ("k_and_v", "kv_latent")),),
        shard_dim=0,
    ),
    Rule(("self_attention.linear_proj.weight",), (("self_attn.o_proj.weight", ("hidden", "v")),), shard_dim=1),
)
_QUERY = (Rule(("self_attention.linear_q_proj.weight",), (("self_attn.q_proj.weight", ("q", "hidden")),), shard_dim=0),)
# The last of these comes before the first of _LATENT_ATTENTION: SGLang makes one matrix of the two, and takes neither,
# without a word, from a bucket that lacks the other.
_LATENT_QUERY = (
    Rule(
        ("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight"),
        (("self_attn.q_a_layernorm.weight", ("q_latent",)),),
    ),
    Rule(
        ("self_attention.linear_q_up_proj.weight",),
        (("self_attn.q_b_proj.weight", ("q", "q_latent")),),
        shard_dim=0,
    ),
    Rule(
        ("self_attention.linear_q_down_proj.weight",),
        (("self_attn.q_a_proj.weight", ("q_latent", "hidden")),),
        with_next=True,
    ),
)
_MLP = (
    Rule(
        ("mlp.linear_fc1.weight",),
        (("mlp.gate_proj.weight", ("ffn", "hidden")), ("mlp.up_proj.weight", ("ffn", "hidden"))),
        shard_dim=0,
    ),
    Rule(("mlp.linear_fc2.weight",), (("mlp.down_proj.weight", ("hidden", "ffn")),), shard_dim=1),
)
_QKV_BIAS = (
    Rule(
        ("self_attention.linear_qkv.bias",),
        (("self_attn.q_proj.bias", ("q",)), ("self_attn.k_proj.bias", ("kv",)), ("self_attn.v_proj.bias", ("kv",))),
        shard_dim=0,
        by_kv_head=True,
    ),
)
_QK_NORMS = (
    Rule(("self_attention.q_layernorm.weight",), (("self_attn.q_norm.weight", ("head",)),)),
    Rule(("self_attention.k_layernorm.weight",), (("self_attn.k_norm.weight", ("head",)),)),
)


@dataclass(frozen=True)
class Piece:
    """A Hugging Face tensor and the shard of it that each rank holds, of those it is cut over (see `Rule`).

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
class Composition:
    """What one Megatron parameter holds: `groups` times (a slice of every piece), along dimension 0."""

    pieces: tuple[Piece, ...]
    groups: int

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of the parameter on each rank."""
        return (sum(piece.shard_shape[0] for piece in self.pieces), *self.pieces[0].shard_shape[1:])


def compositions(
    hf_config: dict[str, Any], *, tensor: int, padded_vocab_size: int, head: HeadKind, expert_tensor: int = 1
) -> dict[str, Composition]:
    """Composition of every Megatron parameter and of routers' biases, by its name with global layer and expert numbers,
    under both specs.

    Args:
        hf_config: the model's config.json.
        tensor: tensor-parallel size.
        padded_vocab_size: rows of Megatron's embedding over all ranks, a multiple of `tensor`.
        head: what reads the last hidden states. A value head is replicated, [1, hidden], and its bias, if any, [1].
        expert_tensor: ranks that cut each expert.
    Raises:
        ValueError: an unknown family.
    """
    layer_rules = _layer_rules(hf_config)
    sizes = _sizes(hf_config)
    padded = {**sizes, "vocab": padded_vocab_size}
    rules = {"": _MODEL + _output_rules(hf_config, head)}
    rules.update({f"layers.{number}.": table for number, table in enumerate(layer_rules)})
    return {
        (f"decoder.{prefix}" if prefix else "") + name: _compose(
            rule, prefix, sizes, padded, tensor if rule.expert is None else expert_tensor
        )
        for prefix, table in rules.items()
        for rule in table
        for name in rule.megatron
    }


def pieces_of(table: Mapping[str, Composition]) -> dict[str, Piece]:
    """Every Hugging Face tensor of the model by name, once, in the order of the rules."""
    return {piece.name: piece for composition in table.values() for piece in composition.pieces}


def hf_shapes(hf_config: dict[str, Any], head: HeadKind = "policy") -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model's Hugging Face tensors; a tied head, being the embedding, is not among them."""
    table = compositions(hf_config, tensor=1, padded_vocab_size=hf_config["vocab_size"], head=head)
    return {name: piece.shape for name, piece in pieces_of(table).items()}


def _layer_rules(hf_config: dict[str, Any]) -> list[tuple[Rule, ...]]:
    """The rules of every layer."""
    architecture = (hf_config.get("architectures") or ["no architecture"])[0]
    if architecture not in FAMILIES:
        raise ValueError(f"config.json names {architecture}, whose weights are not known; known: {', '.join(FAMILIES)}")
    family = FAMILIES[architecture]
    attention = _NORMS + _attention_rules(family, hf_config)
    num_dense = num_dense_layers(hf_config)
    experts = _expert_rules(family.experts, num_experts(hf_config)) if family.experts else ()
    return [attention + _MLP] * num_dense + [attention + experts] * (hf_config["num_hidden_layers"] - num_dense)


def _attention_rules(family: Family, hf_config: dict[str, Any]) -> tuple[Rule, ...]:
    if family.latent_attention:
        return (_QUERY if hf_config["q_lora_rank"] is None else _LATENT_QUERY) + _LATENT_ATTENTION
    return _ATTENTION + (_QKV_BIAS if family.qkv_bias else ()) + (_QK_NORMS if family.qk_layernorm else ())


def _expert_rules(experts: Experts, count: int) -> tuple[Rule, ...]:
    router = Rule(("mlp.router.weight",), ((f"{experts.block}.gate.weight", ("experts", "hidden")),))
    rules = [router, *(_shared_expert_rules(experts.shared) if experts.shared else ())]
    if experts.router_bias:
        rules.append(Rule((f"mlp.{ROUTER_BIAS}",), ((f"{experts.block}.gate.e_score_correction_bias", ("experts",)),)))
    for expert in range(count):
        megatron, hf = f"mlp.experts.local_experts.{expert}", f"{experts.block}.experts.{expert}"
        gate_up = tuple((f"{hf}.{name}.weight", ("expert_ffn", "hidden")) for name in (experts.gate, experts.up))
        down = ((f"{hf}.{experts.down}.weight", ("hidden", "expert_ffn")),)
        rules.append(Rule((f"{megatron}.linear_fc1.weight",), gate_up, shard_dim=0, expert=expert))
        rules.append(Rule((f"{megatron}.linear_fc2.weight",), down, shard_dim=1, expert=expert))
    return tuple(rules)


def _shared_expert_rules(shared: SharedExpert) -> tuple[Rule, ...]:
    megatron, hf = "mlp.shared_experts", f"mlp.{shared.module}"
    gate_up = tuple((f"{hf}.{name}_proj.weight", ("shared_ffn", "hidden")) for name in ("gate", "up"))
    down = ((f"{hf}.down_proj.weight", ("hidden", "shared_ffn")),)
    matrices = (
        Rule((f"{megatron}.linear_fc1.weight",), gate_up, shard_dim=0),
        Rule((f"{megatron}.linear_fc2.weight",), down, shard_dim=1),
    )
    gate = Rule((f"{megatron}.gate_weight",), ((f"{hf}_gate.weight", ("one", "hidden")),))
    return (*matrices, gate) if shared.gated else matrices


def _output_rules(hf_config: dict[str, Any], head: HeadKind) -> tuple[Rule, ...]:
    def value_head(module: str) -> tuple[Rule, ...]:
        weight = Rule((f"{module}.weight",), ((VALUE_HEAD, ("one", "hidden")),))
        bias = Rule((f"{module}.bias",), ((VALUE_BIAS, ("one",)),))
        return (weight, bias) if has_bias(hf_config) else (weight,)

    if head == "value":
        return value_head(OUTPUT_LAYER)
    # Tied, with pipeline stages: the last stage has a copy of the embedding for its output layer.
    source = EMBEDDING if is_tied(hf_config) else LM_HEAD
    output_layer = Rule((f"{OUTPUT_LAYER}.weight",), ((source, ("vocab", "hidden")),), shard_dim=0)
    return (output_layer, *value_head(SECOND_HEAD)) if head == "policy_value" else (output_layer,)


def _sizes(hf_config: dict[str, Any]) -> dict[str, int]:
    family = family_of(hf_config)
    return {
        "one": 1,
        "hidden": hf_config["hidden_size"],
        "vocab": hf_config["vocab_size"],
        **(_latent_sizes(hf_config) if family.latent_attention else _head_sizes(hf_config)),
        **(_expert_sizes(hf_config, family.experts) if family.experts else {}),
        **({"ffn": hf_config["intermediate_size"]} if num_dense_layers(hf_config) else {}),
    }


def _head_sizes(hf_config: dict[str, Any]) -> dict[str, int]:
    heads = hf_config["num_attention_heads"]
    head = hf_config.get("head_dim") or hf_config["hidden_size"] // heads
    kv_heads = num_key_value_heads(hf_config)
    return {"head": head, "q": heads * head, "kv": kv_heads * head, "kv_heads": kv_heads}


def _latent_sizes(hf_config: dict[str, Any]) -> dict[str, int]:
    heads, rope, v = hf_config["num_attention_heads"], hf_config["qk_rope_head_dim"], hf_config["v_head_dim"]
    return {
        "q": heads * (hf_config["qk_nope_head_dim"] + rope),
        "q_latent": hf_config["q_lora_rank"] or 0,
        "kv_latent": hf_config["kv_lora_rank"],
        "kv_latent_and_rope": hf_config["kv_lora_rank"] + rope,
        "k_and_v": heads * (hf_config["qk_nope_head_dim"] + v),
        "v": heads * v,
    }


def _expert_sizes(hf_config: dict[str, Any], experts: Experts) -> dict[str, int]:
    shared = {"shared_ffn": experts.shared.ffn_size(hf_config)} if experts.shared else {}
    return {"experts": num_experts(hf_config), "expert_ffn": hf_config[experts.ffn], **shared}


def _compose(rule: Rule, prefix: str, sizes: Mapping[str, int], padded: Mapping[str, int], ways: int) -> Composition:
    """A rule's composition in one layer, cut over `ways` ranks."""
    pieces = []
    for name, symbols in rule.hf:
        shard = [padded[symbol] for symbol in symbols]
        if rule.shard_dim is not None:
            shard[rule.shard_dim] //= ways
        shape = tuple(sizes[symbol] for symbol in symbols)
        full_name = f"model.{prefix}{name}" if prefix else name
        pieces.append(Piece(full_name, shape, tuple(shard), rule.shard_dim, rule.expert, rule.with_next))
    return Composition(tuple(pieces), sizes["kv_heads"] // ways if rule.by_kv_head else 1)

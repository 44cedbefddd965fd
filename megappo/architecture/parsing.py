"""config.json -> `Architecture`, or everything in it that is missing, contradicts itself, or is not supported."""

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from megappo.architecture.architecture import Architecture, Experts, LatentAttention, Rope
from megappo.architecture.config_json import CONFIG_FILE, INDEX, ROPE, SINGLE, read_model_config, uncomputed
from megappo.architecture.families import FAMILIES, ExpertFormat, Family, HeadKind, language_model
from megappo.architecture.model_folder import other_kind
from megappo.config.config_error import ConfigError, shorten
from megappo.config.text_files import TextFileError

SIZES = {
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "ffn_size": "intermediate_size",
}
"""Keys of every config.json, by the names of `Architecture`."""
LATENT_SIZES = {
    "q_rank": "q_lora_rank",  # null where queries have no latent vector
    "kv_rank": "kv_lora_rank",
    "plain_size": "qk_nope_head_dim",
    "rope_size": "qk_rope_head_dim",
    "v_size": "v_head_dim",
}
"""Further keys of a model with latent attention, by the names of `LatentAttention`."""
ONLY: dict[str, tuple[Any, ...]] = {
    "quantization_config": ({},),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "rope_is_neox_style": (True,),
    "rope_interleaved": (False,),
    "is_causal": (True,),
    "activation": ("silu", "swiglu"),
    "position_embedding_type": ("rope", "rotary"),
    "transformers_weights": (SINGLE, INDEX),
}
"""Keys of config.json with the values that are supported; an absent key, or null, means one of them."""
ONLY_OF_EXPERTS: dict[str, tuple[Any, ...]] = {
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "router_jitter_noise": (0,),
    "moe_layer_freq": (1,),
}
"""The same for a mixture of experts."""
COMPUTED = (
    *("architectures", "layer_types", "model_type", "rope_parameters", "rope_scaling", "rope_theta", "head_dim"),
    *("original_max_position_embeddings", "num_key_value_heads", "sliding_window", "use_sliding_window"),
    *("tie_word_embeddings", "norm_topk_prob", "num_nextn_predict_layers", "num_mtp_layers"),
)
"""Further keys of config.json that are read."""
ROPE_SECTIONS = ("rope_parameters", "rope_scaling")
"""Sections with the rotary positions: transformers 5's, and the older one."""
_ANOTHER = "choose another model"


class ArchitectureError(ConfigError):
    """A model's config.json cannot be used."""


def read_architecture(folder: str | Path, head: HeadKind = "policy") -> Architecture:
    """The model of a Hugging Face folder, to be given a head.

    Args:
        head: "value" also takes a reward model's folder, which differs in its head from the language model's.
    Raises:
        ArchitectureError: config.json cannot be read, or the model cannot be trained.
    """
    folder = Path(folder)
    try:
        found = read_model_config(folder)
    except TextFileError as error:
        kind = other_kind(folder) if folder.is_dir() else None
        raise ArchitectureError(f"{folder} {kind}" if kind else str(error)) from error
    return parse(found, folder / CONFIG_FILE, head)


def parse(found: Mapping[str, Any], file: Path, head: HeadKind = "policy") -> Architecture:
    """`read_architecture` of what `file` holds, each value of the kind that is expected.

    Raises:
        ArchitectureError: as there.
    """
    named = (found.get("architectures") or ["none"])[0]
    name = language_model(named) if head == "value" else named
    if name not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise ArchitectureError(
            f"{file} is of architecture {shorten(named)}; this version trains {supported}: choose one of these"
        )
    family = FAMILIES[name]
    missing = ", ".join(_missing(found, family))
    if missing:
        raise ArchitectureError(f"{file} lacks {missing}: download it again")
    faults = [f"{file}: {fault}: correct it, or download it again" for fault in _contradictions(found, family)]
    remedy = f"{_ANOTHER}, or remove the key if the model computes the same without it"
    faults += [f"{file} of this {named} has {fault}: {remedy}" for fault in _unsupported(found, family)]
    faults += [f"{file}: {fault}: {_ANOTHER}" for fault in _unsupported_rope(found, family)]
    if faults:
        raise ArchitectureError(*faults)
    return Architecture(
        name=name,
        named=named,
        family=family,
        file=file,
        **_sizes(found, SIZES),
        num_kv_heads=_num_kv_heads(found),
        head_size=found.get("head_dim") or found["hidden_size"] // found["num_attention_heads"],
        rope=_rope(found, family),
        experts=_experts(found, family.experts) if family.experts else None,
        latent=LatentAttention(**_sizes(found, LATENT_SIZES)) if family.latent_attention else None,
        tied=bool(found.get("tie_word_embeddings", False)),  # Hugging Face's default
        sliding_window=_sliding_window(found, family),
        num_further_layers=found.get("num_nextn_predict_layers") or found.get("num_mtp_layers") or 0,
        raw_config=found,
        head=head,
    )


def _sizes(found: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    return {size: found[key] for size, key in keys.items()}


def _missing(found: Mapping[str, Any], family: Family) -> Iterator[str]:
    for key in _needed(found, family):
        if found.get(key) is None and not (key == LATENT_SIZES["q_rank"] and key in found):
            yield key
    if family.experts and not any(found.get(key) for key in family.experts.count):
        yield family.experts.count[-1]


def _needed(found: Mapping[str, Any], family: Family) -> list[str]:
    """Keys without which a model of the family is not described."""
    keys = list(SIZES.values())
    if family.experts:
        keys += family.experts.keys
        keys += ("n_group", "topk_group") if _has_groups(found, family.experts) else ()
    if family.latent_attention:
        keys += LATENT_SIZES.values()
    return list(dict.fromkeys(keys))


def _has_groups(found: Mapping[str, Any], experts: ExpertFormat) -> bool:
    return experts.groups is not None and experts.groups.method in (None, found.get("topk_method"))


def _contradictions(found: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Sizes that no model can have, and keys with several values."""
    yield from _rope_contradictions(found)
    heads, hidden, shared = found["num_attention_heads"], found["hidden_size"], _num_kv_heads(found)
    if family.experts:
        yield from _expert_contradictions(found, family.experts)
    size, name = found.get("head_dim") or hidden // heads, "the size of a head"
    if family.latent_attention:
        size, name = found[LATENT_SIZES["rope_size"]], LATENT_SIZES["rope_size"]
    elif heads % shared:
        yield f"num_key_value_heads {shared} does not divide num_attention_heads {heads}"
    if not family.latent_attention and not found.get("head_dim") and hidden % heads:
        yield f"num_attention_heads {heads} does not divide hidden_size {hidden}, and head_dim is not set"
    elif size % 2:
        yield f"{name} is {size}, but rotary positions need an even one"


def _expert_contradictions(found: Mapping[str, Any], experts: ExpertFormat) -> Iterator[str]:
    count, top_k = _num_experts(found, experts), found["num_experts_per_tok"]
    if top_k > count:
        yield f"num_experts_per_tok {top_k} is more than the {count} experts"
    if _has_groups(found, experts) and count % found["n_group"]:
        yield f"n_group {found['n_group']} does not divide the {count} experts"


def _unsupported(found: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Settings of config.json that are not computed here: `key = value, which is not supported`."""
    only = {**ONLY, "qkv_bias": (family.qkv_bias,), "use_qk_norm": (family.qk_layernorm,)}
    only |= ONLY_OF_EXPERTS if family.experts else {}
    only |= family.only
    keys = [key for key, values in only.items() if found.get(key) is not None and found[key] not in values]
    attention = {"full_attention"}
    if _sliding_window(found, family):  # which is at least as long as any row
        attention.add("sliding_attention")
    keys += ["layer_types"] if set(found.get("layer_types") or ()) - attention else []
    keys += _unsupported_routing(found, family.experts) if family.experts else []
    counts = family.experts.count if family.experts else ()
    keys += uncomputed(found, {*COMPUTED, *_needed(found, family), *counts, *only, *family.ignores})
    kind = (found.get("model_type") or "").replace("_", "")  # by which transformers chooses what is computed
    keys += [] if any(kind in name.lower() for name in FAMILIES) else ["model_type"]
    yield from (f"{key} = {shorten(repr(found[key]))}, which is not supported" for key in keys)


def _unsupported_routing(found: Mapping[str, Any], experts: ExpertFormat) -> Iterator[str]:
    top_k, groups = found["num_experts_per_tok"], _groups(found, experts)
    if top_k == 1 and _renormalizes(found, experts):
        yield "num_experts_per_tok"  # its probability would always be 1, and the router could not learn
    if experts.shared:
        yield from (key for key in experts.shared.keys if not found[key])
    # To Megatron a group is as good as its best experts, as many as a token gets in each of its groups.
    if groups and experts.groups and top_k // groups[1] != experts.groups.rated_by:
        yield "topk_group"


def _unsupported_rope(found: Mapping[str, Any], family: Family) -> Iterator[str]:
    rope, scalings = _rope_section(found), family.rope_scalings
    lacking = [name for name in scalings.get(_kind(rope), ()) if rope.get(name) is None]
    unknown = [*uncomputed(rope, ROPE.keys() - {"partial_rotary_factor"})]  # a kind ignores the numbers of others
    if _kind(rope) not in scalings or lacking or unknown:
        needs = "; ".join(f"{kind} ({', '.join(names)})" if names else kind for kind, names in scalings.items())
        yield f"rope {rope} is not supported; supported are, over the whole head, {needs}"
    elif _kind(rope) == "yarn" and (
        rope.get("attention_factor") is not None
        or rope.get("truncate") is False
        or bool(rope.get("mscale")) != bool(rope.get("mscale_all_dim"))
    ):
        yield (
            f"rope {rope} is not supported: of yarn neither attention_factor, nor truncate = false, nor one of "
            "mscale and mscale_all_dim without the other"
        )


def _rope_contradictions(found: Mapping[str, Any]) -> Iterator[str]:
    """Keys of rotary positions that have several values in config.json."""
    sections = [found[name] for name in ROPE_SECTIONS if found.get(name)]
    places = [found, *({**section, "rope_type": _kind(section)} for section in sections)]
    for key in ROPE:
        values = [place[key] for place in places if place.get(key) is not None]
        if any(value != values[0] for value in values):
            yield f"several values of {key} ({', '.join(map(str, values))})"


def _rope(found: Mapping[str, Any], family: Family) -> Rope:
    rope = _rope_section(found)
    numbers = {name: rope[name] for name in family.rope_scalings[_kind(rope)]}
    if _kind(rope) == "yarn":
        scaled = bool(rope.get("mscale"))
        numbers["beta_fast"], numbers["beta_slow"] = rope.get("beta_fast") or 32, rope.get("beta_slow") or 1
        numbers["mscale"] = rope["mscale"] if scaled else 1.0
        numbers["mscale_all_dim"] = rope["mscale_all_dim"] if scaled else 0.0
    return Rope(rope.get("rope_theta") or found.get("rope_theta") or family.rope_theta, _kind(rope), numbers)


def _rope_section(found: Mapping[str, Any]) -> dict[str, Any]:
    return next((found[name] for name in ROPE_SECTIONS if found.get(name)), {})


def _kind(rope: Mapping[str, Any]) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"


def _experts(found: Mapping[str, Any], experts: ExpertFormat) -> Experts:
    dense = found[experts.dense_layers] if experts.dense_layers else 0
    return Experts(
        count=_num_experts(found, experts),
        top_k=found["num_experts_per_tok"],
        ffn_size=found[experts.ffn],
        shared_ffn_size=prod(found[key] for key in experts.shared.keys) if experts.shared else None,
        num_dense_layers=min(dense, found["num_hidden_layers"]),
        renormalizes=_renormalizes(found, experts),
        scaling=found[experts.scaling] if experts.scaling else None,
        groups=_groups(found, experts),
    )


def _num_experts(found: Mapping[str, Any], experts: ExpertFormat) -> int:
    return next(found[key] for key in experts.count if found.get(key))


def _renormalizes(found: Mapping[str, Any], experts: ExpertFormat) -> bool:
    return bool(found.get("norm_topk_prob", False) if experts.renormalizes is None else experts.renormalizes)


def _groups(found: Mapping[str, Any], experts: ExpertFormat) -> tuple[int, int] | None:
    """Groups of experts and how many of them a token reaches, where that is not all of them."""
    if not _has_groups(found, experts) or found["topk_group"] >= found["n_group"]:
        return None
    return found["n_group"], found["topk_group"]


def _num_kv_heads(found: Mapping[str, Any]) -> int:
    return found.get("num_key_value_heads") or found["num_attention_heads"]


def _sliding_window(found: Mapping[str, Any], family: Family) -> int | None:
    is_on = family.sliding_window or found.get("use_sliding_window")
    return found.get("sliding_window") or None if is_on else None

"""config.json -> `Architecture`, or everything in it that is missing, has several values, or is not supported."""

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from megappo.architecture.architecture import (
    SUPPORT_KEY,
    Architecture,
    Experts,
    LatentAttention,
    LinearAttention,
    Scales,
)
from megappo.architecture.config_keys import COMPUTED, ONLY, ONLY_OF_EXPERTS, REMEDIES, positive, uncomputed
from megappo.architecture.families import (
    FAMILIES,
    FULL_KV_HEADS,
    FULL_PATTERN,
    LAYER_INPUT,
    LEFT_OUT,
    LOCAL_ROPE,
    LOGIT_CAP,
    PLAIN_ROPE,
    ROTARY_PART,
    ROTARY_SIZE,
    ROTATED,
    ExpertFormat,
    Family,
    HeadKind,
    RawValues,
    language_model,
)
from megappo.architecture.layer_kinds import irregular_layers, layers_of, unrotated, windows_and_heads
from megappo.architecture.model_folder import CONFIG_FILE, first_architecture, other_kind, read_json_file
from megappo.architecture.rope import read_rope, rope_section, split_rope, unsupported_rope
from megappo.architecture.vision import read_vision, text_values
from megappo.config.config_error import ConfigError, shorten
from megappo.config.methods import ValueSupport
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
LINEAR_SIZES = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_size": "linear_key_head_dim",
    "value_size": "linear_value_head_dim",
    "kernel": "linear_conv_kernel_dim",
}
"""Further keys of a model with linear attention, by the names of `LinearAttention`."""
_SUPPORTS = TypeAdapter(dict[str, ValueSupport | None])


def read_architecture(folder: str | Path, head: HeadKind = "policy") -> Architecture:
    """Return the architecture of a Hugging Face folder's model, under a head.

    Args:
        head: "value" also takes a reward model's folder, which differs in its head from the language model's.
    Raises:
        ConfigError: config.json cannot be read, or the model cannot be trained.
    """
    file = Path(folder) / CONFIG_FILE
    try:
        raw = read_json_file(file)
    except TextFileError as error:
        kind = other_kind(file.parent) if file.parent.is_dir() else None
        raise ConfigError(f"{folder} {kind}" if kind else str(error)) from error
    try:
        return parse(raw, file, head)
    except ValidationError as error:
        text = "; ".join(map(_wrong_value, error.errors()))
    except (TypeError, AttributeError, ArithmeticError) as error:  # of values that are computed with before
        text = str(error)
    raise ConfigError(f"cannot use {file}: {text}: correct it, or copy the file again")


def _wrong_value(error: ErrorDetails) -> str:
    keys = {
        **SIZES,
        **LATENT_SIZES,
        **LINEAR_SIZES,
        "base": "rope_theta",
        "tied": "tie_word_embeddings",
        "count": "num_experts",
        "logit_cap": LOGIT_CAP,
    }
    names = [keys.get(str(name), str(name)) for name in error["loc"]]
    return f"{'.'.join(names)}: {error['msg']}, found {shorten(repr(error['input']))}"


def parse(raw: RawValues, file: Path, head: HeadKind = "policy") -> Architecture:
    """Parse the content of config.json, as `read_architecture` does.

    Raises:
        ConfigError: as there.
        ValidationError, TypeError, AttributeError: a value has another type than is expected.
    """
    named = first_architecture(raw) or "none"
    name = language_model(named) if head == "value" else named
    if name not in FAMILIES:
        found = f"{file} is of architecture {shorten(named)}{LEFT_OUT.get(name, '')}"
        raise ConfigError(f"{found}; this version trains {', '.join(FAMILIES)}: choose one of these")
    family = FAMILIES[name]
    own = text_values(raw) if family.vision else raw
    values = {key: value for key, value in {**family.defaults, **own}.items() if value is not None}
    if family.experts and not family.experts.dense_layers:  # no layer has another MLP
        values.setdefault(SIZES["ffn_size"], values.get(family.experts.ffn))
    if missing := ", ".join(_missing(own, values, family)):
        raise ConfigError(f"{file} lacks {missing}: download it again")
    values, local_rope = split_rope(values, family)
    rope, conflicts = rope_section(values, family)
    architecture = Architecture(
        name=name,
        named=named,
        family=family,
        file=file,
        **{size: values[key] for size, key in SIZES.items()},
        num_kv_heads=values.get("num_key_value_heads", values["num_attention_heads"]),
        head_dim=values.get("head_dim"),
        rope=read_rope(rope, values, family),
        scales=Scales(**{name: positive(values, key) ** power for name, (key, power) in family.scales.items()}),
        experts=_experts(values, family.experts) if family.experts else None,
        latent=_latent(values) if family.latent_attention else None,
        linear=_linear(values) if family.linear_attention else None,
        tied=values.get("tie_word_embeddings", False),
        qkv_bias=_is_on(family.qkv_bias, values),
        qk_layernorm=_is_on(family.qk_layernorm, values),
        **windows_and_heads(values, family),
        unrotated=unrotated(values, family),
        local_rope_base=local_rope.get("rope_theta", values.get(LOCAL_ROPE, family.local_rope_theta)),
        logit_cap=values.get(LOGIT_CAP),
        vision=read_vision(raw, rope, family.vision) if family.vision else None,
        num_further_layers=values.get("num_nextn_predict_layers") or values.get("num_mtp_layers") or 0,
        raw_config=raw,
        head=head,
        stored_support=_SUPPORTS.validate_python({SUPPORT_KEY: raw.get(SUPPORT_KEY)})[SUPPORT_KEY],
    )
    conflicts += _contradictions(architecture)
    errors = [f"{file}: {conflict}: correct it, or download it again" for conflict in conflicts]
    errors += _errors(values, rope, local_rope, architecture)
    if errors:
        raise ConfigError(*errors)
    return architecture


def _errors(
    values: RawValues,
    rope: dict[str, Any],
    local_rope: dict[str, Any],
    architecture: Architecture,
) -> Iterator[str]:
    """Yield the errors of values that are not supported."""
    file = architecture.file
    family = architecture.family
    for key in _unsupported(values, architecture):
        value = shorten(repr(architecture.text_config.get(key)))
        remedy = REMEDIES.get(key, "choose another model, or remove the key if the model computes the same without it")
        yield f"{file} of this {architecture.named} has {key} = {value}, which is not supported: {remedy}"
    plain = {"rope_type": "default"} | local_rope
    for positions, scalings in ((rope, family.rope_scalings), (plain, PLAIN_ROPE)):
        for why in unsupported_rope(positions, scalings, family):
            yield f"{file}: rope {shorten(str(positions))} is not supported{why}"


def _is_on(switch: bool | str, values: RawValues) -> bool:
    """Return a switch of a family, which may be the name of a key of config.json."""
    return values.get(switch, False) if isinstance(switch, str) else switch


def _contradictions(model: Architecture) -> Iterator[str]:
    """Yield sizes that no model can have together."""
    heads = model.num_heads
    shared = model.num_kv_heads
    experts = model.experts
    size = model.head_size
    name = "the size of a head"
    if model.latent:
        size = model.latent.rope_size
        name = LATENT_SIZES["rope_size"]
        if model.head_dim not in (None, size):  # transformers rotates head_dim numbers, SGLang the others
            yield f"head_dim {model.head_dim} is another number than {name} {size}"
    elif heads % shared:
        yield f"num_key_value_heads {shared} does not divide num_attention_heads {heads}"
    if model.full_heads and heads % model.full_heads.kv_heads:
        yield f"{FULL_KV_HEADS} {model.full_heads.kv_heads} does not divide num_attention_heads {heads}"
    rotated = size * model.rope.part
    divisors = len(model.rope.divisors)
    if not model.latent and not model.head_dim and model.hidden_size % heads:
        yield f"num_attention_heads {heads} does not divide hidden_size {model.hidden_size}, and head_dim is not set"
    elif rotated % 2:
        part = "" if model.rope.part == 1 else f"{model.rope.part:g} of "
        yield f"{part}{name} is {rotated:g}, but rotary positions need an even one"
    elif divisors and divisors != rotated // 2:
        yield f"short_factor has {divisors} numbers, but rotary positions need {rotated // 2:g}"
    written = model.text_config.get(ROTARY_SIZE)
    if written and model.family.rotary_part and written != rotated:
        yield f"{ROTARY_SIZE} is {written}, {ROTARY_PART} {model.rope.part:g} x head_dim {size} is another number"
    if model.vision and sum(model.vision.mrope_section) != rotated // 2:
        yield f"mrope_section {model.vision.mrope_section} has not {rotated // 2:g} numbers together, half of {name}"
    if model.vision and model.vision.sizes["out_hidden_size"] != model.hidden_size:
        yield f"out_hidden_size of vision_config is not hidden_size {model.hidden_size}"
    layers = model.linear.layers if model.linear else model.windows
    for key, kinds in (("layer_types", layers), (ROTATED, model.unrotated)):
        if kinds and len(kinds) != model.num_layers:
            yield f"{key} has {len(kinds)} layers, num_hidden_layers is {model.num_layers}"
    if any(model.windows) and not model.sliding_window:
        yield "sliding_window is not set, but layers have sliding_attention"
    if model.linear and model.linear.value_heads % model.linear.key_heads:
        yield (
            f"linear_num_key_heads {model.linear.key_heads} does not divide linear_num_value_heads "
            f"{model.linear.value_heads}"
        )
    if experts and experts.top_k > experts.count:
        yield f"num_experts_per_tok {experts.top_k} is more than the {experts.count} experts"
    if experts and experts.groups and experts.count % experts.groups[0]:
        yield f"n_group {experts.groups[0]} does not divide the {experts.count} experts"


def _missing(raw: RawValues, values: RawValues, family: Family) -> Iterator[str]:
    for key in _needed(values, family):
        if key not in values and not (key in (LATENT_SIZES["q_rank"], LAYER_INPUT) and key in raw):
            yield key
    if family.experts and not any(key in values for key in family.experts.count):
        yield family.experts.count[-1]


def _needed(values: RawValues, family: Family) -> list[str]:
    """Return the keys without which a model of the family is not described."""
    keys = list(SIZES.values())
    if family.experts:
        keys += family.experts.keys
        keys += ("n_group", "topk_group") if _has_groups(values, family.experts) else ()
    keys += [key for key, _ in family.scales.values()]
    if family.latent_attention:
        keys += LATENT_SIZES.values()
    if family.linear_attention:
        keys += LINEAR_SIZES.values()
    if family.full_heads:
        keys += (LAYER_INPUT, "head_dim", "layer_types")
    return list(dict.fromkeys(keys))


def _has_groups(values: RawValues, experts: ExpertFormat) -> bool:
    return experts.groups_rated_by is not None and experts.grouping_method in (None, values.get("topk_method"))


def _latent(values: RawValues) -> LatentAttention:
    sizes: dict[str, Any] = {size: values.get(key) for size, key in LATENT_SIZES.items()}
    return LatentAttention(**sizes)


def _linear(values: RawValues) -> LinearAttention:
    sizes: dict[str, Any] = {size: values[key] for size, key in LINEAR_SIZES.items()}
    layers = layers_of(values, "linear_attention", positive(values, FULL_PATTERN, 4))
    return LinearAttention(**sizes, layers=layers, full_interval=values.get(FULL_PATTERN))


def _experts(values: RawValues, experts: ExpertFormat) -> Experts:
    renormalizes = experts.renormalizes
    dense = values[experts.dense_layers] if experts.dense_layers else 0
    has_groups = _has_groups(values, experts) and values["topk_group"] < values["n_group"]
    return Experts(
        count=next(values[key] for key in experts.count if key in values),
        top_k=values["num_experts_per_tok"],
        ffn_size=values[experts.ffn],
        shared_ffn_size=prod(values[key] for key in experts.shared_ffn) if experts.shared else None,
        num_dense_layers=min(dense, values["num_hidden_layers"]),
        renormalizes=values.get("norm_topk_prob", False) if renormalizes is None else renormalizes,
        scaling=positive(values, experts.scaling) if experts.scaling else None,
        groups=(values["n_group"], values["topk_group"]) if has_groups else None,
    )


def _unsupported(values: RawValues, architecture: Architecture) -> Iterator[str]:
    """Yield the keys of config.json whose values are not supported."""
    family = architecture.family
    raw = architecture.text_config
    only = {**ONLY, "qkv_bias": (architecture.qkv_bias,), "use_qk_norm": (architecture.qk_layernorm,)}
    only |= {"hidden_act": (family.activation, None)}
    only |= {switch: (False, True) for switch in (family.qkv_bias, family.qk_layernorm) if isinstance(switch, str)}
    only |= ONLY_OF_EXPERTS if family.experts else {}
    quantized = values.get("quantization_config") or {}
    if family.experts and family.experts.stacked and quantized.get("quant_method") == "mxfp4":  # read in bf16
        only["quantization_config"] = (quantized,)
    only |= family.only
    only |= {ROTARY_PART: (values.get(ROTARY_PART, 1),)} if family.rotary_part is not None else {}
    for key, supported in only.items():
        if key in raw and raw[key] not in supported and (raw[key] is not None or all(supported)):
            yield key
    # A window is at least as long as any row.
    attention = {"full_attention", "sliding_attention" if architecture.sliding_window else "full_attention"}
    attention |= {"linear_attention"} if architecture.linear else set()
    if not attention.issuperset(values.get("layer_types", ())):
        yield "layer_types"
    if architecture.full_heads:
        yield from irregular_layers(values, architecture.windows)
    if family.experts and architecture.experts:
        only |= dict.fromkeys(family.experts.count, ())
        yield from _unsupported_routing(values, family.experts, architecture.experts)
    read = {*COMPUTED.split(), *_needed(values, family), *only, *family.rope_keys}
    yield from uncomputed(values, {*read, *family.ignores})
    # transformers chooses the computation by model_type, so the type of a family with other norms is refused.
    kind = values.get("model_type", "").removesuffix("_text").replace("_", "")
    own = _computing(family)
    alike = (name for name, one in FAMILIES.items() if _computing(one) == own)
    if not any(kind in name.lower().replace("_", "") for name in alike):
        yield "model_type"


def _computing(family: Family) -> tuple[Any, ...]:
    """Return the properties of a family's computation that no key of config.json names."""
    return (
        family.norms,
        family.norms_all_heads,
        family.scales,
        family.linear_attention,
        family.unrotated_pattern,
        family.full_heads,
    )


def _unsupported_routing(values: RawValues, written: ExpertFormat, experts: Experts) -> Iterator[str]:
    if experts.top_k == 1 and experts.renormalizes:
        yield "num_experts_per_tok"  # its probability would always be 1, and the router could not learn
    yield from (key for key in written.shared_ffn if not values[key])
    # Megatron's score of a group is the sum of its best top_k // topk_group scores.
    if experts.groups and experts.top_k // experts.groups[1] != written.groups_rated_by:
        yield "topk_group"

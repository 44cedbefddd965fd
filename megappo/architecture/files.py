"""The JSON files of a Hugging Face folder: reading them, each value of the kind that is expected, and writing them."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.architecture.architecture import Architecture
from megappo.architecture.dtypes import DTYPES
from megappo.config.errors import shorten
from megappo.config.text_files import TextFileError, read_json

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LARGEST_SIZE = 2**31 - 1
LARGEST_NUMBER = 1e30


@dataclass(frozen=True)
class Kind:
    """What a value may be, in words and as a test."""

    words: str
    fits: Callable[[Any], bool]


def _is_int(value: Any, low: int) -> bool:
    return type(value) is int and low <= value <= LARGEST_SIZE


def _is_number(value: Any, low: float) -> bool:
    return type(value) in (int, float) and low <= value <= LARGEST_NUMBER  # NaN is neither


SIZE = Kind("int >= 1", lambda value: _is_int(value, 1))
COUNT = Kind("int >= 0", lambda value: _is_int(value, 0))
POSITIVE = Kind("number > 0", lambda value: _is_number(value, 1e-30))
NUMBER = Kind("number >= 0", lambda value: _is_number(value, 0))
FLAG = Kind("true | false", lambda value: isinstance(value, bool))
TEXT = Kind("text", lambda value: isinstance(value, str))
TEXTS = Kind("list of text", lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value))
NAMES = Kind("non-empty list of text", lambda value: TEXTS.fits(value) and bool(value))
SECTION = Kind("object", lambda value: isinstance(value, dict))
FILES = Kind(
    "object of names of files in its own folder",
    lambda value: (
        SECTION.fits(value) and TEXTS.fits([*value.values()]) and all(Path(i).name == i for i in value.values())
    ),
)
TOKENS = Kind("token id or list of them", lambda value: all(COUNT.fits(i) for i in _listed(value)))

CONFIG = {
    "architectures": NAMES,
    "layer_types": TEXTS,
    **dict.fromkeys(("rope_parameters", "rope_scaling", "quantization_config"), SECTION),
    **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"), SIZE),
    **dict.fromkeys(("head_dim", "intermediate_size", "vocab_size", "max_position_embeddings"), SIZE),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), SIZE),
    **dict.fromkeys(("moe_intermediate_size", "n_group", "topk_group", "original_max_position_embeddings"), SIZE),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), SIZE),
    **dict.fromkeys(("first_k_dense_replace", "n_shared_experts", "sliding_window"), COUNT),
    **dict.fromkeys(("shared_expert_intermediate_size", "num_nextn_predict_layers", "num_mtp_layers"), COUNT),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "routed_scaling_factor"), POSITIVE),
    **dict.fromkeys(("tie_word_embeddings", "use_sliding_window", "norm_topk_prob"), FLAG),
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "rope_interleave"), FLAG),
    **dict.fromkeys(("hidden_act", "scoring_func", "topk_method", "model_type"), TEXT),
}
"""The values of config.json that are read anywhere; null is as good as nothing."""
ROPE = {
    **dict.fromkeys(("rope_type", "type"), TEXT),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "rope_theta"), POSITIVE),
    **dict.fromkeys(("beta_fast", "beta_slow", "attention_factor", "partial_rotary_factor"), POSITIVE),
    **dict.fromkeys(("mscale", "mscale_all_dim"), NUMBER),
    "original_max_position_embeddings": SIZE,
    "truncate": FLAG,
}
"""The same of its rope_parameters or rope_scaling."""


def read_model_config(folder: Path) -> dict[str, Any]:
    """config.json, with every value that is read of the kind that is expected.

    Raises:
        TextFileError: it cannot be read, or holds wrong values.
    """
    file = folder / CONFIG_FILE
    found = _read(file, CONFIG)
    for name in ("rope_parameters", "rope_scaling"):
        _check(file, found.get(name) or {}, ROPE, f"{name}.")
    return found


def named_architecture(folder: Path) -> str | None:
    """The first of `architectures` in config.json, whatever else it holds.

    Raises:
        TextFileError: it cannot be read.
    """
    named = _read(folder / CONFIG_FILE, {}).get("architectures")
    return str(named[0]) if isinstance(named, list) and named else None


def write_model_config(architecture: Architecture, folder: Path, dtype: str | None = None) -> None:
    """Write config.json of a model that is exported.

    Args:
        dtype: of the weights, one of DTYPES; None = what was read says it.
    Raises:
        OSError: it cannot be written.
    """
    name = DTYPES[dtype].torch if dtype else None
    written = architecture.hf_config() | ({"torch_dtype": name, "dtype": name} if name else {})
    (folder / CONFIG_FILE).write_text(json.dumps(written, indent=2) + "\n")


def end_tokens(folder: Path) -> list[int]:
    """eos_token_id of generation_config.json; none where there is none.

    Raises:
        TextFileError: as `read_model_config`.
    """
    file = folder / GENERATION_FILE
    found = _read(file, {"eos_token_id": TOKENS}) if file.is_file() else {}
    return [token for token in _listed(found.get("eos_token_id")) if token is not None]


def read_weight_map(folder: Path) -> dict[str, str]:
    """The file of each tensor, from the index of a folder's safetensors.

    Raises:
        TextFileError: it cannot be read, or lists none.
    """
    file = folder / INDEX
    found = _read(file, {"weight_map": FILES}).get("weight_map")
    if not found:
        raise TextFileError(f"cannot use {file}: it has no weight_map: copy it again")
    return dict(found)


def _read(file: Path, kinds: dict[str, Kind]) -> dict[str, Any]:
    try:
        found = read_json(file)
    except TextFileError as error:
        raise TextFileError(f"cannot use {file}: {error}") from error
    _check(file, found, kinds)
    return found


def _check(file: Path, found: dict[str, Any], kinds: dict[str, Kind], prefix: str = "") -> None:
    wrong = list(_wrong(found, kinds, prefix))
    if wrong:
        raise TextFileError(f"cannot use {file}: {'; '.join(wrong)}: correct it, or copy the file again")


def _wrong(found: dict[str, Any], kinds: dict[str, Kind], prefix: str) -> Iterator[str]:
    for key, kind in kinds.items():
        if found.get(key) is not None and not kind.fits(found[key]):
            yield f"{prefix}{key}: expected {kind.words}, found {shorten(json.dumps(found[key]))}"


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]

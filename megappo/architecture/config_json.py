"""Reading and writing config.json, and the other JSON files of a Hugging Face folder, with every value checked."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.architecture.architecture import Architecture
from megappo.architecture.dtypes import DTYPES
from megappo.config.config_error import shorten
from megappo.config.text_files import TextFileError, read_json

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LARGEST_SIZE = 2**31 - 1
LARGEST_NUMBER = 1e30


@dataclass(frozen=True)
class Kind:
    """Values that a key may have, in words and as a test."""

    words: str
    fits: Callable[[Any], bool]


SIZE = Kind("int >= 1", lambda value: type(value) is int and 1 <= value <= LARGEST_SIZE)
COUNT = Kind("int >= 0", lambda value: type(value) is int and 0 <= value <= LARGEST_SIZE)
# NaN is neither
NUMBER = Kind("number >= 0", lambda value: type(value) in (int, float) and 0 <= value <= LARGEST_NUMBER)
POSITIVE = Kind("number > 0", lambda value: NUMBER.fits(value) and value >= 1e-30)
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
"""Keys of config.json that are read anywhere, and their values; null counts as absent."""
ROPE = {
    **dict.fromkeys(("rope_type", "type"), TEXT),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "rope_theta"), POSITIVE),
    **dict.fromkeys(("beta_fast", "beta_slow", "attention_factor", "partial_rotary_factor"), POSITIVE),
    **dict.fromkeys(("mscale", "mscale_all_dim"), NUMBER),
    "original_max_position_embeddings": SIZE,
    "truncate": FLAG,
}
"""The same for its rope_parameters or rope_scaling."""

WITHOUT_EFFECT = re.compile(
    r"""(?x)
    # private, initialisation, dropout (there is none here), losses, caches, lengths, generation
    ^(_|unsloth|init|max_seq|use_fused) | initializ|dropout|pdrop|loss|cache|flash|sdpa|version|num_beam|ngram_size
    | (_token_ids?|(max|min|seq|sequence|context)_length|_penalty|suppress_tokens)$
    # sizes that others follow from, how the model was made, what its trainer or a generation reads
    | ^(
    attn_implementation |auto_map |bad_words_ids |chunk_size_feed_forward |do_sample |dtype |early_stopping
    |experts_implementation |ffn_dim_multiplier |finetuning_task |gradient_checkpointing |id2label
    |is_llama_config |label2id |max_window_layers |multiple_of |n_ctx |n_positions |name_or_path
    |neftune_noise_alpha |num_labels |num_return_sequences |output_attentions |output_hidden_states
    |output_router_logits |output_scores |padding_side |prefix |pretraining_tp |problem_type |pruned_heads
    |remove_invalid_values |return_dict |return_dict_in_generate |summary_type |task_specific_params |temperature
    |tie_encoder_decoder |tie_last_hidden_states |tokenizer_class |top_k |top_p |torch_dtype |torchscript
    |transformers\.js_config |typical_p |use_bfloat16 |vocab_padded
    )$"""
)
"""Keys of config.json without effect on what a model computes; a family has further ones (`Family.ignores`)."""
FACTORS = re.compile("(multiplier|scale|scaling|factor|pct|percent)$")
"""Keys of factors, which 1 turns off."""
CHOICES = re.compile("(type|act|fn|func|function|activation|embedding|impl|layout|method|mode|pattern)$")
"""Keys whose text chooses what is computed; any other text is a note."""


def read_model_config(folder: Path) -> dict[str, Any]:
    """Read config.json, and check every value that is used.

    Raises:
        TextFileError: it cannot be read, or holds wrong values.
    """
    file = folder / CONFIG_FILE
    found = _read(file, CONFIG)
    for name in ("rope_parameters", "rope_scaling"):
        _check(file, found.get(name) or {}, ROPE, f"{name}.")
    return found


def named_architecture(folder: Path) -> str | None:
    """Return the first of `architectures` in config.json, without a check of anything else.

    Raises:
        TextFileError: it cannot be read.
    """
    named = _read(folder / CONFIG_FILE, {}).get("architectures")
    return str(named[0]) if isinstance(named, list) and named else None


def write_model_config(architecture: Architecture, folder: Path, dtype: str | None = None) -> None:
    """Write config.json of an exported model.

    Args:
        dtype: of the weights, one of DTYPES; None = as in the config.json that was read.
    Raises:
        OSError: it cannot be written.
    """
    name = DTYPES[dtype].torch if dtype else None
    written = architecture.hf_config() | ({"torch_dtype": name, "dtype": name} if name else {})
    (folder / CONFIG_FILE).write_text(json.dumps(written, indent=2) + "\n")


def end_tokens(folder: Path) -> list[int]:
    """Read eos_token_id of generation_config.json; [] without the file or the key.

    Raises:
        TextFileError: as `read_model_config`.
    """
    file = folder / GENERATION_FILE
    found = _read(file, {"eos_token_id": TOKENS}) if file.is_file() else {}
    return [token for token in _listed(found.get("eos_token_id")) if token is not None]


def read_weight_map(folder: Path) -> dict[str, str]:
    """Read the file of each tensor from the index of a folder's safetensors.

    Raises:
        TextFileError: it cannot be read, or lists none.
    """
    file = folder / INDEX
    found = _read(file, {"weight_map": FILES}).get("weight_map")
    if not found:
        raise TextFileError(f"cannot use {file}: it has no weight_map: copy it again")
    return dict(found)


def uncomputed(found: Mapping[str, Any], computed: Collection[str]) -> Iterator[str]:
    """Keys whose values need something that is not computed; those in `computed` are read elsewhere."""
    for key, value in found.items():
        if key not in computed and not WITHOUT_EFFECT.search(key) and not _is_off(key, value):
            yield key


def _is_off(key: str, value: Any) -> bool:
    """Return whether a value turns its key off: null, false, 0, something empty, a factor of 1, a note."""
    if isinstance(value, str):
        return not value or not CHOICES.search(key)
    if FACTORS.search(key) and type(value) in (int, float):
        return value == 1
    return not value


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

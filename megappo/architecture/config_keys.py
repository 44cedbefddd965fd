"""Keys of config.json: what is read, what has no effect, and what is supported with some values only."""

import re
from collections.abc import Collection, Iterator
from math import inf
from typing import Any

from megappo.architecture.families import LAYER_INPUT, RawValues
from megappo.architecture.model_folder import INDEX, SINGLE, UNQUANTIZED
from megappo.config.config_error import shorten

ROPE_KEYS = """
    rope_type type rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings beta_fast
    beta_slow attention_factor mscale mscale_all_dim truncate short_factor long_factor
    """
"""Keys of rotary positions that are read; a kind ignores the numbers of others."""
ONLY: dict[str, tuple[Any, ...]] = {
    "quantization_config": ({},),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "rope_is_neox_style": (True,),
    "rope_interleaved": (False,),
    "is_causal": (True,),
    "activation": ("silu", "swiglu", None),
    "position_embedding_type": ("rope", "rotary", None),
    "transformers_weights": (SINGLE, INDEX, None),
}
"""Keys of config.json with the values that are supported; an absent key means one of them. So does null where null or
another value for "off" is among them: elsewhere transformers and SGLang read it as "off", not as their default."""
_SIZE_WITHOUT = "choose a size without them, such as 31B"
REMEDIES = {
    "quantization_config": f"{UNQUANTIZED} and remove the key",
    LAYER_INPUT: f"its layers have embeddings of their own: {_SIZE_WITHOUT}",
    "num_kv_shared_layers": f"its layers share keys and values with earlier ones: {_SIZE_WITHOUT}",
    "enable_moe_block": f"its layers have experts beside an MLP: {_SIZE_WITHOUT}",
}
"""Key that is not supported -> the remedy, where it differs from the remedy of most keys."""
ONLY_OF_EXPERTS: dict[str, tuple[Any, ...]] = {
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "router_jitter_noise": (0,),
    "moe_layer_freq": (1,),
}
"""The same for a mixture of experts."""
COMPUTED = """
    architectures layer_types model_type rope_parameters rope_scaling rope_theta head_dim
    original_max_position_embeddings num_key_value_heads sliding_window use_sliding_window tie_word_embeddings
    norm_topk_prob num_nextn_predict_layers num_mtp_layers
    """
"""Further keys of config.json that are read."""
WITHOUT_EFFECT = re.compile(
    r"""(?x)
    # private, initialisation, lengths; and as whole words: dropout (there is none here), losses, caches, generation
    ^(_|unsloth|init|max_seq|use_fused)
    | (^|_)(initializer|dropout|pdrop|loss|cache|flash|sdpa|version|num_beams|num_beam_groups|ngram_size)(_|$)
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
    |transformers\.js_config |typical_p |use_bfloat16 |value_support |vocab_padded
    )$"""
)
"""Keys of config.json without effect on what a model computes; a family has further ones (`Family.ignores`)."""
FACTORS = re.compile("(multiplier|scale|scaling|factor|pct|percent)$")
"""Keys of factors, which 1 turns off."""
CHOICES = re.compile("(type|act|fn|func|function|activation|embedding|impl|layout|method|mode|pattern)$")
"""Keys whose text chooses what is computed; any other text is a note."""


WITHOUT_IT: dict[str, Any] = {
    "apply_yarn_scaling": True,
    "apply_scale": True,
    "truncate": True,
    "short_mscale": None,
    "long_mscale": None,
    "swiglu_limit": None,
}
"""Keys that only SGLang reads, or whose null it reads as "off" -> the value that changes nothing."""


def uncomputed(raw: RawValues, computed: Collection[str]) -> Iterator[str]:
    """Yield the keys whose values need something that is not computed; keys in `computed` are read elsewhere."""
    for key, value in raw.items():
        if key not in computed and not WITHOUT_EFFECT.search(key) and not _is_off(key, value):
            yield key


def _is_off(key: str, value: Any) -> bool:
    """Return whether a value turns its key off: null, false, 0, something empty, a factor of 1, a note."""
    if key in WITHOUT_IT:
        return value is WITHOUT_IT[key]
    if isinstance(value, str):
        return not value or not CHOICES.search(key)
    if FACTORS.search(key) and type(value) in (int, float):
        return value == 1
    return not value


def positive(values: RawValues, key: str, default: float | None = None) -> float:
    """Return the number above 0 that a key has.

    Raises:
        TypeError: it has something else.
    """
    number = values.get(key, default)
    if type(number) not in (int, float) or not 0 < number < inf:
        raise TypeError(f"{key}: expected a number greater than 0, found {shorten(repr(number))}")
    return number

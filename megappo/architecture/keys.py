"""Keys of config.json that no family computes: those without effect, and values that mean "off"."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

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
"""Keys that change nothing of what a model computes; a family names further ones (`Family.ignores`)."""
FACTORS = re.compile("(multiplier|scale|scaling|factor|pct|percent)$")
"""Names of factors, which 1 turns off."""
CHOICES = re.compile("(type|act|fn|func|function|activation|embedding|impl|layout|method|mode|pattern)$")
"""Names whose text chooses what is computed; any other text is a note."""


def uncomputed(found: Mapping[str, Any], computed: Collection[str]) -> Iterator[str]:
    """Keys whose values ask for something that is not computed; those in `computed` are read elsewhere."""
    for key, value in found.items():
        if key not in computed and not WITHOUT_EFFECT.search(key) and not _is_off(key, value):
            yield key


def _is_off(key: str, value: Any) -> bool:
    """Whether a value asks for nothing: null, false, 0, something empty, a factor of 1, a note."""
    if isinstance(value, str):
        return not value or not CHOICES.search(key)
    if FACTORS.search(key) and type(value) in (int, float):
        return value == 1
    return not value

"""What several benchmarks do: a random Llama of some size, and the seconds of a call."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar


def write_llama(folder: Path, parameters: float, *, hidden: int, vocabulary: int) -> None:
    """A random fp32 Llama of about so many parameters, embeddings and head included."""
    per_layer = 4 * hidden**2 + 3 * hidden * 4 * hidden
    config = AutoConfig.for_model(
        "llama",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=max(1, round((parameters - 2 * vocabulary * hidden) / per_layer)),
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    disable_progress_bar()
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def seconds(action: Callable[[], object]) -> float:
    """That it takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start

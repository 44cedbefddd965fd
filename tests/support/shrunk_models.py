"""Public models with tiny sizes and random weights: every other key of config.json as published."""

import json
from pathlib import Path
from typing import Any

import torch
from tiny_models import move_buffers
from tiny_shapes import VOCAB_SIZE
from transformers import AutoConfig, AutoModelForCausalLM

HEADS, HEAD_SIZE, POSITIONS = 4, 16, 64
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": POSITIONS,
    "max_window_layers": 3,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 3,
    "vocab_size": VOCAB_SIZE,
    "head_dim": HEAD_SIZE,
    "global_head_dim": HEAD_SIZE * 2,
    "num_global_key_value_heads": 1,
    "rotary_dim": HEAD_SIZE // 2,
    "original_max_position_embeddings": POSITIONS,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts": 8,
    "num_local_experts": 4,
    "n_routed_experts": 8,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
"""Values for keys of config.json; only keys that a model has are set."""


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """Return a published config.json with tiny sizes, in which heads are shared and experts grouped as before."""
    small = config | {key: size for key, size in SIZES.items() if config.get(key)}
    shared = config["num_key_value_heads"]
    small["num_key_value_heads"] = {1: 1, config["num_attention_heads"]: HEADS}.get(shared, HEADS // 2)
    if "num_experts_per_tok" in config:
        small["num_experts_per_tok"] = min(4, config["num_experts_per_tok"])
    if config.get("n_group", 1) > 1:
        small |= {"n_group": 4, "topk_group": 2}
    if config.get("rope_scaling"):
        original = {"original_max_position_embeddings": POSITIONS // 4}
        head_size = small.get("head_dim") or small["hidden_size"] // HEADS
        # Each rotation has a factor in LongRoPE's lists.
        rotations = int(head_size * config.get("partial_rotary_factor", 1)) // 2
        small["rope_scaling"] = {
            key: value[:rotations] if isinstance(value, list) else original.get(key, value)
            for key, value in config["rope_scaling"].items()
        }
    if config["model_type"] in ("gemma3_text", "gemma4_text", "olmo3"):  # one of so many layers attends to all tokens
        small |= {"num_hidden_layers": 6, "sliding_window": 4}
    if "full_attention_interval" in config:  # the last of so many layers
        small["num_hidden_layers"] = config["full_attention_interval"]
    if "no_rope_layers" in config:  # the last of so many layers
        small["num_hidden_layers"] = config["no_rope_layer_interval"]
    for key in ("layer_types", "no_rope_layers"):
        if key in config:
            small[key] = config[key][: small["num_hidden_layers"]]
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if config.get(key) is not None:
            tokens = config[key] if isinstance(config[key], list) else [config[key]]
            small[key] = [token % VOCAB_SIZE for token in tokens]
            small[key] = small[key] if isinstance(config[key], list) else small[key][0]
    return small


def shrunk_folder(folder: Path, config: dict[str, Any]) -> Path:
    """Save a shrunk model, in the dtype and with the config.json of the published one."""
    small = json.dumps(shrunk(config))
    folder.mkdir()
    (folder / "config.json").write_text(small)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    move_buffers(model)
    model.to(getattr(torch, config.get("torch_dtype") or config["dtype"])).save_pretrained(folder)
    (folder / "config.json").write_text(small)
    return folder

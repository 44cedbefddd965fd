"""The config.json of published models, as far as a plan reads it: they can be planned without a download."""

import json
from pathlib import Path

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "tie_word_embeddings": False}
LLAMA31 = LLAMA | {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "vocab_size": 128256,
}


def _sizes(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int) -> dict[str, object]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


UNTIED = {"tie_word_embeddings": False, "vocab_size": 152064}
PUBLISHED = {
    "Qwen2.5-0.5B-Instruct": QWEN2 | _sizes(24, 896, 4864, 14, 2),
    "Qwen2.5-1.5B": QWEN2 | _sizes(28, 1536, 8960, 12, 2),
    "Qwen2.5-7B": QWEN2 | UNTIED | _sizes(28, 3584, 18944, 28, 4),
    "Qwen2.5-32B": QWEN2 | UNTIED | _sizes(64, 5120, 27648, 40, 8),
    "deepseek-llm-7b-chat": LLAMA
    | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "vocab_size": 102400}
    | _sizes(30, 4096, 11008, 32, 32),
    "Llama-3.1-8B": LLAMA31 | _sizes(32, 4096, 14336, 32, 8),
    "Llama-3.1-70B": LLAMA31 | _sizes(80, 8192, 28672, 64, 8),
    "Qwen3-30B-A3B": QWEN2
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "tie_word_embeddings": False,
    }
    | _sizes(48, 2048, 6144, 32, 4),
}
"""By the name of the repository on the Hugging Face hub."""


def published_folders(root: Path) -> Path:
    """Write `models/NAME/config.json` of each model under a root, without weights and tokenizers."""
    for name, config in PUBLISHED.items():
        (root / "models" / name).mkdir(parents=True)
        (root / "models" / name / "config.json").write_text(json.dumps(config))
    return root

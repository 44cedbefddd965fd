"""Random models and their train engines, for the stages that need one."""

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import tiny_shapes
import torch
from common import DEVICE, sized
from ppo_engines import fill_adapters
from transformers import AutoConfig, AutoModelForCausalLM

from megappo.architecture.architecture import Architecture
from megappo.architecture.parsing import read_architecture
from megappo.config.model_sections import Lora, Optim
from megappo.config.sections import Model, Parallel
from megappo.models.gpt import build_model
from megappo.models.heads import output_weight, policy_head
from megappo.models.train_engine import TrainedEngine
from megappo.placement.groups import ComponentGroups
from megappo.weights.export import Export
from megappo.weights.load import load_hf

QWEN = dict(
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    max_position_embeddings=32_768,
    tie_word_embeddings=True,
)
"""A model of 0.6 billion parameters."""
SHAPE = sized(QWEN, QWEN | tiny_shapes.SHAPE | tiny_shapes.TWO_LAYERS)
VOCABULARY, HIDDEN = SHAPE["vocab_size"], SHAPE["hidden_size"]
EXPERTS = dict(num_hidden_layers=8, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=768)
UNTIED = {"tie_word_embeddings": False}  # SGLang 0.5.23 has no tied mixtures
GPT_OSS = dict(num_hidden_layers=8, num_local_experts=32, num_experts_per_tok=4, intermediate_size=768, head_dim=64)
GEMMA4 = dict(num_hidden_layers=12, num_key_value_heads=8, num_global_key_value_heads=4, head_dim=256)
GEMMA4 |= dict(
    global_head_dim=512, sliding_window=512, layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 2
)
GEMMA3 = dict(num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=4, head_dim=256, sliding_window=512)
GEMMA3 |= dict(query_pre_attn_scalar=256, layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 2)
MLA = dict(num_hidden_layers=8, num_key_value_heads=16, q_lora_rank=768, kv_lora_rank=512, qk_nope_head_dim=128)
MLA |= dict(qk_rope_head_dim=64, v_head_dim=128, head_dim=64, n_routed_experts=32, moe_intermediate_size=768)
CHANGES = {
    "qwen3": {},
    "qwen3_moe": sized(EXPERTS | {"norm_topk_prob": True}, tiny_shapes.EXPERTS) | UNTIED,
    "gpt_oss": sized(GPT_OSS, tiny_shapes.GPT_OSS) | UNTIED,
    "gemma3_text": tiny_shapes.GEMMA3 | sized(GEMMA3, {"num_hidden_layers": 4}),
    "deepseek_v3": tiny_shapes.DEEPSEEK_V3 | sized(MLA, {"head_dim": 8}) | UNTIED,
    "gemma4_text": tiny_shapes.GEMMA4 | sized(GEMMA4, {"num_hidden_layers": 4}),
    "qwen3_next": sized(EXPERTS | {"full_attention_interval": 4}, tiny_shapes.QWEN3_NEXT) | UNTIED,
}
"""Model type -> changes to SHAPE; each mixture has about a billion parameters."""


def model_folder(folder: Path, model_type: str = "qwen3", **changes: Any) -> Path:
    """A random model of this machine's size, in bf16, made where it is fast."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SHAPE | changes)
    config.update(changes)  # transformers forgets full_attention_interval, which SGLang reads
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def architecture_of(folder: Path, lora: Lora | None = None) -> Architecture:
    return read_architecture(folder).with_lora(lora)


def trained_engine(
    folder: Path,
    groups: ComponentGroups,
    *,
    recompute: str = "none",
    max_tokens: int = 16_384,
    lora: Lora | None = None,
    without: Collection[str] = (),
) -> TrainedEngine:
    """An actor in bf16 with the folder's weights, without some switches; adapters change the model from the start."""
    architecture = architecture_of(folder, lora)
    model = Model(path=str(folder), dtype="bf16")
    chunks = build_model(architecture, model, Parallel(), groups, recompute=recompute, trained=True)
    chunks[0].config.switches -= frozenset(without)
    load_hf(chunks, folder, architecture, groups)
    if lora is not None:
        fill_adapters(chunks, architecture, groups)
    weight = partial(output_weight, chunks[-1])
    head = policy_head(weight, groups.collection.tp, architecture.vocab_size, temperature=1.0)
    return TrainedEngine(chunks, groups, head, max_tokens, Optim(lr=1e-5), total_optimizer_steps=100)


def weights_of(engine: TrainedEngine, folder: Path, lora: Lora | None = None) -> dict[str, torch.Tensor]:
    """Return the weights of an engine whose model came from this folder, adapters merged, under their Hugging Face
    names."""
    buckets = Export(engine.chunks, architecture_of(folder, lora), engine.groups).buckets(2**28)
    return {name: tensor.cpu() for bucket in buckets for name, tensor in bucket}


def states_of(engine: TrainedEngine) -> dict[str, torch.Tensor]:
    """Main parameters, moments and step counters of the optimizer."""
    found = {}
    for i, part in enumerate(engine.optimizer.chained_optimizers):
        parameters = [one for group in part.optimizer.param_groups for one in group["params"]]
        for j, parameter in enumerate(parameters):
            found[f"{i}.{j}"] = parameter.detach().cpu().clone()
            for name, value in part.optimizer.state[parameter].items():
                found[f"{i}.{j}.{name}"] = torch.as_tensor(value).cpu().clone()
    return found

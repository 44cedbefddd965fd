"""The attention that models get: TransformerEngine's must be cuDNN's fused one, which it reports itself after a
training step, for each head size, window and data type that `te_fault` lets through; torch's layers compute the others.

python tests/gpu/stages/chosen_attention.py
"""

import tempfile
from pathlib import Path

import torch
from common import DEVICE, one_rank, report
from ppo_engines import Case, make_engine, make_loss, make_rows
from tiny_models import hf_folder
from tiny_shapes import DEEPSEEK_V3, GEMMA3, TWO_LAYERS, VOCAB_SIZE

from megappo.architecture.parsing import read_architecture
from megappo.architecture.switches import te_fault
from megappo.config.sections import Parallel
from megappo.models.packed_attention import PackedAttention
from megappo.models.train_engine import TrainedEngine
from megappo.placement.groups import ComponentGroups
from megappo.placement.layout import Layout
from megappo.runtime import platform

LENGTHS, MAX_TOKENS = ((30, 40), (1, 6), (50, 13)), 256
LATENT = DEEPSEEK_V3 | TWO_LAYERS | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64}
MODELS = {
    **{f"qwen3_{size}": ("qwen3", TWO_LAYERS | {"head_dim": size}) for size in (64, 96, 128, 192, 256)},
    **{f"gemma3_{size}_window": ("gemma3_text", GEMMA3 | {"head_dim": size}) for size in (128, 256)},
    "deepseek_192_128": ("deepseek_v3", LATENT),
}
"""Name with the head size -> model type, and its changes to a tiny shape."""
DTYPES = ("bf16", "fp32")


def has_te(engine: TrainedEngine) -> bool:
    cores = [module for name, module in engine.chunks[0].named_modules() if name.endswith("core_attention")]
    assert cores, "no layer has attention"
    return not isinstance(cores[0], PackedAttention)


def chosen(folder: Path, dtype: str, groups: ComponentGroups) -> str:
    """Train a step, and return the attention that computed it."""
    engine = make_engine(folder, Case(Layout((0,)), max_tokens=MAX_TOKENS, dtype=dtype), groups, "actor")
    rows = make_rows(VOCAB_SIZE, LENGTHS)
    assert engine.train_batch(rows, make_loss("actor", rows)).grad_norm > 0
    fault = te_fault(read_architecture(folder), Parallel(), dtype, platform.compute_capability())
    is_expected = platform.has_transformer_engine() and not fault
    assert has_te(engine) == is_expected, f"layers of TransformerEngine: {not is_expected}; {fault=}"
    if not is_expected:
        return f"torch ({fault or 'no TransformerEngine'})"
    from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends

    assert _attention_backends["use_fused_attention"] and not _attention_backends["use_unfused_attention"]
    return f"TransformerEngine, {_attention_backends['fused_attention_backend']}"


def measure() -> dict:
    """Try every case, so that one that fails hides no other."""
    found: dict = {"stage": "chosen_attention", "capability": platform.compute_capability()}
    faults = []
    with one_rank() as groups, tempfile.TemporaryDirectory() as root:
        for name, (model_type, changes) in MODELS.items():
            with torch.device(DEVICE):
                folder = hf_folder(Path(root, name), model_type, **changes)
            for dtype in DTYPES:
                try:
                    found[f"{name}_{dtype}"] = chosen(folder, dtype, groups)
                except Exception as error:
                    faults.append(f"{name}, {dtype}: {type(error).__name__}: {error}")
    assert not faults, "\n".join([f"{found}", *faults])
    return found


if __name__ == "__main__":
    report(measure)

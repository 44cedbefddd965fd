"""Tiny models of every family against Hugging Face's, then the speed of one of half a billion parameters.

python tests/gpu/stages/models.py
"""

import tempfile
from functools import partial
from pathlib import Path

import torch
from common import CUDA, measured, one_rank, report, sized
from engines import VOCABULARY, model_folder, trained_engine
from ppo_engines import make_loss, make_rows
from tiny_models import VOCAB_SIZE, build, hf_folder, hf_model, outputs, sequences
from tiny_shapes import MIXTURES, TWO_LAYERS, VARIANTS

from megappo.architecture.flops import TRAINING, flops_of
from megappo.architecture.parsing import read_architecture
from megappo.config.sections import Parallel
from megappo.placement.groups import ComponentGroups
from megappo.runtime import platform
from megappo.trainer.statistics import peak_flops

FAMILIES = dict.fromkeys(("llama", "qwen2", "qwen3"), TWO_LAYERS) | VARIANTS | MIXTURES
LENGTHS = sized([(256, 1792)] * 16, [(3, 5)] * 4)
MAX_TOKENS = sized(16_384, 16)
FP32_BOUND = 1e-2 if platform.has_transformer_engine() else 1e-3
"""TransformerEngine computes the products of fp32 in TF32."""


def check_families(root: Path, groups: ComponentGroups) -> dict:
    """The largest difference of logits in fp32 and, since another expert may be chosen there, the mean one in bf16."""
    found = {}
    for family, changes in FAMILIES.items():
        folder = hf_folder(root / family, family, **changes)
        with torch.no_grad():
            expected = torch.cat([hf_model(folder)(tokens[None]).logits[0] for tokens in sequences()])
        for dtype, summary, bound in (("fp32", torch.amax, FP32_BOUND), ("bf16", torch.mean, 0.05)):
            logits = outputs(build(folder, Parallel(), groups, trained=False, dtype=dtype), groups)
            difference = float(summary((logits[0, :, :VOCAB_SIZE].float().cpu() - expected).abs()))
            assert difference < bound, (family, dtype, difference)
            found[f"{family}_{dtype}_difference"] = difference
    return found


def check_speed(root: Path, groups: ComponentGroups) -> dict:
    folder = model_folder(root / "qwen")
    rows = make_rows(VOCABULARY, LENGTHS)
    num_tokens = len(rows.input_ids)
    forward_flops = flops_of(read_architecture(folder)).forward([(sum(pair), pair[1]) for pair in LENGTHS])
    figures, norms = {}, []
    for recompute in ("none", "full"):
        engine = trained_engine(folder, groups, recompute=recompute, max_tokens=MAX_TOKENS)
        loss = make_loss("actor", rows)
        norms.append(engine.train_batch(rows, loss).grad_norm)
        calls = {"forward": partial(engine.forward, rows), "train_step": partial(engine.train_batch, rows, loss)}
        for (name, call), passes in zip(calls.items(), (1, TRAINING), strict=True):
            _, figure = measured(call)
            figure["tokens_per_second"] = num_tokens / figure["seconds"]
            flops_per_second = passes * forward_flops / figure["seconds"]
            figure |= {"tflops": flops_per_second / 1e12, "mfu": flops_per_second / peak_flops("bf16")}
            assert not CUDA or figure["mfu"] < 1, figure
            figures |= {f"{name}_recompute_{recompute}_{key}": value for key, value in figure.items()}
        del engine, calls, call
    assert abs(norms[0] - norms[1]) < 1e-2 * norms[0], f"recomputation changes the gradient's norm: {norms}"
    return {"tokens": num_tokens, **figures}


def measure() -> dict:
    with one_rank() as groups, tempfile.TemporaryDirectory() as root:
        return {"stage": "models", **check_families(Path(root), groups), **check_speed(Path(root), groups)}


if __name__ == "__main__":
    report(measure)

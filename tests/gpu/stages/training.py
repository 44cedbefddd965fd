"""Two Adam steps of tiny actors of the families that TransformerEngine computes, and of adapters, in fp32, against
Hugging Face's on one process.

python tests/gpu/stages/training.py
"""

import tempfile
import traceback
from pathlib import Path

from common import one_rank, report
from hf_training import hf_train
from models import FAMILIES
from ppo_engines import LENGTHS, Case, make_engine, make_loss, make_rows
from tiny_models import hf_folder

from megappo.architecture.parsing import read_architecture
from megappo.config.model_sections import Lora
from megappo.placement.groups import ComponentGroups
from megappo.placement.layout import Layout
from megappo.runtime import platform

STEPS = 2
BOUND = 2e-2 if platform.has_transformer_engine() else 1e-4
"""Relative, of gradient norms; TransformerEngine computes the products of fp32 in TF32."""
ADAPTED = ("qwen2", "qwen3_moe")
CASES = [(family, None) for family in FAMILIES] + [(family, Lora(rank=3, alpha=5.0)) for family in ADAPTED]


def largest_error(folder: Path, lora: Lora | None, groups: ComponentGroups) -> float:
    """Return the largest relative difference of a step's gradient norm."""
    expected = hf_train(folder, "actor", None, STEPS, LENGTHS, lora=lora)["grad_norms"]
    engine = make_engine(folder, Case(Layout((0,)), lora=lora), groups, "actor")
    rows = make_rows(read_architecture(folder).vocab_size)
    loss = make_loss("actor", rows)
    return max(abs(engine.train_batch(rows, loss).grad_norm / norm - 1) for norm in expected)


def measure() -> dict:
    """Try every case, so that one that fails hides no other."""
    found: dict = {"stage": "training"}
    faults = []
    with one_rank() as groups, tempfile.TemporaryDirectory() as root:
        for family, lora in CASES:
            name = family if lora is None else f"{family}_adapters"
            try:
                folder = hf_folder(Path(root, name), family, **FAMILIES[family])
                found[f"{name}_error"] = error = largest_error(folder, lora, groups)
                assert error < BOUND, error
            except Exception:
                faults.append(f"{name}: {traceback.format_exc()}")
    assert not faults, "\n".join([f"{found}", *faults])
    return found


if __name__ == "__main__":
    report(measure)

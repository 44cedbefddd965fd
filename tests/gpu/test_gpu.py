"""GPU-only code: TransformerEngine's layers, NCCL, CUDA IPC and the engine's memory saver, in bf16."""

from pathlib import Path

import pytest
import torch
from spawn import run_ranks
from tiny_models import build, hf_folder, hf_model, outputs, sequences

from megappo.config.sections import Parallel
from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout

pytestmark = pytest.mark.gpu


def _logits_near(rank: int, world_size: int, folder: Path, expected: torch.Tensor) -> None:
    groups = build_groups({"actor": Layout((0,))}, seed=0)["actor"]
    logits = outputs(build(folder, Parallel(), groups, trained=False, dtype="bf16"), groups)
    torch.testing.assert_close(logits[0, :, : expected.shape[1]].float().cpu(), expected, rtol=0.1, atol=0.1)


def test_bf16_logits_are_near_hugging_face(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", "qwen2")
    with torch.no_grad():
        expected = torch.cat([hf_model(folder)(tokens[None]).logits[0] for tokens in sequences()])
    run_ranks(1, _logits_near, folder, expected)

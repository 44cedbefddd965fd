"""What differs on a GPU: TransformerEngine's layers, NCCL, CUDA IPC and the engine's memory saver, in bf16."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from program import ONE_RANK_EACH, REPOSITORY
from spawn import run_ranks
from tiny_models import build, hf_folder, hf_model, outputs, sequences

from megappo.config.schema import Parallel
from megappo.observe.metrics import read_metrics
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


@pytest.mark.timeout(1200)
def test_the_quickstart_learns_on_one_gpu(tmp_path: Path) -> None:
    data, run = tmp_path / "quickstart", tmp_path / "run"
    subprocess.run([sys.executable, "tools/make_quickstart.py", "--output", data], cwd=REPOSITORY, check=True)
    files = [f"model.path={data}/model", f"data.train_files={data}/train.jsonl", f"data.val_files={data}/val.jsonl"]
    # The model's heads are too small for SGLang's faster kernels.
    numbers = ["model.dtype=bf16", "rollout.sync.probe_tolerance=0.05", "rollout.server_args.attention_backend=triton"]
    command = [sys.executable, "-m", "megappo.torchrun", "--standalone", "--nproc-per-node", "1", "-m", "megappo.train"]
    settings = [*ONE_RANK_EACH, *files, *numbers, "trainer.total_steps=20", f"trainer.output_dir={run}"]
    subprocess.run([*command, "configs/quickstart.yaml", *settings], cwd=REPOSITORY, check=True)
    before, *steps = read_metrics(run)
    assert steps[-1]["val/val/score/mean"] > before["val/val/score/mean"] + 0.2
    assert max(step["rollout/log_prob_diff/mean"] for step in steps) < 0.05

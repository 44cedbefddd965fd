"""Two ways to start a run in 16 bits: from weights in a torch_dist folder that are not the Hugging Face folder's, and
from a checkpoint with adapters of actor and critic.

python tests/gpu/stages/starts.py
"""

import shutil
import sys
from pathlib import Path

import torch
from common import CUDA, report
from runs import figures, run_command, train
from safetensors.torch import load_file, save_file
from whole_run import CONFIG, CRITIC_LORA, LORA, SMALL, new_run

from megappo.observe.metrics_file import read_metrics

NOISE = 0.005
BOUND = 0.05


def start(paths: tuple[str, ...], *settings: str) -> None:
    train(CONFIG, [*paths, *(() if CUDA else SMALL), *settings])


def check_agreement(run: Path, num_steps: int) -> list[float]:
    """Check that a run has made the steps, and that its engine has the actor's weights in each."""
    steps = read_metrics(run)
    assert [step["step"] for step in steps] == list(range(1, num_steps + 1)), steps
    differences = [step["rollout/log_prob_diff/mean"] for step in steps]
    assert max(differences) < BOUND, differences
    return differences


def with_noise(model: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Copy a model with noise on its matrices; return the copy's weights."""
    shutil.copytree(model, folder)
    torch.manual_seed(1)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if weight.dim() > 1:
            weights[name] = weight + (NOISE * torch.randn(weight.shape)).to(weight.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


def from_torch_dist() -> dict[str, object]:
    """Train a step with a small learning rate: the result is near the torch_dist folder's weights."""
    run, paths = new_run("starts_torch_dist")
    model, other, torch_dist = (run.parent / name for name in ("model", "other", "torch_dist"))
    expected = with_noise(model, other)
    convert = [sys.executable, "-m", "megappo", "convert", "hf-to-megatron", "--megatron-lm"]
    run_command([*convert, "--input", other, "--output", torch_dist])
    start(paths, f"model.dist_checkpointing_path={torch_dist}", "trainer.total_steps=1", "trainer.export_hf=true")
    found = {
        name: tensor
        for file in (run / "hf_actor").glob("*.safetensors")
        for name, tensor in load_file(file).items()
        if tensor.dim() > 1
    }
    assert found.keys() <= expected.keys()
    error = max(float((tensor.float() - expected[name].float()).abs().mean()) for name, tensor in found.items())
    assert error < NOISE / 10, f"the run did not start from {torch_dist}: {error}"
    return {"log_prob_diffs": check_agreement(run, 1), "error": error}


def resumed_adapters() -> dict[str, object]:
    """Save two steps, and make a third one from the checkpoint."""
    run, paths = new_run("starts_adapters")
    settings = (*LORA, *CRITIC_LORA, "trainer.save_interval=1")
    for num_steps in (2, 3):
        start(paths, *settings, f"trainer.total_steps={num_steps}")
    return {"log_prob_diffs": check_agreement(run, 3), **figures(run)}


def measure() -> dict:
    found: dict = {"stage": "starts"}
    for name, trial in {"torch_dist": from_torch_dist, "adapters": resumed_adapters}.items():
        found |= {f"{name}_{key}": value for key, value in trial().items()}
    return found


if __name__ == "__main__":
    report(measure)

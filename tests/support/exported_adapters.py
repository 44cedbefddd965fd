"""Settings of a run that trains adapters (LoRA), and what its export must hold."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

RANK, ALPHA = 4, 8.0
LORA = (f"actor.lora.rank={RANK}", f"actor.lora.alpha={ALPHA}", f"critic.lora.rank={RANK}")


def exported_adapters(exported: Path) -> dict[str, torch.Tensor]:
    return load_file(exported / "adapter" / "adapter_model.safetensors")


def check_merged(
    exported: Path, base: Path, rank: int = RANK, alpha: float = ALPHA, least_change: float = 1e-3
) -> None:
    """Check that the exported model is `base` with the adapters added, and that each of them was trained.

    Args:
        least_change: least change of the largest entry of each adapted matrix.
    """
    weights, merged = (load_file(folder / "model.safetensors") for folder in (base, exported))
    adapters = exported_adapters(exported)
    settings = json.loads((exported / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (rank, alpha, "LORA")
    assert settings["base_model_name_or_path"] == str(base) and merged.keys() == weights.keys()
    num_adapted = 0
    for name, weight in weights.items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" in adapters:
            num_adapted += 1
            a, module = adapters[f"{prefix}.lora_A.weight"], prefix.rpartition(".")[2]
            assert len(a) == settings["rank_pattern"].get(module, rank)
            assert settings["alpha_pattern"].get(module, alpha) / len(a) == alpha / rank
            product = adapters[f"{prefix}.lora_B.weight"] @ a
            assert product.abs().max() > least_change, f"{name}: nothing was trained"
            weight = weight + alpha / rank * product
        torch.testing.assert_close(merged[name], weight, rtol=0, atol=1e-6)
    assert 2 * num_adapted == len(adapters)

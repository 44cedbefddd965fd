"""Rotary positions as SGLang reads them from folders that transformers saves, against transformers' own."""

import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sglang_ropes
import torch
from ports import free_port
from tiny_shapes import CHANGES, PLAIN_ROPE, SHAPE, YARN, architecture_of
from transformers import AutoConfig, AutoModelForCausalLM

from megappo.architecture.families import FAMILIES
from megappo.architecture.fit import engine_fit_errors
from megappo.architecture.parsing import read_architecture
from megappo.engines import launch

SCALED = {
    "default": {},
    "linear": {"factor": 3.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {key: YARN[key] for key in ("factor", "beta_fast", "original_max_position_embeddings")},
    "longrope": CHANGES["phi3"]["rope_parameters"],
}
OTHERS = ("llama", "mistral", "qwen2", "qwen3")
NOT_BUILT = {"seed_oss", "smollm3", "gemma4_text"}
"""SGLang serves the first two with transformers' code, and Gemma 4 by another config.json than transformers saves."""


def folders(home: Path) -> Iterator[tuple[str, Path]]:
    """Save a model of each family with each kind of rotary positions that it may have, as transformers does."""
    for model_type in {*OTHERS, *CHANGES} - NOT_BUILT:
        family = FAMILIES[architecture_of(model_type)]
        if family.linear_attention:  # SGLang has no class for it on a CPU
            continue
        # Without a scaling SGLang has no latent attention on a CPU (0.5.23, layers/rotary_embedding/factory.py).
        for kind in family.rope_scalings.keys() - ({"default"} if family.latent_attention else set()):
            changes = CHANGES.get(model_type, {})
            rope = PLAIN_ROPE | SCALED[kind] | {"rope_type": kind}
            if "partial_rotary_factor" in changes:
                rope["partial_rotary_factor"] = changes["partial_rotary_factor"]
            if family.window_pattern and family.local_rope_theta:
                rope = {"full_attention": rope, "sliding_attention": PLAIN_ROPE}
            config = AutoConfig.for_model(model_type, **SHAPE | changes | {"rope_parameters": rope})
            config.architectures = [architecture_of(model_type)]
            folder = home / f"{model_type} {kind}"
            config.save_pretrained(folder)
            yield model_type, folder


def tables_of_transformers(folder: Path) -> dict[str | None, torch.Tensor]:
    """Return [POSITIONS, cosines and sines] by the kind of a layer, None where all are alike."""
    config = AutoConfig.from_pretrained(folder)
    rotary = AutoModelForCausalLM.from_config(config).model.rotary_emb
    by_kind = "layer_type" in inspect.signature(inspect.unwrap(type(rotary).forward)).parameters
    positions, found = torch.arange(sglang_ropes.POSITIONS)[None], {}
    for kind in set(config.layer_types) if by_kind else [None]:
        result = rotary(torch.zeros(1), positions, **{"layer_type": kind} if by_kind else {})
        parts = (result.real, result.imag) if isinstance(result, torch.Tensor) else result
        found[kind] = torch.cat([_once(part[0]) for part in parts], dim=-1)
    return found


def _once(part: torch.Tensor) -> torch.Tensor:
    """Return each angle's number once: some families have them in either half, some side by side."""
    half = part.shape[-1] // 2
    if torch.equal(part[:, :half], part[:, half:]):
        return part[:, :half]
    return part[:, ::2] if torch.equal(part[:, ::2], part[:, 1::2]) else part


@pytest.mark.slow  # changes with SGLang's or transformers' version or a new family only
def test_every_family_has_the_positions_of_transformers(tmp_path: Path) -> None:
    saved = list(folders(tmp_path))
    for model_type, folder in saved:
        errors = list(engine_fit_errors(read_architecture(folder), 1))
        assert len(errors) == (model_type == "olmo3"), errors
        for error in errors:  # names the lines that SGLang reads
            lines = error.partition(" add ")[2].removesuffix(" to it")
            file = folder / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | json.loads("{" + lines + "}")))
            assert not list(engine_fit_errors(read_architecture(folder), 1))
    command = [sys.executable, sglang_ropes.__file__, str(free_port()), *(str(folder) for _, folder in saved)]
    printed = subprocess.check_output(command, env=launch.environment([], 1, tmp_path), text=True)
    tables = json.loads(printed.splitlines()[-1])
    for model_type, folder in saved:
        expected, kinds = tables_of_transformers(folder), CHANGES.get(model_type, {}).get("layer_types")
        layers = tables[str(folder)]
        assert layers, folder.name
        for layer, table in enumerate(layers):
            kind = kinds[layer] if kinds and None not in expected else None
            difference = (torch.tensor(table) - expected[kind]).abs().max()
            assert difference < 1e-5, (folder.name, layer)

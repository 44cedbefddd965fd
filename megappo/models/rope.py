"""Rotary position embeddings: base and scaling as config.json gives them, in either generation of its keys."""

from typing import Any

from megatron.core.models.gpt import GPTModel

from megappo.config.errors import ConfigError
from megappo.config.families import FAMILIES

SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Scalings that are computed here, and the numbers each takes."""


def rotary_base(hf: dict[str, Any]) -> float:
    """Base period of the rotations.

    Raises:
        ConfigError: config.json asks for a scaling that is not among SCALINGS, or lacks a number of it.
    """
    rope = _rope(hf)
    lacking = [name for name in SCALINGS.get(_kind(rope), ()) if name not in rope]
    if _kind(rope) not in SCALINGS or lacking or rope.get("partial_rotary_factor", 1) != 1:
        needs = "; ".join(f"{kind} ({', '.join(names)})" if names else kind for kind, names in SCALINGS.items())
        raise ConfigError([f"rope {rope} is not supported; supported are, over the whole head, {needs}"])
    family = FAMILIES[hf["architectures"][0]]
    return rope.get("rope_theta") or hf.get("rope_theta") or family.rope_theta


def scale_rope(gpt: GPTModel, hf: dict[str, Any]) -> None:
    """Scale the model's rotary frequencies; Megatron's own argument for Llama 3 takes only one of the four numbers.

    Source: transformers 5, modeling_rope_utils.py.
    """
    rope, embedding = _rope(hf), gpt.rotary_pos_emb
    numbers = {name: rope[name] for name in SCALINGS[_kind(rope)]}
    if _kind(rope) == "linear":
        embedding.inv_freq = embedding.inv_freq / numbers["factor"]
    elif _kind(rope) == "llama3":
        embedding.inv_freq = embedding._apply_scaling(embedding.inv_freq, **numbers)


def _rope(hf: dict[str, Any]) -> dict[str, Any]:
    """rope_parameters (transformers 5) or rope_scaling (before)."""
    return hf.get("rope_parameters") or hf.get("rope_scaling") or {}


def _kind(rope: dict[str, Any]) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"

"""Rotary position embeddings: base and scaling as config.json gives them, in either generation of its keys."""

from typing import Any

from megatron.core.models.gpt import GPTModel

from megappo.architecture.families import family_of
from megappo.config.errors import ConfigError

SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Scalings that are computed here, and the numbers each takes."""
LATENT_SCALINGS = {"default": (), "yarn": ("factor", "original_max_position_embeddings")}
"""Scalings that Megatron's latent attention computes."""


def rotary_base(hf: dict[str, Any]) -> float:
    """Base period of the rotations.

    Raises:
        ConfigError: config.json asks for a scaling that is not among those of the family, or lacks a number of it.
    """
    rope, family = _rope(hf), family_of(hf)
    scalings = LATENT_SCALINGS if family.latent_attention else SCALINGS
    lacking = [name for name in scalings.get(_kind(rope), ()) if rope.get(name) is None]
    if _kind(rope) not in scalings or lacking or rope.get("partial_rotary_factor", 1) != 1:
        needs = "; ".join(f"{kind} ({', '.join(names)})" if names else kind for kind, names in scalings.items())
        raise ConfigError([f"rope {rope} is not supported; supported are, over the whole head, {needs}"])
    return rope.get("rope_theta") or hf.get("rope_theta") or family.rope_theta


def latent_rope(hf: dict[str, Any]) -> dict[str, Any]:
    """MLATransformerConfig's arguments of rotary positions, with YaRN's factors on cosines and sines (mscale over
    mscale_all_dim) and on the softmax (mscale_all_dim).

    Raises:
        ConfigError: as `rotary_base`, or YaRN with settings that Megatron does not have.
    """
    base, rope = rotary_base(hf), _rope(hf)
    if _kind(rope) == "default":
        return {"rope_type": "rope", "rotary_base": base, "rotary_scaling_factor": 1.0}
    scales = (rope.get("mscale"), rope.get("mscale_all_dim"))
    if rope.get("attention_factor") is not None or rope.get("truncate") is False or any(scales) != all(scales):
        raise ConfigError(
            [
                f"rope {rope} is not supported: of yarn neither attention_factor, nor truncate = false, nor one of "
                "mscale and mscale_all_dim without the other"
            ]
        )
    mscale, mscale_all_dim = scales if all(scales) else (1.0, 0.0)
    return {
        "rope_type": "yarn",
        "rotary_base": base,
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
    }


def scale_rope(gpt: GPTModel, hf: dict[str, Any]) -> None:
    """Scale the model's rotary frequencies; Megatron's own argument for Llama 3 takes only one of the four numbers.

    Latent attention has its own, see `latent_rope`.

    Source: transformers 5, modeling_rope_utils.py.
    """
    if family_of(hf).latent_attention:
        return
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

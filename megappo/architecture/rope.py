"""config.json -> `Rope`, or why its rotary positions are not supported."""

from collections.abc import Iterator, Mapping
from math import isclose, log
from typing import Any

from megappo.architecture.architecture import Rope
from megappo.architecture.config_keys import ROPE_KEYS, WITHOUT_IT, positive, uncomputed
from megappo.architecture.families import ORIGINAL, ROTARY_PART, ROTARY_SIZE, Family, RawValues
from megappo.config.config_error import shorten

ROPE_SECTIONS = ("rope_parameters", "rope_scaling")
"""Sections with the rotary positions: transformers 5's, and the older one."""
FACTOR_LISTS = {"short_factor", "long_factor"}
YARN_NUMBERS = {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
"""Further numbers of YaRN with their defaults."""
ANOTHER = "choose another model"
DYNAMIC = "set rope_scaling to null: up to max_position_embeddings transformers does not scale, but SGLang does"
"""Remedies for rotary positions that are not supported."""


def split_rope(values: dict[str, Any], family: Family) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config.json with only the rotary positions of layers without a window, then the positions of layers with
    one."""
    rope = values.get("rope_parameters")
    if family.local_rope_theta is None or not isinstance(rope, dict) or "full_attention" not in rope:
        return values, {}
    return {**values, "rope_parameters": rope["full_attention"]}, rope.get("sliding_attention") or {}


def rope_section(values: RawValues, family: Family) -> tuple[dict[str, Any], list[str]]:
    """Return the rotary positions of all sections of config.json, and what is wrong: keys with several values."""
    rope: dict[str, Any] = {}
    conflicts = []
    for name in ROPE_SECTIONS:
        section = values.get(name) or {}
        if not isinstance(section, dict):
            raise TypeError(f"{name}: expected an object, found {shorten(repr(section))}")
        if not section:
            continue
        kind = section.get("rope_type") or section.get("type") or "default"
        kind = "default" if kind == "mrope" and family.vision else kind  # an older name, with sections
        for key, value in {**section, "rope_type": kind, "type": None}.items():
            if (value is not None or WITHOUT_IT.get(key)) and rope.setdefault(key, value) != value:
                conflicts.append(f"several values of {key} ({rope[key]}, {value})")
    if not rope and ROPE_SECTIONS[0] not in values:
        rope |= family.default_rope
    for key in ("rope_theta", ROTARY_PART, ORIGINAL):
        if key in rope and values.get(key, rope[key]) != rope[key]:
            conflicts.append(f"several values of {key} ({values[key]}, {rope[key]})")
    if rope.get("rope_type") == "longrope" and ORIGINAL in values:
        rope[ORIGINAL] = values[ORIGINAL]
    return {"rope_type": "default"} | rope, conflicts


def unsupported_rope(rope: RawValues, scalings: Mapping[str, tuple], family: Family) -> Iterator[str]:
    """Yield why rotary positions are not supported, with the remedy.

    Args:
        scalings: supported kinds, as in `Family.rope_scalings`.
    """
    kind = rope["rope_type"]
    is_lacking = any(name not in rope for name in scalings.get(kind, ()))
    read = {*ROPE_KEYS.split(), *family.rope_keys, *scalings.get(kind, ())}
    read -= {"factor"} if kind == "proportional" else set()  # SGLang ignores it
    if kind not in scalings or is_lacking or any(uncomputed(rope, read)):
        needs = [f"{name} ({', '.join(numbers)})" if numbers else name for name, numbers in scalings.items()]
        where = "" if family.rotary_part else "over the whole head, "
        yield f"; supported are, {where}{'; '.join(needs)}: {DYNAMIC if kind == 'dynamic' else ANOTHER}"
    elif kind == "yarn":
        is_scaled = bool(rope.get("mscale")), bool(rope.get("mscale_all_dim"))
        truncates = (True,) if family.latent_attention else (True, False)
        usual = 0.1 * log(max(rope["factor"], 1)) + 1  # without either mscale
        has_own = "attention_factor" in rope and (is_scaled[0] or not isclose(rope["attention_factor"], usual))
        if has_own or rope.get("truncate", True) not in truncates or is_scaled[0] != is_scaled[1]:
            yield (
                f": yarn needs attention_factor {usual:g} or none, truncate true (or false without latent attention), "
                f"and both or neither of mscale and mscale_all_dim: {ANOTHER}"
            )
    elif kind == "longrope" and {"factor", "attention_factor"} & rope.keys():
        yield f": SGLang ignores factor and attention_factor of longrope: {ANOTHER}"


def read_rope(rope: RawValues, values: RawValues, family: Family) -> Rope:
    """Return the rotary positions; `unsupported_rope` finds what they leave out.

    Raises:
        TypeError: a number of their kind is not above 0.
    """
    kind = rope["rope_type"]
    part = 1.0
    if family.rotary_part is not None:
        by_size = values[ROTARY_SIZE] / values["head_dim"] if {ROTARY_SIZE, "head_dim"} <= values.keys() else None
        part = rope.get(ROTARY_PART, values.get(ROTARY_PART, by_size or family.rotary_part))
    named = rope.keys() & family.rope_scalings.get(kind, ())
    numbers = {name: positive(rope, name) for name in named - FACTOR_LISTS}
    divisors = rope["short_factor"] if "short_factor" in named else ()
    if divisors and ORIGINAL in numbers:  # `Rope.magnitude` reads this factor
        numbers["factor"] = values["max_position_embeddings"] / numbers[ORIGINAL]
    if kind == "yarn":
        numbers |= {name: positive(rope, name, default) for name, default in YARN_NUMBERS.items()}
        numbers["mscale_all_dim"] = rope.get("mscale_all_dim") or 0.0
        numbers |= {} if family.latent_attention else {"truncate": int(bool(rope.get("truncate", True)))}
    base = rope.get("rope_theta", values.get("rope_theta", family.rope_theta))
    return Rope(base=base, kind=kind, numbers=numbers, part=part, divisors=tuple(divisors))

"""Kinds of layers in config.json: with or without a window, with or without rotary positions, and their heads."""

from collections.abc import Iterator
from typing import Any

from megappo.architecture.architecture import Heads, all_but_every
from megappo.architecture.config_keys import positive
from megappo.architecture.families import (
    FULL_HEAD_SIZE,
    FULL_KV_HEADS,
    K_IS_V,
    LAYER_SIZES,
    ROTATED,
    ROTATED_PATTERN,
    WINDOW_PATTERN,
    Family,
    RawValues,
)

SIZES = {"head_dim", "num_key_value_heads"}
"""Keys of a layer in `per_layer_config`, which transformers 5 writes in place of `global_head_dim` and
`num_global_key_value_heads`."""


def windows_and_heads(values: RawValues, family: Family) -> dict[str, Any]:
    """Return the window of attention, which layers have it, and the heads of the others, by the names of
    `Architecture`."""
    is_on = family.sliding_window or values.get("use_sliding_window")
    window = values.get("sliding_window") if is_on else None
    layers: tuple[bool, ...] = ()
    if family.window_pattern is not None:
        layers = layers_of(values, "sliding_attention", positive(values, WINDOW_PATTERN, family.window_pattern))
    heads = _full_heads(values, layers) if family.full_heads else None
    return {"sliding_window": window, "windows": layers, "full_heads": heads}


def unrotated(values: RawValues, family: Family) -> tuple[bool, ...]:
    """Return whether each layer is without rotary positions; () where all have them."""
    if family.unrotated_pattern is None:
        return ()
    every = positive(values, ROTATED_PATTERN, family.unrotated_pattern)
    layers = values["num_hidden_layers"]
    return tuple(not is_rotated for is_rotated in values.get(ROTATED) or all_but_every(every, layers))


def layers_of(values: RawValues, kind: str, every: float) -> tuple[bool, ...]:
    """Return whether each layer is of a kind: by `layer_types`, else all layers but every n-th."""
    if values.get("layer_types"):
        return tuple(one == kind for one in values["layer_types"])
    return all_but_every(every, values["num_hidden_layers"])


def _full_heads(values: RawValues, windows: tuple[bool, ...]) -> Heads:
    """Return the heads of the layers without a window."""
    sizes = {"num_key_value_heads": values["num_attention_heads"], **values, **_full_sizes(values, windows)}
    return Heads(sizes["head_dim"], sizes["num_key_value_heads"], values.get(K_IS_V, False))


def _full_sizes(values: RawValues, windows: tuple[bool, ...]) -> RawValues:
    """Return the sizes that layers without a window have of their own, with transformers' defaults."""
    if LAYER_SIZES in values:
        first_full = (*windows, False).index(False)
        return values[LAYER_SIZES].get(str(first_full), {})
    sizes = {"head_dim": values.get(FULL_HEAD_SIZE, 512)}
    if values.get(K_IS_V) and FULL_KV_HEADS in values:
        sizes["num_key_value_heads"] = values[FULL_KV_HEADS]
    return sizes


def irregular_layers(values: RawValues, windows: tuple[bool, ...]) -> Iterator[str]:
    """Yield keys that are not supported: more than two kinds of layers, or a window in the last layer."""
    if layers := values.get(LAYER_SIZES):
        full = _full_sizes(values, windows)
        alike = {str(layer): full for layer, has_window in enumerate(windows) if not has_window}
        if layers != alike or not SIZES.issuperset(full):
            yield LAYER_SIZES
    if windows[-1]:
        yield "layer_types"

"""Vision tower of an architecture, and the tokens that stand for images in its texts."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from megappo.architecture.families import RawValues

TokenId = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(ge=1)]
KEPT_BYTES = 2**32
"""Bytes of features of images that a rank keeps in host memory, for each tower."""
TOWER = "visual."
"""Begins the names of a tower's parameters."""
TEXT, VISION = "text_config", "vision_config"
"""Sections of config.json."""
NESTED = {"model.language_model.": "model.", "model.visual.": TOWER}
"""Beginnings of names in files of a text model that is, or was, part of one with a tower -> beginnings of its names."""
AT_TOP = ("architectures", "tie_word_embeddings", "pad_token_id")
"""Keys that count at the top of config.json if they are there and in `text_config`."""
TOKENS = {
    "image_token": "image_token_id",
    "video_token": "video_token_id",
    "start_token": "vision_start_token_id",
    "end_token": "vision_end_token_id",
}
PATCHES = {
    "patch_size": "patch_size",
    "merge_size": "spatial_merge_size",
    "temporal_patch_size": "temporal_patch_size",
}
"""Keys of config.json, and of its `vision_config`, by the names of `Vision`."""
SIZES = {
    "depth": "depth",
    "tower": "hidden_size",
    "tower_ffn": "intermediate_size",
    "tower_out": "out_hidden_size",
}
"""Further keys of `vision_config`, by the names of `Vision.sizes`."""
DEEPSTACK, PLACES = "deepstack_visual_indexes", "num_position_embeddings"
"""Keys of `vision_config` of a tower with deepstack."""


@dataclass(frozen=True, config=ConfigDict(strict=True))
class Vision:
    """Vision tower of an architecture.

    Attributes:
        image_token: id of the token that stands for a merged patch of an image.
        video_token: id of the token that stands for a merged patch of a video.
        start_token, end_token: ids of the tokens before and after an image.
        patch_size: edge of a patch in pixels.
        merge_size: edge, in patches, of the square that one token stands for.
        temporal_patch_size: frames of a patch; an image is repeated that often.
        mrope_section: numbers of rotary frequencies that take the frame, the row and the column of a position.
        is_interleaved: the frequencies of the three take turns; else they lie one section after the other.
        deepstack_layers: layers of the tower whose features are added to the outputs of the first decoder layers, one
            each; () = none.
        config: vision_config of config.json as it is.
    """

    image_token: TokenId
    video_token: TokenId
    start_token: TokenId
    end_token: TokenId
    patch_size: Size
    merge_size: Size
    temporal_patch_size: Size
    mrope_section: tuple[int, int, int]
    is_interleaved: bool
    deepstack_layers: tuple[int, ...]
    config: Mapping[str, Any]

    @property
    def frequency_axes(self) -> list[int]:
        """For each rotary frequency of a head, the number that it takes of a position: 0 frame, 1 row, 2 column."""
        size = sum(self.mrope_section)
        axes = [axis for axis, count in enumerate(self.mrope_section) for _ in range(count)]
        if self.is_interleaved:
            axes = [0] * size
            for axis in (1, 2):
                stop = 3 * self.mrope_section[axis]
                axes[axis:stop:3] = [axis] * len(range(size)[axis:stop:3])
        return axes

    @property
    def reading(self) -> tuple[int, ...]:
        """Numbers that models must share to read the same images in the same rows."""
        return self.image_token, self.patch_size, self.merge_size, self.temporal_patch_size

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the tower by their names in `parameter_tables.TOWERS`, and its `depth`."""
        sizes = {name: self.config[key] for name, key in SIZES.items()}
        return sizes | {
            "tower_qkv": 3 * sizes["tower"],
            "merged": sizes["tower"] * self.merge_size**2,
            "places": self.config.get(PLACES, 0),
            "channels": self.config.get("in_channels", 3),
            "frames": self.temporal_patch_size,
            "patch": self.patch_size,
        }


def num_image_tokens(grid: Sequence[int], merge_size: int) -> int:
    """Return the tokens of an image of (frames, rows, columns) patches."""
    return prod(grid) // merge_size**2


def text_values(raw: RawValues) -> RawValues:
    """Return the keys of a language model with a tower: those at the top of config.json, and the nested ones."""
    top = {key: value for key, value in raw.items() if key not in (TEXT, VISION)}
    return {**top, **(raw.get(TEXT) or {}), **{key: top[key] for key in AT_TOP if key in top}}


def unnested_name(tensor: str) -> str:
    """Return a tensor's name from its name in the files of a model with a tower, where it may be nested."""
    for nested, own in NESTED.items():
        if tensor.startswith(nested):
            return own + tensor.removeprefix(nested)
    return tensor


def name_in_files(tensor: str, kind: str | None) -> str:
    """Return a tensor's name as transformers writes it for models with a kind of tower; None = without one."""
    for nested, own in NESTED.items() if kind == "qwen3_vl" else ():
        if tensor.startswith(own):
            return nested + tensor.removeprefix(own)
    return tensor


def missing_vision(raw: RawValues, rope: RawValues, kind: str) -> Iterator[str]:
    """Yield the keys without which a tower of a kind, see `Family.vision`, is not described."""
    yield from (key for key in TOKENS.values() if key not in raw)
    tower = raw.get(VISION) or {}
    needed = [*PATCHES.values(), *SIZES.values(), *((DEEPSTACK, PLACES) if kind == "qwen3_vl" else ())]
    yield from (f"{VISION}.{key}" for key in needed if key not in tower)
    if "mrope_section" not in rope:
        yield "mrope_section"


def vision_contradictions(vision: Vision, hidden_size: int, num_frequencies: int) -> Iterator[str]:
    """Yield sizes that a tower and its language model cannot have together."""
    sizes = vision.sizes
    if sum(vision.mrope_section) != num_frequencies:
        yield f"mrope_section {vision.mrope_section} has not {num_frequencies} numbers together, half of a head's"
    if sizes["tower_out"] != hidden_size:
        yield f"{VISION}.{SIZES['tower_out']} {sizes['tower_out']} is another number than hidden_size {hidden_size}"
    if any(layer >= sizes["depth"] for layer in vision.deepstack_layers):
        yield f"{VISION}.{DEEPSTACK} {list(vision.deepstack_layers)} names layers beyond its depth {sizes['depth']}"


def read_vision(raw: RawValues, rope: RawValues) -> Vision:
    """Return the tower of a config.json that lacks nothing."""
    tower = raw[VISION]
    return Vision(
        **{name: raw[key] for name, key in TOKENS.items()},
        **{name: tower[key] for name, key in PATCHES.items()},
        mrope_section=tuple(rope["mrope_section"]),
        is_interleaved=rope.get("mrope_interleaved", False),
        deepstack_layers=tuple(tower.get(DEEPSTACK, ())),
        config=tower,
    )

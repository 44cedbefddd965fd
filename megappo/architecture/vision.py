"""Vision tower of an architecture, and the tokens that stand for images in its texts."""

import re
from collections.abc import Mapping, Sequence
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
DEEPSTACK = "deepstack_visual_indexes"
AT_TOP = ("architectures", "tie_word_embeddings", "pad_token_id")
"""Keys that count at the top of config.json if they are there and in `text_config`."""


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
    def media_tokens(self) -> tuple[int, int]:
        """Tokens that stand for images and videos; a response ends with one."""
        return self.image_token, self.video_token

    @property
    def frequency_axes(self) -> list[int]:
        """For each rotary frequency of a head, the number that it takes of a position: 0 frame, 1 row, 2 column."""
        section = self.mrope_section
        if self.is_interleaved:
            return [i % 3 if i < 3 * section[i % 3] else 0 for i in range(sum(section))]
        return [axis for axis, count in enumerate(section) for _ in range(count)]

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the tower by their names in `parameter_tables.TOWERS`: the keys of its config, and two others."""
        hidden = self.config["hidden_size"]
        joined = {"qkv_size": 3 * hidden, "merged_size": hidden * self.merge_size**2}
        return {"in_channels": 3, **self.config, **joined}


def num_image_tokens(grid: Sequence[int], merge_size: int) -> int:
    """Return the tokens of an image of (frames, rows, columns) patches."""
    return prod(grid) // merge_size**2


def text_values(raw: RawValues) -> RawValues:
    """Return the keys of a language model with a tower: those at the top of config.json, and the nested ones."""
    at_top = {key: raw[key] for key in AT_TOP if key in raw}
    return {**raw, TEXT: None, VISION: None, **(raw.get(TEXT) or {}), **at_top}


def unnested_name(tensor: str) -> str:
    """Return a tensor's name from its name in files, where it may be nested."""
    return tensor.replace("model.language_model.", "model.", 1).replace("model.visual.", TOWER, 1)


def name_in_files(tensor: str, kind: str | None) -> str:
    """Return a tensor's name as transformers writes it for models with a kind of tower; None = without one."""
    if kind == "qwen3_vl":
        tensor = re.sub("^model", "model.language_model", tensor)
        tensor = re.sub("^visual", "model.visual", tensor)
    return tensor


def read_vision(raw: RawValues, rope: RawValues, kind: str) -> Vision:
    """Return the tower of a config.json.

    Args:
        kind: see `Family.vision`.
    Raises:
        TypeError: a key is missing.
    """
    try:
        tower = raw[VISION]
        return Vision(
            image_token=raw["image_token_id"],
            video_token=raw["video_token_id"],
            start_token=raw["vision_start_token_id"],
            end_token=raw["vision_end_token_id"],
            patch_size=tower["patch_size"],
            merge_size=tower["spatial_merge_size"],
            temporal_patch_size=tower["temporal_patch_size"],
            mrope_section=tuple(rope["mrope_section"]),
            is_interleaved=rope.get("mrope_interleaved", False),
            deepstack_layers=tuple(tower[DEEPSTACK]) if kind == "qwen3_vl" else (),
            config=tower,
        )
    except KeyError as key:
        raise TypeError(f"it lacks {key}") from key

"""Vision tower of an architecture, and the tokens that stand for images in its texts."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

TokenId = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(ge=1)]


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


def num_image_tokens(grid: Sequence[int], merge_size: int) -> int:
    """Return the tokens of an image of (frames, rows, columns) patches."""
    return prod(grid) // merge_size**2

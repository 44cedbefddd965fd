"""Images in rows: where they lie, and where their pixels come from. Torch-free at import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Image:
    """An image in a row.

    Attributes:
        place: index of its first token in the row's tokens (prompt, then response).
        grid: (frames, rows, columns) in patches, before merging.
        key: (number of the data set, position in it, number in the prompt). It finds the image again on any rank; equal
            keys are equal pixels.
        digest: checksum of its file.
    """

    place: int
    grid: tuple[int, int, int]
    key: tuple[int, int, int]
    digest: str = ""


class ImageSource(Protocol):
    """Images of the rows of a step, on any rank."""

    def images(self, record: tuple[int, int]) -> Sequence[Image]:
        """Return the images of the rows with these `prompt_records`, by place; () without images."""

    def pixels(self, image: Image) -> Tensor:
        """Return the patches of an image, [frames x rows x columns, channels x temporal patch x patch x patch] float32,
        as the image processor of the model's folder makes them."""

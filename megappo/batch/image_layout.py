"""Places and positions of images in a pack of rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megappo.architecture.vision import Vision, num_image_tokens
from megappo.batch.images import Image, ImageSource
from megappo.batch.rows import Rows


def lay_out_images(
    rows: Rows,
    starts: Tensor,
    vision: Vision,
    source: ImageSource | None,
) -> tuple[Tensor, Tensor, list[Image]]:
    """Lay out the images of packed rows.

    Args:
        starts: [b + 1] boundaries of the rows in the pack, or more: the last one is its length, W.
        source: source of the rows' images; None = they have none.
    Returns:
        Positions of all tokens, [3, W] int64: frame, row and column, which are the same for text, and 0 for padding;
        for each token its number among the tokens of the pack's images, one image after the other, [W] int64, -1 for
        text; and these images, each once.
    Raises:
        ValueError: tokens of a row are not the ones of its images.
    """
    length = int(starts[-1])
    positions = torch.zeros(3, length, dtype=torch.int64)
    slots = torch.full((length,), -1)
    first_slots: dict[Image, int] = {}
    num_slots = 0
    for start, tokens, of_row in zip(starts.tolist(), rows.sequences, images_of(rows, source), strict=False):
        positions[:, start : start + len(tokens)] = mrope_positions(len(tokens), of_row, vision.merge_size)
        for image in of_row:
            count = num_image_tokens(image.grid, vision.merge_size)
            if tokens[image.place : image.place + count].tolist() != [vision.image_token] * count:
                raise ValueError(
                    f"image {image.key} (data set, prompt, number): its row has other tokens than its {count} of "
                    f"{vision.image_token} from token {image.place} on: the row has another prompt, or was cut"
                )
            first_slot = first_slots.setdefault(image, num_slots)
            num_slots = max(num_slots, first_slot + count)
            place = start + image.place
            slots[place : place + count] = first_slot + torch.arange(count)
    return positions, slots, list(first_slots)


def images_of(rows: Rows, source: ImageSource | None) -> list[Sequence[Image]]:
    """Return the images of each row; none of rows without the field `prompt_records`."""
    records = rows.fields.get("prompt_records")
    if source is None or records is None:
        return [()] * len(rows)
    return [source.images((data_set, position)) for data_set, position in records.long().tolist()]


def mrope_positions(length: int, images: Sequence[Image], merge_size: int) -> Tensor:
    """Return the positions of a row, [3, length] int64: frame, row and column.

    Text counts all three up. An image begins at the position after the text before it and adds the place of each merged
    patch. The text after it begins one after the image's largest number.

    Source: transformers 5.19, Qwen2_5_VLModel.get_rope_index and Qwen3VLModel.get_rope_index.
    """
    positions = torch.arange(length).repeat(3, 1)
    for image in images:
        frames, rows, columns = image.grid
        sizes = frames, rows // merge_size, columns // merge_size
        patches = torch.cartesian_prod(*map(torch.arange, sizes)).T
        start = positions[0, image.place].clone()
        stop = image.place + patches.shape[1]
        positions[:, image.place : stop] = start + patches
        positions[:, stop:] += max(sizes) - patches.shape[1]
    return positions

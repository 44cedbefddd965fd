"""Tiny random models with vision towers, rows of prompts with images, and transformers' view of both."""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from ppo_engines import make_rows
from tiny_shapes import SHAPE, VOCAB_SIZE
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from megappo.architecture.vision import num_image_tokens, unnested_name
from megappo.batch.images import Image
from megappo.batch.rows import Rows

TOKENS = {
    "image_token_id": VOCAB_SIZE - 4,
    "video_token_id": VOCAB_SIZE - 3,
    "vision_start_token_id": VOCAB_SIZE - 2,
    "vision_end_token_id": VOCAB_SIZE - 1,
}
"""The last of the vocabulary; text has none of them."""
MERGE = 2
TOWER = {
    **{"depth": 3, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": SHAPE["hidden_size"]},
    **{"patch_size": 4, "spatial_merge_size": MERGE, "temporal_patch_size": 2},
}
PATCH_NUMBERS = 3 * 2 * 4 * 4
VISION = {
    "qwen2_5_vl": (
        {"mrope_section": [2, 1, 1]},
        {},
        {"window_size": 16, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": (
        {"mrope_section": [3, 3, 2], "mrope_interleaved": True},
        {"head_dim": 16},
        {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]},
    ),
}
"""By Hugging Face's model_type: keys of rotary positions, changes to SHAPE, and further keys of the tower."""
PROMPTS: dict[int, tuple[int, Sequence[tuple[int, tuple[int, int, int]]]]] = {
    0: (11, [(3, (1, 4, 6))]),
    1: (11, [(0, (1, 4, 4)), (6, (1, 2, 8))]),
    2: (4, []),
}
"""Number of a prompt -> its tokens, and place and grid of each of its images."""
RESPONSES = ((4, 6), (1, 3), (5, 3))
"""Tokens of the responses to each prompt."""


def vision_folder(folder: Path, model_type: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Save a random model with a tower, every weight away from its initial value."""
    rope, text, tower = VISION[model_type]
    ends = {"pad_token_id": None, "eos_token_id": 1}
    rope = {"rope_type": "default", "rope_theta": 500.0} | rope
    config = AutoConfig.for_model(
        model_type,
        text_config=SHAPE | text | ends | {"rope_parameters": rope} | changes,
        vision_config=TOWER | tower,
        tie_word_embeddings=changes.get("tie_word_embeddings", False),
        **TOKENS,
    )
    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


class Pictures:
    """Images of PROMPTS, an `ImageSource`: random pixels, which equal keys have alike.

    Attributes:
        made: keys of the images whose pixels were made, in that order.
    """

    def __init__(self) -> None:
        self.made: list[tuple] = []

    def images(self, record: tuple[int, int]) -> Sequence[Image]:
        data_set, position = record
        _, images = PROMPTS[position]
        return [Image(place, grid, (data_set, position, number)) for number, (place, grid) in enumerate(images)]

    def pixels(self, image: Image) -> Tensor:
        self.made.append(image.key)
        generator = torch.Generator().manual_seed(zlib.crc32(repr(image.key).encode()))
        frames, rows, columns = image.grid
        return torch.randn(frames * rows * columns, PATCH_NUMBERS, generator=generator)


def vision_rows() -> Rows:
    """Return rows of PROMPTS and RESPONSES, with every field the losses read."""
    lengths = [(PROMPTS[prompt][0], size) for prompt, sizes in enumerate(RESPONSES) for size in sizes]
    rows = make_rows(TOKENS["image_token_id"], lengths, rows_per_prompt=len(RESPONSES[0]))
    tokens = [one.clone() for one in rows.sequences]
    for row, prompt in enumerate(rows.prompt_ids.tolist()):
        length, images = PROMPTS[prompt]
        tokens[row][:length] = tokens[prompt * len(RESPONSES[0])][:length]
        for place, grid in images:
            tokens[row][place : place + num_image_tokens(grid, MERGE)] = TOKENS["image_token_id"]
    records = torch.stack((torch.zeros(len(rows)), rows.prompt_ids.float()), dim=1)
    return replace(rows, input_ids=torch.cat(tokens), fields=rows.fields | {"prompt_records": records})


class Seeing(torch.nn.Module):
    """transformers' model, which takes the tokens of a row of `vision_rows` alone and finds the row's images.

    Its parameters have the names of megappo's exports, and its tower is frozen.
    """

    def __init__(self, folder: Path):
        super().__init__()
        whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        whole.model.visual.requires_grad_(False)
        self.whole = whole
        self.config = whole.config.get_text_config()
        self.source = Pictures()
        rows = vision_rows()
        numbers = zip(rows.sequences, rows.prompt_ids.tolist(), strict=True)
        self.prompt_of = {tuple(tokens.tolist()): prompt for tokens, prompt in numbers}

    def inputs(self, tokens: Tensor) -> dict[str, Tensor]:
        images = self.source.images((0, self.prompt_of[tuple(tokens[0].tolist())]))
        found = {"input_ids": tokens, "mm_token_type_ids": (tokens == TOKENS["image_token_id"]).int()}
        if images:
            found["pixel_values"] = torch.cat([self.source.pixels(image) for image in images])
            found["image_grid_thw"] = torch.tensor([image.grid for image in images])
        return found

    def forward(self, tokens: Tensor) -> Any:
        return self.whole(**self.inputs(tokens))

    @property
    def model(self) -> "Trunk":
        return Trunk(self)

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator:
        for name, parameter in self.whole.named_parameters():
            yield unnested_name(name), parameter


class Trunk:
    """The same without an output layer."""

    def __init__(self, seeing: Seeing):
        self.seeing = seeing

    def __call__(self, tokens: Tensor) -> Any:
        return self.seeing.whole.model(**self.seeing.inputs(tokens))

    def named_parameters(self, prefix: str = "") -> Iterator:
        return ((name, one) for name, one in self.seeing.named_parameters() if not name.startswith("lm_head."))

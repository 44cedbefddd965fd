"""Write pictures of squares and disks, and a small Qwen3-VL that guesses how many squares there are, for
configs/squares.yaml.

The whole model is trained first to count, so that its vision tower sees squares. Then its language model alone is
trained to guess: it answers with any number. PPO, which leaves the tower as it is, has to learn the counting again.
"""

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import make_quickstart as quickstart
import torch
from PIL import Image, ImageDraw
from transformers import AutoImageProcessor, GenerationConfig, Qwen3VLConfig, Qwen3VLForConditionalGeneration

PAD, EOS = quickstart.PAD, quickstart.EOS
VISION = ("<vision>", "<image_patch>", "</vision>", "<video_patch>")
QUESTION = "squares?"
NUMBERS = range(1, 7)
VOCABULARY = [PAD, EOS, quickstart.UNKNOWN, "<u>", "<a>", *VISION, QUESTION, *map(str, NUMBERS)]
TEMPLATE = (
    "{% for one in messages %}{{ {'user': '<u>', 'assistant': '<a>'}[one.role] }}"
    "{% if one.content is string %}{{ one.content }}{% else %}{% for part in one.content %}"
    "{{ '<vision><image_patch></vision>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
CELL, CELLS = 16, 3
"""Pixels of a cell, of which the model makes a token, and cells in a row of a picture."""
NUM_TRAINING, NUM_HELD_OUT = 2000, 200
BATCH_SIZE = 64
COUNTING_STEPS, GUESSING_STEPS = 250, 100
TOWER = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": CELL // 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0],
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen3VLProcessor",
    "patch_size": TOWER["patch_size"],
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": CELL**2, "longest_edge": (CELL * CELLS) ** 2},
}


class Task(NamedTuple):
    """A picture, as an image processor makes it, and the number of its squares."""

    pixels: torch.Tensor
    count: int


def build(folder: Path, seed: int) -> None:
    """Write train.jsonl, val.jsonl, their images and model into `folder`."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model_folder = folder / "model"
    model_folder.mkdir()
    write_files(model_folder)
    processor = AutoImageProcessor.from_pretrained(model_folder)
    write_pictures(folder, "val", NUM_HELD_OUT, rng, processor)
    tasks = write_pictures(folder, "train", NUM_TRAINING, rng, processor)
    model = new_model()
    train(model, tasks, COUNTING_STEPS, rng, "counting")
    for parameter in model.model.visual.parameters():
        parameter.requires_grad = False
    train(model, [task._replace(count=0) for task in tasks], GUESSING_STEPS, rng, "guessing")
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    model.save_pretrained(model_folder)


def picture(count: int, rng: random.Random) -> Image.Image:
    """Return a picture with so many squares, and some disks, each in a cell of its own."""
    image = Image.new("RGB", (CELL * CELLS, CELL * CELLS), "white")
    draw = ImageDraw.Draw(image)
    cells = rng.sample(list(itertools.product(range(CELLS), repeat=2)), count + rng.randint(0, CELLS**2 - count))
    for number, (row, column) in enumerate(cells):
        size = rng.randint(8, 12)
        left, top = (CELL * at + rng.randint(1, CELL - size - 2) for at in (column, row))
        shape = draw.rectangle if number < count else draw.ellipse
        shape((left, top, left + size, top + size), fill=tuple(rng.randrange(160) for _ in range(3)))
    return image


def write_pictures(folder: Path, name: str, size: int, rng: random.Random, processor: Any) -> list[Task]:
    """Write pictures and their records; return them for training."""
    (folder / "images").mkdir(exist_ok=True)
    tasks = []
    lines = []
    for number in range(size):
        count = rng.choice(NUMBERS)
        image = picture(count, rng)
        file = f"images/{name}_{number:04}.png"
        image.save(folder / file)
        record = {"prompt": [{"role": "user", "content": f"<image>{QUESTION}"}], "images": [file], "label": str(count)}
        lines.append(json.dumps(record) + "\n")
        tasks.append(Task(processor(image, return_tensors="pt")["pixel_values"], count))
    (folder / f"{name}.jsonl").write_text("".join(lines))
    return tasks


def write_files(folder: Path) -> None:
    """Write the tokenizer, with one token for each text, and the settings of the image processor."""
    special = VOCABULARY[: VOCABULARY.index(QUESTION)]
    quickstart.save_tokenizer(folder, VOCABULARY, special, r"squares\?|.", chat_template=TEMPLATE)
    video = PROCESSOR | {"video_processor_type": "Qwen3VLVideoProcessor"}
    for name, settings in (("preprocessor_config", PROCESSOR), ("video_preprocessor_config", video)):
        (folder / f"{name}.json").write_text(json.dumps(settings, indent=2) + "\n")


def new_model() -> Qwen3VLForConditionalGeneration:
    """Return a Qwen3-VL of two layers, and a tower of two, that divide by two in every parallel dimension."""
    start, patch, end, video = map(VOCABULARY.index, VISION)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    more = {"vocab_size": len(VOCABULARY), "max_position_embeddings": 256, "head_dim": 16, "rope_parameters": rope}
    tokens = {"image_token_id": patch, "video_token_id": video}
    tokens |= {"vision_start_token_id": start, "vision_end_token_id": end}
    config = Qwen3VLConfig(
        text_config=quickstart.SHAPE | more,
        vision_config=TOWER | {"initializer_range": 0.1},
        tie_word_embeddings=quickstart.SHAPE["tie_word_embeddings"],
        **tokens,
    )
    return Qwen3VLForConditionalGeneration(config)


def batches(tasks: Sequence[Task], rng: random.Random) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches of pictures with their counts, or with any count where it is 0."""
    start, patch, end, _ = map(VOCABULARY.index, VISION)
    num_patches = CELLS**2
    user, question, eos, assistant = map(VOCABULARY.index, ("<u>", QUESTION, EOS, "<a>"))
    prompt = [user, start, *[patch] * num_patches, end, question, eos, assistant]
    grid = torch.tensor([[1, 2 * CELLS, 2 * CELLS]] * BATCH_SIZE)
    while True:
        chosen = rng.choices(tasks, k=BATCH_SIZE)
        answers = [VOCABULARY.index(str(task.count or rng.choice(NUMBERS))) for task in chosen]
        tokens = torch.tensor([[*prompt, answer, eos] for answer in answers])
        labels = tokens.clone()
        labels[:, : len(prompt)] = quickstart.IGNORED
        yield {
            "input_ids": tokens,
            "labels": labels,
            "mm_token_type_ids": (tokens == patch).int(),
            "pixel_values": torch.cat([task.pixels for task in chosen]),
            "image_grid_thw": grid,
        }


def train(
    model: Qwen3VLForConditionalGeneration, tasks: Sequence[Task], num_steps: int, rng: random.Random, name: str
) -> None:
    """Train with supervised steps."""

    def factor(step: int) -> float:
        return quickstart.lr_factor(step + 1, num_steps) / 2

    quickstart.supervise(model, batches(tasks, rng), num_steps, factor, name)

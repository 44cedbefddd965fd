"""Tiny random Qwen2.5-VL and Qwen3-VL folders with a byte tokenizer and an image processor; transformers as oracle."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIAL = ("<|endoftext|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PAD, END, VISION_START, VISION_END, IMAGE, VIDEO = range(256, 262)
"""Ids of the special tokens; bytes have the ids below."""
PLACEHOLDER = [VISION_START, IMAGE, VISION_END]
TEMPLATE = (
    "{% for one in messages %}{{ one.role }}:{% if one.content is string %}{{ one.content }}{% else %}"
    "{% for part in one.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TEXT = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
TOWER |= {"spatial_merge_size": 2, "temporal_patch_size": 2}
TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
    "qwen3_vl": {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
}
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}


def write_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Write a tokenizer with a token for each byte."""
    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in SPECIAL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[1], pad_token=SPECIAL[0], chat_template=TEMPLATE
    )
    fast.save_pretrained(folder)
    return fast


def vision_folder(folder: Path, model_type: str) -> Path:
    """Save a random model, every weight away from its initial value, with its tokenizer and processor."""
    torch.manual_seed(0)
    text = {**TEXT, "rope_parameters": ROPE | ({"mrope_interleaved": True} if model_type == "qwen3_vl" else {})}
    tower = TOWER | TOWERS[model_type]
    config = AutoConfig.for_model(
        model_type, text_config=text, vision_config=tower, tie_word_embeddings=False, eos_token_id=END, **TOKENS
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name and parameter.ndim == 1 else 0.0, 0.12)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    write_processor(folder, model_type)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END, "pad_token_id": PAD}))
    return folder


def write_processor(folder: Path, model_type: str) -> None:
    """Write the settings of the image processor, which makes 1 to 64 tokens of an image."""
    tower = TOWER | TOWERS[model_type]
    edge = 2 * tower["patch_size"]
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}[model_type],
        "patch_size": tower["patch_size"],
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": edge**2, "longest_edge": 64 * edge**2},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    video = settings | {"video_processor_type": f"Qwen{'3' if model_type == 'qwen3_vl' else '2'}VLVideoProcessor"}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))


def noise(height: int, width: int, seed: int = 0, file_format: str = "PNG") -> bytes:
    """Return an image file of random pixels."""
    pixels = numpy.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=numpy.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, file_format)
    return file.getvalue()


class Oracle:
    """transformers' model and image processor of a folder."""

    def __init__(self, folder: Path):
        self.model = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.processor = AutoImageProcessor.from_pretrained(folder)

    def inputs(self, images: Sequence[bytes]) -> dict[str, torch.Tensor]:
        """Return pixels and grids of image files."""
        opened = [Image.open(io.BytesIO(one)) for one in images]
        return dict(self.processor(images=opened, return_tensors="pt")) if opened else {}

    def expanded(self, tokens: Sequence[int], images: Sequence[bytes]) -> list[int]:
        """Return tokens with as many placeholders as the images have."""
        counts = iter([int(grid.prod()) // 4 for grid in self.inputs(images).get("image_grid_thw", ())])
        return [one for token in tokens for one in [token] * (next(counts) if token == IMAGE else 1)]

    @torch.no_grad()
    def log_probs(self, prompt: Sequence[int], response: Sequence[int], images: Sequence[bytes]) -> list[float]:
        """Return log-probs of a response to an expanded prompt. Its last token may be an image token, which ends it."""
        tokens = torch.tensor([[*prompt, *response[:-1]]])
        inputs = self.inputs(images)
        if images:
            inputs["mm_token_type_ids"] = (tokens == IMAGE).int()
        logits = self.model(input_ids=tokens, **inputs).logits[0, len(prompt) - 1 :].log_softmax(-1)
        return logits.gather(1, torch.tensor(response)[:, None])[:, 0].tolist()

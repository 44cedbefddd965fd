"""Images of prompts: the forms of files, their tokens against transformers' processor, and what is refused by line."""

import base64
import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import tiny_vision
from PIL import Image
from tiny_vision import IMAGE, PLACEHOLDER, noise
from transformers import AutoImageProcessor

from megappo.architecture.vision import Vision
from megappo.config.config_error import ConfigError
from megappo.config.schema import Config, Data
from megappo.data.image_files import ImageReader, data_url, opened, upright
from megappo.data.preferences import open_examples
from megappo.data.prompts import Prompt, PromptDataset
from megappo.data.tokenizer import load_tokenizer
from megappo.userland.signatures import NO_INPUT, InputSpec

A, B = noise(60, 150, 1), noise(84, 112, 2, "JPEG")
USER = [*b"user:"]
AFTER = [tiny_vision.END, *b"assistant:"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tokenizer and processor, which reads patches of 16 pixels."""
    home = tmp_path_factory.mktemp("vision")
    tiny_vision.write_tokenizer(home)
    tiny_vision.write_processor(home, "qwen3_vl")
    return home


def vision(**changes: Any) -> Vision:
    numbers = {"image_token": IMAGE, "video_token": tiny_vision.VIDEO, "patch_size": 16, "merge_size": 2}
    numbers |= {"start_token": tiny_vision.VISION_START, "end_token": tiny_vision.VISION_END, "temporal_patch_size": 2}
    rest = {"mrope_section": (2, 3, 3), "is_interleaved": True, "deepstack_layers": (), "config": {}}
    return Vision(**numbers | rest | changes)


def dataset(folder: Path, file: Path, takes: InputSpec = NO_INPUT, **keys: Any) -> PromptDataset:
    tokenizer = load_tokenizer(str(folder))
    data = Data(train_files=(str(file),), **{"max_prompt_length": 300} | keys)
    reader = ImageReader(str(folder), vision(), tokenizer, data.max_image_pixels)
    return PromptDataset([str(file)], tokenizer, data, 0, takes=takes, images=reader, needs_label=False)


def write(home: Path, *records: dict[str, Any], ending: str = "jsonl") -> Path:
    file = home / f"d.{ending}"
    if ending == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(records)), file)
    else:
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def errors_of(data: PromptDataset) -> list[str]:
    return data.errors([data.check(1000)])


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": parts[0] if len(parts) == 1 else list(parts)}]


def expected(folder: Path, tokens: list[int], *images: bytes) -> list[int]:
    processor = AutoImageProcessor.from_pretrained(folder)
    grids = iter(processor([Image.open(io.BytesIO(one)) for one in images])["image_grid_thw"])
    return [one for token in tokens for one in [token] * (int(next(grids).prod()) // 4 if token == IMAGE else 1)]


def check(prompt: Prompt, folder: Path, tokens: list[int], *images: bytes) -> None:
    """Compare a prompt's tokens with transformers', and the places of its images with a search for them."""
    whole = expected(folder, tokens, *images)
    assert prompt.tokens == whole
    starts = [place for place, token in enumerate(whole) if token == IMAGE and whole[place - 1] != IMAGE]
    assert [image.place for image in prompt.images] == starts and len(prompt.images) == len(images)
    assert [image.key for image in prompt.images] == [(0, prompt.index, number) for number in range(len(images))]


def test_verls_parquet(tmp_path, folder):
    (tmp_path / "b.jpg").write_bytes(B)
    rows = [
        {"prompt": user("<image>What is x?"), "images": [{"bytes": A, "path": None}]},
        {"prompt": user("a<image>b<image>"), "images": [{"bytes": None, "path": "b.jpg"}, {"bytes": A, "path": "a"}]},
        {"prompt": user("none"), "images": []},
    ]
    data = dataset(folder, write(tmp_path, *rows, ending="parquet"))
    assert errors_of(data) == []
    one, two, none = data.at(range(3))
    check(one, folder, [*USER, *PLACEHOLDER, *b"What is x?", *AFTER], A)
    check(two, folder, [*USER, *b"a", *PLACEHOLDER, *b"b", *PLACEHOLDER, *AFTER], B, A)
    assert none.tokens == [*USER, *b"none", *AFTER] and none.images == [] and one.text.count("<|image_pad|>") == 1


TEXT = {"type": "text", "text": "x"}
FORMS = {
    "parts and a column": {"prompt": user({"type": "image"}, TEXT), "images": ["a.png"]},
    "parts with paths": {"prompt": user({"type": "image", "image": "a.png", "text": None}, TEXT)},
    "OpenAI's parts": {"prompt": user({"type": "image_url", "image_url": {"url": "a.png"}}, TEXT)},
    "a data URL": {"prompt": user("<image>x"), "images": [f"data:image/png;base64,{base64.b64encode(A).decode()}"]},
    "one image": {"prompt": user("<image>x"), "images": "a.png"},
    "ShareGPT's messages": {"prompt": [{"from": "human", "value": "<image>x"}], "images": ["a.png"]},
    "a dotted field": {"prompt": user("<image>x"), "extra": {"pictures": ["a.png"]}},
    "a file URL": {"prompt": user("<image>x"), "images": ["file://HOME/a.png"]},
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_images(tmp_path, folder, form):
    (tmp_path / "a.png").write_bytes(A)
    record = json.loads(json.dumps(FORMS[form]).replace("HOME", str(tmp_path)))
    keys = {"image_key": "extra.pictures"} if form == "a dotted field" else {}
    data = dataset(folder, write(tmp_path, record), **keys)
    assert errors_of(data) == []
    check(data.at([0])[0], folder, [*USER, *PLACEHOLDER, *b"x", *AFTER], A)


def test_a_text_without_template(tmp_path, folder):
    (tmp_path / "a.png").write_bytes(A)
    given = {"prompt": "see <image>.", "images": ["a.png"]}
    data = dataset(
        folder, write(tmp_path, given, given | {"prompt": "see <|vision_start|><|image_pad|><|vision_end|>."})
    )
    assert errors_of(data) == []
    for prompt in data.at([0, 1]):
        check(prompt, folder, [*b"see ", *PLACEHOLDER, *b"."], A)
    data = dataset(folder, write(tmp_path, given), apply_chat_template=True)
    check(data.at([0])[0], folder, [*USER, *b"see ", *PLACEHOLDER, *b".", *AFTER], A)


def test_the_mark_is_plain_text_in_a_part_of_text(tmp_path, folder):
    [error] = errors_of(dataset(folder, write(tmp_path, {"prompt": user("a <image> tag")})))
    assert "but the record has 0 images" in error and "[{'type': 'text', 'text': ...}]" in error
    data = dataset(folder, write(tmp_path, {"prompt": user([{"type": "text", "text": "a <image> tag"}])}))
    assert errors_of(data) == [] and data.at([0])[0].tokens == [*USER, *b"a <image> tag", *AFTER]


def test_parts_of_text_alone_are_a_text(tmp_path, folder):
    data = dataset(
        folder, write(tmp_path, {"prompt": user({"type": "text", "text": "a"}, TEXT)}), InputSpec((), (), True)
    )
    [prompt] = data.at([0])
    assert prompt.columns["prompts"] == user("ax") and prompt.text == "user:ax<|im_end|>assistant:"


FAULTS = {
    "missing": ({"images": ["none.png"]}, "none.png cannot be used ([Errno 2] No such file or directory"),
    "damaged": ({"images": ["text.png"]}, "text.png cannot be used (cannot identify"),
    "cut off": ({"images": ["cut.jpg"]}, "cut.jpg cannot be used (image file is truncated"),
    "too few": ({"images": []}, "1 places for images (<image> in a text, or parts of type image that name none), but"),
    "too many": ({"images": ["a.png", "a.png"]}, "but the record has 2 images: write one for each"),
    "no column": ({"images": None}, "the record has 0 images"),
    "narrow": ({"images": ["narrow.png"]}, "narrow.png cannot be used (absolute aspect ratio must be smaller than 200"),
    "on the web": ({"images": ["https://a.b/c.png"]}, "is not on this machine: download it"),
    "deep grey": (
        {"images": ["deep.png"]},
        "deep.png cannot be used (its grey values have more than 8 bits): correct its path, or replace",
    ),
    "raw base64": ({"images": ["iVBOR" * 100]}, "(File name too long): expected a path, a file or data URL, or"),
    "number": ({"images": [5]}, "an image is 5: expected a path"),
    "another field": ({"images": ["a.png"], "image": "a.png"}, "the field 'image' is not read"),
    "its token": (
        {"images": ["a.png"], "prompt": user("<|image_pad|><image>")},
        "prompt has 2 <|image_pad|>",
    ),
    "a video": (
        {"images": ["a.png"], "prompt": user("<image><|video_pad|>")},
        "1 <|image_pad|> for 1 images, and <|video_pad|> 1 times",
    ),
    "a part": ({"prompt": user({"type": "video"}, TEXT)}, "a part of a message is {'type': 'video'}"),
    "too long": ({"images": ["big.png"]}, "the prompt has 83 tokens, more than data.max_prompt_length 60"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named_by_file_and_line(tmp_path, folder, fault):
    files = {"a.png": A, "text.png": b"no image", "cut.jpg": B[:-300], "narrow.png": noise(1, 201)}
    Image.new("I;16", (60, 60), 30000).save(tmp_path / "deep.png")
    for name, content in (files | {"big.png": noise(256, 256)}).items():
        (tmp_path / name).write_bytes(content)
    change, message = FAULTS[fault]
    good = {"prompt": user("<image>x"), "images": ["a.png"]}
    file = write(tmp_path, good, good | change)
    [error] = errors_of(dataset(folder, file, max_prompt_length=60))
    assert error.startswith(f"data.train_files: {file} line 2: ") and message in error
    left_out = dataset(folder, file, max_prompt_length=60, on_bad_row="skip", too_long="skip")
    left_out.leave_out([left_out.check(1000)])
    assert list(left_out.kept) == [0]


def test_a_prompt_with_images_is_not_cut(tmp_path, folder):
    (tmp_path / "big.png").write_bytes(noise(256, 256))
    file = write(tmp_path, {"prompt": user("<image>x"), "images": ["big.png"]})
    [error] = errors_of(dataset(folder, file, max_prompt_length=60, too_long="truncate_left"))
    assert "images cannot be cut: set data.too_long=skip, or lower data.max_image_pixels" in error
    [prompt] = dataset(folder, file, max_prompt_length=60, max_image_pixels=128 * 128).at([0])
    assert prompt.images[0].grid == (1, 8, 8)


def test_a_check_holds_few_images_at_once(tmp_path, folder, monkeypatch):
    monkeypatch.setattr("megappo.data.records.BYTES_AT_ONCE", 2**20)
    content = noise(200, 200)
    rows = [{"prompt": user("<image>"), "images": [{"bytes": content + b"%d" % i, "path": None}]} for i in range(200)]
    data = dataset(folder, write(tmp_path, *rows, ending="parquet"))
    assert data.files[0]._table.column(0).num_chunks >= 200 * len(content) // 2**20
    tracemalloc.start()
    assert errors_of(data) == []
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 0.25 * 200 * len(content)


EXAMPLES = {
    "sft": {"prompt": "x", "response": "<|image_pad|>"},
    "critic": {"prompt_tokens": [5, IMAGE], "response_tokens": [7], "score": 1},
    "reward_model": {"prompt": "x", "chosen": "<|video_pad|>", "rejected": "b"},
}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_examples_with_tokens_of_images_are_refused_by_line(tmp_path, folder, kind):
    settings = json.loads(Path("megappo/architecture/shapes/qwen2.5-vl-7b/config.json").read_text())
    settings |= {"image_token_id": IMAGE, "video_token_id": tiny_vision.VIDEO}
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(settings))
    file = write(tmp_path, EXAMPLES[kind])
    config = Config.model_validate(
        {
            "model": {"path": str(tmp_path)},
            "placement": {"critic" if kind == "critic" else "actor": "0"},
            "data": {"train_files": str(file), "train_batch_size": 1},
            "trainer": {"kind": kind, "output_dir": "o", "total_steps": 1},
        }
    )
    train, _ = open_examples(config, load_tokenizer(str(tmp_path)), [tiny_vision.END])
    [error] = train.errors([train.check(1000)])[:1]
    token = tiny_vision.VIDEO if kind == "reward_model" else IMAGE
    assert f"{file} line 1: " in error and f"has token {token}, which stands for an image or a video" in error


def odd(name: str) -> bytes:
    """An image that SGLang would read differently, or whose header has another size."""
    image = Image.open(io.BytesIO(A))
    file = io.BytesIO()
    if name == "turned":
        exif = Image.Exif()
        exif[0x0112] = 6
        image.save(file, "JPEG", exif=exif)
    elif name == "odd exif":
        image.convert("L").save(file, "PNG", exif=b"Exif\0\0MM\0*\0")
    elif name == "transparent":
        image.putalpha(Image.linear_gradient("L").resize(image.size))
        image.save(file, "PNG")
    else:
        image.convert({"gray": "L", "palette": "P"}[name]).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("name", ["turned", "odd exif", "transparent", "gray", "palette", "plain"])
def test_engine_and_trainer_read_the_same_image(folder, name):
    """An engine decodes what it is sent, converts it to RGB, and calls the same processor."""
    content = A if name == "plain" else odd(name)
    reader = ImageReader(str(folder), vision(), load_tokenizer(str(folder)))
    sent = base64.b64decode(data_url(content).partition(",")[2])
    assert (sent == content) == (name == "plain")
    made = AutoImageProcessor.from_pretrained(folder)([Image.open(io.BytesIO(sent)).convert("RGB")])
    grid = tuple(made["image_grid_thw"][0].tolist())
    assert reader.pixels(content, grid).equal(made["pixel_values"])
    assert reader._grid(opened(content)) == grid and upright(opened(content)).mode == "RGB"
    if name == "turned":
        assert grid[1] > grid[2]
    if name == "transparent":
        assert min(upright(opened(content)).getpixel((3, 0))) > 250


def test_the_most_pixels_hold_where_the_folder_names_limits(tmp_path, folder):
    """Files of Qwen2.5-VL have min_pixels and max_pixels, which would override a size."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    settings.pop("size", None)
    limits = {"min_pixels": 56 * 56, "max_pixels": 512 * 512}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings | limits))
    reader = ImageReader(str(tmp_path), vision(), load_tokenizer(str(folder)), 128 * 128)
    content = noise(256, 256)
    assert len(reader.pixels(content, reader._grid(opened(content)))) == 64


def test_another_processor_is_refused(tmp_path, folder):
    tokenizer = load_tokenizer(str(folder))
    with pytest.raises(
        ConfigError, match=r"is .*, 16, 2, 2\), but config.json belongs to .*, 14, 2, 2\).*: copy preprocessor_conf"
    ):
        ImageReader(str(folder), vision(patch_size=14), tokenizer)
    with pytest.raises(ConfigError, match="can be read in .* \\(Can't load image processor .*: copy preprocessor"):
        ImageReader(str(tmp_path), vision(), tokenizer)
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "CLIPImageProcessor"}')
    with pytest.raises(ConfigError, match="is .'CLIPImageProcessor'"):
        ImageReader(str(tmp_path), vision(), tokenizer)

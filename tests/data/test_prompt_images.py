"""Images of prompts on their way to engines, models, reward functions and people."""

import base64
import io
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import tiny_vision
from PIL import Image
from samples_of import sample_of
from tiny_vision import IMAGE, PLACEHOLDER, VIDEO, noise

from megappo.architecture.vision import Vision
from megappo.config.schema import Data
from megappo.data.image_files import ImageReader
from megappo.data.prompt_images import PromptImages
from megappo.data.prompts import Prompt, PromptDataset
from megappo.data.tokenizer import load_tokenizer
from megappo.rollouts.fingerprint import prompt_digest
from megappo.rollouts.sample_rows import sample_rows
from megappo.userland.signatures import NO_INPUT, InputSpec

A, B = noise(60, 150, 1), noise(84, 112, 2, "JPEG")


def datasets(home: Path, beside: bytes = B) -> tuple[PromptImages, list[Prompt]]:
    """Two data sets, the second with images in the file and a function that takes their paths."""
    tiny_vision.write_tokenizer(home)
    tiny_vision.write_processor(home, "qwen3_vl")
    tokenizer = load_tokenizer(str(home))
    numbers = {"image_token": IMAGE, "video_token": VIDEO, "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    numbers |= {"start_token": tiny_vision.VISION_START, "end_token": tiny_vision.VISION_END}
    vision = Vision(**numbers, mrope_section=(2, 3, 3), is_interleaved=True, deepstack_layers=(), config={})
    (home / "b.jpg").write_bytes(beside)
    files = home / "a.jsonl", home / "b.parquet"
    records = [{"prompt": "x"}, {"prompt": "<image>?", "images": ["b.jpg"]}]
    files[0].write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = [{"prompt": "<image><image>", "images": [{"bytes": A, "path": "a.png"}, {"bytes": B, "path": None}]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), files[1])
    reader = ImageReader(str(home), vision, tokenizer)
    opened = []
    for number, (file, takes) in enumerate(zip(files, (NO_INPUT, InputSpec(("images",))), strict=True)):
        data = Data(train_files=(str(file),))
        opened.append(
            PromptDataset([str(file)], tokenizer, data, 0, takes=takes, images=reader, number=number, needs_label=False)
        )
    return PromptImages(reader, opened, str(home / "run")), [*opened[0].at([0, 1]), *opened[1].at([0])]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple[PromptImages, list[Prompt]]:
    return datasets(tmp_path_factory.mktemp("data"))


def test_engines_get_one_token_and_the_file_of_each_image(opened):
    images, (text, one, two) = opened
    assert images.sent(text) == (1, [*b"x"], [])
    assert images.sent(one).tokens == [*PLACEHOLDER, *b"?"]
    assert images.sent(two)[:2] == (len(two.tokens), PLACEHOLDER * 2)
    assert [base64.b64decode(url.partition(",")[2]) for url in images.sent(two).urls] == [A, B]


def test_files_are_read_once_for_all_responses_to_a_prompt(opened, monkeypatch):
    images, (text, _, two) = opened
    read = []
    image_files = PromptDataset.image_files
    monkeypatch.setattr(
        PromptDataset, "image_files", lambda self, index: read.append(index) or image_files(self, index)
    )
    images._paths.cache_clear()
    images.sent(text)
    assert read == []
    images.sent(two)
    assert read == [0, 0], "for the engine, and for the function that takes paths"
    assert images.columns(two) == images.columns(two) and read == [0, 0]


def test_rows_lead_back_to_their_images(opened):
    images, prompts = opened
    samples = [sample_of(index, 0, [5, 6], [-1.0, -1.0], prompt=prompts[index].tokens) for index in (2, 0, 1, 2)]
    rows = sample_rows(samples, prompts=prompts)
    records = [tuple(map(int, record)) for record in rows.select([3, 2, 1, 0]).fields["prompt_records"].tolist()]
    assert records == [(1, 0), (0, 1), (0, 0), (1, 0)]
    found = [images.images(record) for record in records]
    assert found == [prompts[2].images, prompts[1].images, [], prompts[2].images]
    [first, second] = found[0]
    assert images.pixels(second).equal(images.pixels(found[1][0])), "the same file"
    assert images.pixels(first).shape == (first.grid[1] * first.grid[2], 3 * 2 * 16 * 16)
    assert "prompt_records" not in sample_rows(samples).fields


def test_functions_get_paths_if_they_take_them(opened):
    images, (_, one, two) = opened
    assert images.columns(one) == {}
    assert [Path(path).read_bytes() for path in images.columns(two)["images"]] == [A, B]


def test_people_see_thumbnails(opened):
    images, (_, one, two) = opened
    names = images.thumbnails(two.record)
    assert [Image.open(images._output_dir / name).format for name in names] == ["JPEG", "JPEG"]
    assert images.thumbnails(one.record) == names[1:], "a file for each image"


def test_another_image_is_another_prompt(opened, tmp_path):
    _, before = opened
    _, after = datasets(tmp_path)
    assert list(map(prompt_digest, after)) == list(map(prompt_digest, before))
    other = io.BytesIO()
    Image.open(io.BytesIO(B)).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(other, "JPEG")
    _, (_, changed, _) = datasets(tmp_path, other.getvalue())
    assert changed.tokens == before[1].tokens and prompt_digest(changed) != prompt_digest(before[1])

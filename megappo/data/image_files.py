"""Images of prompts: the parts of messages that stand for them, the files that records name, and what a vision tower
reads of these.

An image that is turned by its EXIF data, transparent or no RGB is read, and sent to engines, as an upright RGB image on
white: SGLang would ignore the first two.
"""

import base64
import binascii
import io
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from PIL import Image, ImageOps
from PIL.ExifTags import Base

from megappo.architecture.parsing import read_architecture
from megappo.architecture.vision import Vision, num_image_tokens
from megappo.config.config_error import ConfigError
from megappo.config.schema import Config
from megappo.data.chat import PromptContent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "<image>"
"""Stands for an image in a text, as in verl's files."""
IMAGE_PART = {"type": "image"}
SOURCES = ("bytes", "image", "image_url", "url", "path")
"""Fields of a part, or of an image in a record, that may hold it; the first that does."""
FORMS = "a path, a file or data URL, or {'bytes': ..., 'path': ...}"
THUMBNAIL = (192, 192)
"""Most columns and rows of an image that is shown."""
PATCHES = ("patch_size", "merge_size", "temporal_patch_size")
"""Settings of the processor that are the tower's, too."""
Grid = tuple[int, int, int]


class ImageFile(NamedTuple):
    """An image as a record names it.

    Attributes:
        content: content of its file; None: it is read from `path`.
        path: path of its file, or a name for messages.
    """

    content: bytes | None
    path: str

    def read(self) -> bytes:
        """Return the content of the file."""
        return Path(self.path).read_bytes() if self.content is None else self.content


def place_images(content: PromptContent, given: Sequence[Any], placeholder: str) -> tuple[PromptContent, list[Any]]:
    """Return a prompt with the places of its images, and the images in the order of their places.

    Args:
        content: a text, or messages; MARK in a text, and a part of a message that names no image, take the next one of
            `given`.
        given: the images of the record.
        placeholder: text that stands for an image where no template is applied.
    Raises:
        ValueError: there are fewer or more images than places, or a part is no text and no image.
    """
    if isinstance(content, str):
        _check_count(content.count(MARK) + content.count(placeholder), given)
        return content.replace(MARK, placeholder), list(given)
    placed = []
    images: list[Any] = []
    for message in content:
        parts = _parts(message["content"])
        images += [_source(part) for part in parts if part["type"] != "text"]
        own = [IMAGE_PART if part["type"] != "text" else part for part in parts]
        text = "".join(part.get("text", "") for part in own)
        placed.append(message | {"content": own if IMAGE_PART in own else text})
    _check_count(images.count(None), given)
    waiting = iter(given)
    return placed, [next(waiting) if image is None else image for image in images]


def _check_count(num_places: int, given: Sequence[Any]) -> None:
    if num_places != len(given):
        raise ValueError(
            f"the prompt has {num_places} places for images ({MARK} in a text, or parts of type image that name none), "
            f"but the record has {len(given)} images: write one for each. For {MARK} as plain text, write the content "
            "of the message as parts, [{'type': 'text', 'text': ...}]"
        )


def _parts(content: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the parts of a message without the null fields that parquet adds."""
    if isinstance(content, str):
        texts = filter(None, re.split(f"({MARK})", content))
        return [IMAGE_PART if text == MARK else {"type": "text", "text": text} for text in texts]
    found = []
    for part in content:
        known = {name: value for name, value in part.items() if value is not None} if isinstance(part, dict) else {}
        if known.get("type") not in ("text", "image", "image_url") or not isinstance(known.get("text", ""), str):
            raise ValueError(f"a part of a message is {part!r:.80}: expected {{'type': 'text' or 'image'}}")
        found.append(known)
    return found


def _source(part: Mapping[str, Any]) -> Any:
    return next((part[name] for name in SOURCES if part.get(name)), None)


def image_file(value: Any, data_file: str) -> ImageFile:
    """Return the file of an image in a record.

    Args:
        data_file: path of the record's file, beside which relative paths are looked up before the working folder.
    Raises:
        ValueError: it has none of the FORMS.
    """
    name = ""
    while isinstance(value, Mapping):
        name = str(value.get("path") or "")
        value = _source(value)
    if isinstance(value, bytes):
        return ImageFile(value, name or f"of {len(value):,} bytes")
    if not isinstance(value, str) or not value:
        raise ValueError(f"an image is {value!r:.80}: expected {FORMS}")
    if value.startswith(("http://", "https://")):
        raise ValueError(f"the image {value:.80} is not on this machine: download it, and name its path")
    try:
        if value.startswith("data:"):
            return ImageFile(base64.b64decode(value.partition(",")[2], validate=True), f"{value:.40}...")
        path = Path(unquote(urlsplit(value).path) if value.startswith("file://") else value)
        beside = Path(data_file).parent / path
        return ImageFile(None, str((beside if beside.exists() else path).absolute()))
    except (OSError, binascii.Error) as error:
        raise ValueError(f"an image is {value!r:.80} ({error.args[-1]}): expected {FORMS}") from None


@contextmanager
def naming(file: ImageFile) -> Iterator[None]:
    """Turn errors of an image that is missing or damaged into a ValueError that names its file."""
    try:
        yield
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"the image {file.path} cannot be used ({error}): correct its path, or replace it") from None


def opened(content: bytes) -> Image.Image:
    """Return an image whose header has been read. It may be damaged, see `ImageReader.measure`."""
    return Image.open(io.BytesIO(content))


def _orientation(image: Image.Image) -> int:
    """Return EXIF's orientation, by the header; 1 for an upright image, and where EXIF's data are damaged."""
    with suppress(struct.error, SyntaxError, ValueError, TypeError):
        if "exif" in image.info:
            return int(image.getexif().get(Base.Orientation, 1))
    return 1


def upright(image: Image.Image) -> Image.Image:
    """Return an image in RGB, upright, on white.

    Raises:
        OSError, SyntaxError, ValueError: it is damaged.
    """
    turned = _orientation(image) != 1
    image.load()
    if turned:
        image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def data_url(content: bytes) -> str:
    """Return an image as engines get it: its file, or a PNG of what training reads, where SGLang would read another."""
    image = opened(content)
    if image.mode != "RGB" or image.has_transparency_data or _orientation(image) != 1:
        content = _encoded(upright(image), "PNG")
    return "data:image;base64," + base64.b64encode(content).decode()


def thumbnail(content: bytes) -> bytes:
    """Return an image as a small JPEG."""
    image = upright(opened(content))
    image.thumbnail(THUMBNAIL)
    return _encoded(image, "JPEG")


def _encoded(image: Image.Image, form: str) -> bytes:
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


def _processor(folder: str, vision: Vision, max_pixels: int | None) -> Any:
    """Return the image processor of a model's folder, the one with PIL alone where torch must not be imported.

    Raises:
        ConfigError: there is none, another one than Qwen's, or one of another model.
    """
    from transformers import AutoImageProcessor  # not above: it takes seconds, and imports torch where it may

    limits = {} if max_pixels is None else {"max_pixels": max_pixels}
    remedy = "copy preprocessor_config.json from the model's repository"
    try:
        processor = AutoImageProcessor.from_pretrained(folder, local_files_only=True, **limits)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"model.path: no image processor can be read in {folder} ({reason}): {remedy}") from None
    found = type(processor).__name__.removesuffix("Pil"), *(getattr(processor, name, None) for name in PATCHES)
    expected = "Qwen2VLImageProcessor", *(getattr(vision, name) for name in PATCHES)
    if found != expected:
        raise ConfigError(
            f"model.path: the image processor in {folder} is {found}, but config.json belongs to {expected} "
            f"({', '.join(PATCHES)}): {remedy}"
        )
    return processor


class ImageReader:
    """Reads images as the image processor of a model's folder does.

    Args:
        max_pixels: most pixels of an image, which is made smaller above that; None: the processor's.
    Attributes:
        placeholder: text that stands for an image.
        mark: the token in it that stands for the image's patches.
        vision: the tower of the model.
    Raises:
        ConfigError: the folder has no such processor.
    """

    def __init__(
        self, folder: str, vision: Vision, tokenizer: "PreTrainedTokenizerBase", max_pixels: int | None = None
    ):
        self.vision = vision
        tokens = [vision.start_token, vision.image_token, vision.end_token]
        start, self.mark, end = tokenizer.convert_ids_to_tokens(tokens)
        self.placeholder = start + self.mark + end
        self._video_mark = tokenizer.convert_ids_to_tokens(vision.video_token)
        self._processor = _processor(folder, vision, max_pixels)

    def check_text(self, text: str, num_images: int) -> None:
        """Check that a rendered prompt has as many places as images.

        Raises:
            ValueError: it has not.
        """
        found = text.count(self.mark)
        if found != num_images or self._video_mark in text:
            raise ValueError(
                f"the rendered prompt has {found} {self.mark} for {num_images} images, and {self._video_mark} "
                f"{text.count(self._video_mark)} times: texts may hold neither, videos are not read, and the chat "
                "template must render parts of type image"
            )

    def _grid(self, image: Image.Image) -> Grid:
        """Return the patches of an image, by its header: frames, rows and columns.

        Raises:
            ValueError: it is too narrow.
        """
        # Not above: it takes seconds.
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        width, height = reversed(image.size) if _orientation(image) >= 5 else image.size
        limits = self._processor.size
        edge = self.vision.patch_size
        unit = edge * self.vision.merge_size
        rows, columns = smart_resize(height, width, unit, limits["shortest_edge"], limits["longest_edge"])
        return 1, rows // edge, columns // edge

    def num_tokens(self, grid: Grid) -> int:
        """Return the tokens of an image."""
        return num_image_tokens(grid, self.vision.merge_size)

    def measure(self, file: ImageFile, *, whole: bool = False) -> tuple[Grid, str]:
        """Return the patches of an image, and the checksum of its file.

        Args:
            whole: check that all of the image can be read, not its header alone.
        Raises:
            ValueError: it is missing, damaged, too narrow, or grey with more than 8 bits.
        """
        with naming(file):
            content = file.read()
            image = opened(content)
            if image.mode.startswith(("I", "F")):
                raise ValueError("its grey values have more than 8 bits")
            grid = self._grid(image)
            if whole:
                image.load()
        return grid, sha256(content).hexdigest()[:32]

    def pixels(self, content: bytes, grid: Grid) -> Any:
        """Return the patches of an image, a tensor [patches, numbers of a patch] float32.

        Raises:
            RuntimeError: the processor makes another grid of it.
        """
        made = self._processor(images=[upright(opened(content))], return_tensors="pt")
        [found] = made["image_grid_thw"].tolist()
        if tuple(found) != grid:
            raise RuntimeError(f"expected an image of {grid} patches, but the image processor makes {found}")
        return made["pixel_values"]


def image_reader(config: Config, tokenizer: "PreTrainedTokenizerBase") -> ImageReader | None:
    """Return the reader of a run's images; None for a model without vision.

    Raises:
        ConfigError: see `ImageReader`.
    """
    vision = read_architecture(config.model.path).vision
    return None if vision is None else ImageReader(config.model.path, vision, tokenizer, config.data.max_image_pixels)


def images_in(value: Any) -> list[Any]:
    """Return the images of a record's field: a list, one, or none."""
    return value if isinstance(value, list) else [value] if value else []

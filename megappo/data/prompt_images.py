"""Images of a run's prompts, on any rank: for the engines, the models, reward functions and people."""

import re
import tempfile
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from megappo.batch.images import Image
from megappo.config.config_error import ConfigError
from megappo.data.image_files import ImageReader, data_url, thumbnail
from megappo.data.prompts import Prompt, PromptDataset
from megappo.engines.generations import SentImage
from megappo.observe.files import ROLLOUTS_FOLDER
from megappo.runtime.durable_files import put_whole
from megappo.userland.user_code import JsonObject

MOST_RECORDS = 2**24
"""Records of a data set that a float32 numbers."""
KEPT_PLACES, KEPT_URLS = 2**16, 64
"""Prompts whose images' places, and images whose content for requests, are kept in memory."""


class PromptImages:
    """An `ImageSource` that reads images from the data files whenever they are needed.

    Args:
        datasets: the run's, by their numbers; None for the training prompts of a run that only evaluates.
    Raises:
        ConfigError: a data set has too many records.
    """

    def __init__(self, reader: ImageReader, datasets: Sequence[PromptDataset | None]):
        self._reader = reader
        self._datasets = datasets
        self._url = lru_cache(KEPT_URLS)(lambda key: data_url(self._content(key)))
        self._places = lru_cache(KEPT_PLACES)(lambda data_set, index: self._datasets[data_set].images_at(index))
        for dataset in filter(None, datasets):
            if len(dataset) > MOST_RECORDS:
                raise ConfigError(f"data: more than {MOST_RECORDS:,} prompts for a model with vision: name fewer files")

    def images(self, record: tuple[int, int]) -> Sequence[Image]:
        """Return the images of a prompt, by its number of the data set and its position there."""
        return self._places(*record)

    def pixels(self, image: Image) -> Any:
        """Return the patches of an image, see `ImageReader.pixels`."""
        return self._reader.pixels(self._content(image.key), image.grid)

    def sent(self, prompt: Prompt) -> list[SentImage]:
        """Return the images of a prompt as engines get them."""
        found = []
        for image in prompt.images:
            found.append(SentImage(image.place, self._reader.num_tokens(image.grid), self._url(image.key)))
        return found

    def columns(self, prompt: Prompt) -> JsonObject:
        """Return the fields of a prompt for reward functions, with the paths of its images for those that take them."""
        name = self._datasets[prompt.data_set].image_column
        return prompt.columns if name is None else prompt.columns | {name: [self._path(one) for one in prompt.images]}

    def one_each(self, text: str) -> str:
        """Return a decoded prompt with one placeholder for each image."""
        mark = self._reader.mark
        return re.sub(f"(?:{re.escape(mark)})+", lambda _: mark, text)

    def thumbnails(self, record: tuple[int, int], output_dir: str | Path) -> list[str]:
        """Write small copies of a prompt's images into a run's folder; return their paths there."""
        data_set, index = record
        paths = []
        for file in self._datasets[data_set].image_files(index):
            _, digest = self._reader.measure(file)
            name = f"{ROLLOUTS_FOLDER}/images/{digest}.jpg"
            path = Path(output_dir, name)
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                content = thumbnail(file.read())
                put_whole(path, lambda partial, content=content: partial.write_bytes(content))
            paths.append(name)
        return paths

    def _content(self, key: tuple[int, int, int]) -> bytes:
        data_set, index, number = key
        return self._datasets[data_set].image_files(index)[number].read()

    def _path(self, image: Image) -> str:
        """Return the path of an image. One that lies in a data file is written into a temporary folder of this rank."""
        data_set, index, number = image.key
        file = self._datasets[data_set].image_files(index)[number]
        if file.content is None:
            return file.path
        path = Path(self._folder.name, "_".join(map(str, image.key)) + Path(file.path).suffix)
        path.write_bytes(file.content)
        return str(path)

    @cached_property
    def _folder(self) -> "tempfile.TemporaryDirectory[str]":
        return tempfile.TemporaryDirectory(prefix="megappo-images-")

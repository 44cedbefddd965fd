"""Images of a run's prompts, on any rank: for the engines, the models, reward functions and people."""

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from threading import get_ident
from typing import Any

from megappo.batch.images import Image
from megappo.config.config_error import ConfigError
from megappo.data.image_files import ImageFile, ImageReader, data_url, naming, thumbnail
from megappo.data.prompts import Prompt, PromptDataset
from megappo.engines.generations import SentImages
from megappo.observe.files import ROLLOUTS_FOLDER
from megappo.userland.user_code import JsonObject

MOST_RECORDS = 2**24
"""Records of a data set that a float32 numbers."""
THUMBNAILS, ORIGINALS = f"{ROLLOUTS_FOLDER}/images", f"{ROLLOUTS_FOLDER}/originals"
"""Folders in the run's folder with small copies for people, and with images out of data files for reward functions."""
KEPT_PLACES = 2**16
"""Prompts whose images' places and paths are kept in memory."""


class PromptImages:
    """An `ImageSource` that reads images from the data files whenever they are needed.

    Args:
        datasets: the run's, by their numbers; None for the training prompts of a run that only evaluates.
        output_dir: the run's folder.
    Raises:
        ConfigError: a data set has too many records.
    """

    def __init__(self, reader: ImageReader, datasets: Sequence[PromptDataset | None], output_dir: str):
        self._output_dir = Path(output_dir)
        self._reader = reader
        self._datasets = {number: dataset for number, dataset in enumerate(datasets) if dataset is not None}
        self._places = lru_cache(KEPT_PLACES)(lambda data_set, index: self._datasets[data_set].images_at(index))
        self._paths = lru_cache(KEPT_PLACES)(lambda record: list(map(self._path, self._files(record))))
        if max(map(len, self._datasets.values())) > MOST_RECORDS:
            raise ConfigError(f"data: more than {MOST_RECORDS:,} prompts for a model with vision: name fewer files")

    def images(self, record: tuple[int, int]) -> Sequence[Image]:
        """Return the images of a prompt, by its number of the data set and its position there."""
        return self._places(*record)

    def pixels(self, image: Image) -> Any:
        """Return the patches of an image, see `ImageReader.pixels`."""
        *record, number = image.key
        file = self._files(record)[number]
        with naming(file):
            return self._reader.pixels(file.read(), image.grid)

    def sent(self, prompt: Prompt) -> SentImages:
        """Return the images of a prompt as engines get them, which reads all their files."""
        tokens = list(prompt.tokens)
        for image in reversed(prompt.images):
            del tokens[image.place + 1 : image.place + self._reader.num_tokens(image.grid)]
        urls = []
        for file in self._files(prompt.record) if prompt.images else ():
            with naming(file):
                urls.append(data_url(file.read()))
        self.columns(prompt)  # writes files here, not where it is called again, between responses
        return SentImages(len(prompt.tokens), tokens, urls)

    def columns(self, prompt: Prompt) -> JsonObject:
        """Return the fields of a prompt for reward functions, with the paths of its images if they take these."""
        name = self._datasets[prompt.record[0]].image_column
        return prompt.columns if name is None else prompt.columns | {name: self._paths(prompt.record)}

    def thumbnails(self, record: Sequence[float]) -> list[str]:
        """Write small copies of a prompt's images; return their paths in the run's folder."""
        names = []
        for file in self._files(record):
            with naming(file):
                names.append(self._written(file.read(), THUMBNAILS, ".jpg", thumbnail))
        return names

    def _files(self, record: Sequence[float]) -> Sequence[ImageFile]:
        data_set, index = map(int, record)
        return self._datasets[data_set].image_files(index)

    def _path(self, file: ImageFile) -> str:
        """Return the path of an image. One that lies in a data file is written into the run's folder."""
        if file.content is None:
            return file.path
        name = self._written(file.content, ORIGINALS, Path(file.path).suffix, bytes)
        return str((self._output_dir / name).absolute())

    def _written(self, content: bytes, folder: str, suffix: str, make: Callable[[bytes], bytes]) -> str:
        """Write what `make` makes of an image, unless a rank has; return its path in the run's folder."""
        name = f"{folder}/{sha256(content).hexdigest()[:32]}{suffix}"
        path = self._output_dir / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            own = path.with_name(f"{path.name}.{os.getpid()}.{get_ident()}.tmp")
            own.write_bytes(make(content))
            own.replace(path)
        return name

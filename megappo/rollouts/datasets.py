"""The data of a run: its tokenizer and prompts."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, BinaryIO

from transformers import PreTrainedTokenizerBase

from megappo.batch.exchange import Exchange
from megappo.config.config_error import ConfigError
from megappo.config.schema import Config
from megappo.data.image_files import image_reader
from megappo.data.preferences import open_examples
from megappo.data.prompt_images import PromptImages
from megappo.data.prompts import open_datasets
from megappo.data.record_dataset import share
from megappo.data.records import Write, unpacked
from megappo.data.tokenizer import check_vocabularies, load_tokenizer, stop_token_ids
from megappo.placement.components import policy_folders, shared_vocabulary
from megappo.userland.environments import TaskWorkers


@dataclass(frozen=True)
class Datasets:
    """A run's prompts, or examples, and their tokenizer.

    Attributes:
        stop_token_ids: end a response, and belong to it.
        vocab_size: tokens below it are known to every model.
        train: a `RecordDataset` of prompts, or of examples; None in a run that only evaluates.
        val: held-out ones by the name of their data set.
        images: images of the prompts; None for a model without vision.
    """

    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    vocab_size: int
    train: Any
    val: Mapping[str, Any]
    _held_out: dict[str, list[Any]] = field(default_factory=dict)
    images: PromptImages | None = None

    def check(self, exchange: Exchange) -> list[str]:
        """Check all prompts, each rank its share; all ranks together. Return warnings, and one line for each reason for
        which prompts are left out or cut.

        Raises:
            ConfigError: on every rank, with everything that is wrong.
        """
        errors = []
        notes = []
        for dataset in filter(None, (self.train, *self.val.values())):
            mine = dataset.check(self.vocab_size, lambda size: share(range(size), exchange.rank, exchange.world_size))
            parts = exchange.all_gather(mine)
            errors += dataset.errors(parts)
            notes += [f"warning: {line}" for line in dataset.warnings(parts)]
            notes += dataset.leave_out(parts)
        errors += self.train.batch_errors() if self.train else []  # none is an error of its own
        if errors:
            raise ConfigError(*errors)
        return notes

    def held_out(self, name: str, exchange: Exchange) -> list[Any]:
        """Return the prompts of a data set of `val`. On the first call each rank tokenizes its share."""
        if name not in self._held_out:
            dataset = self.val[name]
            mine = dataset.at(share(dataset.kept, exchange.rank, exchange.world_size))
            self._held_out[name] = list(chain.from_iterable(exchange.all_gather(mine)))
        return self._held_out[name]


def load_datasets(config: Config, workers: Mapping[str, TaskWorkers], exchange: Exchange) -> Datasets:
    """Open a run's data, which is not checked yet; all ranks together.

    Args:
        workers: reward functions and environments of each task, on the ranks that own an engine. Every rank reads the
            fields that they take.
    Raises:
        ConfigError: the tokenizer or a file cannot be used.
    """
    takes_by_rank = exchange.all_gather({name: one.takes for name, one in workers.items()})
    takes = next(filter(None, takes_by_rank), {})
    tokenizer = load_tokenizer(config.model.path)
    check_vocabularies(tokenizer, policy_folders(config))
    ends = stop_token_ids(config.model.path, config.rollout.stop, tokenizer)
    unpack = partial(unpacked_once, exchange)
    vocab_size = shared_vocabulary(config)
    if not config.recipe.has_rollouts:
        return Datasets(tokenizer, ends, vocab_size, *open_examples(config, tokenizer, ends, unpack))
    reader = image_reader(config, tokenizer)
    train, val = open_datasets(config, tokenizer, takes, unpack, reader)
    images = None
    if reader is not None:
        images = PromptImages(reader, [train, *val.values()], config.trainer.output_dir)
        ends += reader.vision.media_tokens  # the next request would have a place without an image
    return Datasets(tokenizer, ends, vocab_size, train, val, images=images)


def unpacked_once(exchange: Exchange, write: Write) -> BinaryIO:
    """Unpack a file once per node and open it on all ranks of the node; all ranks together.

    Raises:
        RecordsError: `write` raised it, on any rank.
    """
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    first = exchange.rank - exchange.rank % ranks_per_node
    file: BinaryIO | None = None
    path = ""
    error = None
    if exchange.rank == first:
        try:
            file = unpacked(write)
            path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        except Exception as failure:
            error = failure
    paths = exchange.all_gather(error or path)
    for path_or_error in paths:
        if isinstance(path_or_error, Exception):
            raise path_or_error
    opened = file or open(paths[first], "rb")  # noqa: SIM115
    exchange.all_gather(None)  # the first rank keeps its file until all ranks have opened it
    return opened

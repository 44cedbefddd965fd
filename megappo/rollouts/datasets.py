"""What a run reads: the tokenizer and the prompts."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import BinaryIO

from transformers import PreTrainedTokenizerBase

from megappo.batch.exchange import Exchange
from megappo.config.errors import ConfigError
from megappo.config.schema import Config
from megappo.data.prompts import Prompt, PromptDataset, batch_errors, open_datasets, share
from megappo.data.tokenizer import load_tokenizer, stop_token_ids
from megappo.data.unpacking import Write, unpacked
from megappo.placement.components import shared_vocabulary
from megappo.userland.environment_workers import Workers


@dataclass(frozen=True)
class Datasets:
    """A run's prompts, and how they are read.

    Attributes:
        stop_token_ids: end a response, and belong to it.
        vocab_size: tokens below it are known to every model.
        train: None where there are only evaluations.
        val: dataset name -> its prompts.
    """

    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    vocab_size: int
    train: PromptDataset | None
    val: dict[str, PromptDataset]
    _held_out: dict[str, list[Prompt]] = field(default_factory=dict)

    def check(self, exchange: Exchange) -> list[str]:
        """See that all prompts can be used, but for those to be left out; all ranks together, each of which looks at
        its share. Gives what is left out or cut, one line for each reason, and warnings.

        Raises:
            ConfigError: what is wrong with them, on every rank.
        """
        errors, notes = [], []
        for dataset in filter(None, (self.train, *self.val.values())):
            mine = dataset.check(self.vocab_size, lambda size: share(range(size), exchange.rank, exchange.world_size))
            parts = exchange.share(mine)
            errors += dataset.errors(parts)
            notes += [f"warning: {line}" for line in dataset.warnings(parts)]
            notes += dataset.leave_out(parts)
        errors += batch_errors(self.train)
        if errors:
            raise ConfigError(*errors)
        return notes

    def held_out(self, name: str, exchange: Exchange) -> list[Prompt]:
        """The prompts of a dataset of `val`, kept from the first call on; each rank tokenises its share."""
        if name not in self._held_out:
            dataset = self.val[name]
            mine = dataset.at(share(dataset.kept, exchange.rank, exchange.world_size))
            self._held_out[name] = list(chain.from_iterable(exchange.share(mine)))
        return self._held_out[name]


def load_datasets(config: Config, workers: Mapping[str, Workers], exchange: Exchange) -> Datasets:
    """The prompts of a run, which are yet to be checked; all ranks together.

    Args:
        workers: reward functions and environments of each task, on the ranks that own an engine. Every rank reads the
            fields that they take.
    Raises:
        ConfigError: the tokenizer or a file cannot be used.
    """
    of_ranks = exchange.share({name: one.takes for name, one in workers.items()})
    takes = next(filter(None, of_ranks), {})
    tokenizer = load_tokenizer(config.model.path)
    ends = stop_token_ids(config.model.path, config.rollout.stop, tokenizer)
    datasets = open_datasets(config, tokenizer, takes, partial(unpacked_once, exchange))
    return Datasets(tokenizer, ends, shared_vocabulary(config), *datasets)


def unpacked_once(exchange: Exchange, write: Write) -> BinaryIO:
    """An `unpacked` file of which each node has one, that all of its ranks read; all ranks together.

    Raises:
        RecordsError: as `write` does, on every rank.
    """
    ranks_of_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    first = exchange.rank - exchange.rank % ranks_of_node
    file: BinaryIO | None = None
    found: str | Exception | None = None
    if exchange.rank == first:
        try:
            file = unpacked(write)
            found = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        except Exception as error:
            found = error
    of_ranks = exchange.share(found)
    for error in of_ranks:
        if isinstance(error, Exception):
            raise error
    try:
        opened = file or open(of_ranks[first], "rb")  # noqa: SIM115
    except OSError:  # the ranks are in containers of their own
        opened = unpacked(write)
    exchange.share(None)  # the first rank's must be there until all have it
    return opened

"""Prompts of jsonl or parquet files, in an order that needs no saved state to resume."""

import bisect
import itertools
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from megappo.config.errors import ConfigError
from megappo.config.eval_sets import TRAINING, eval_sets
from megappo.config.schema import Config, Data, Reward
from megappo.data.chat import Chat
from megappo.data.entries import Checker, Entry, entry_of, tokens_of
from megappo.data.faults import BEGINNINGS, Check, DataFile, Done, check_lines
from megappo.data.fields import NO_REWARD, Fields
from megappo.data.file_heads import RecordsError
from megappo.data.order import Order, Turns
from megappo.data.records import Records, open_records
from megappo.data.special_tokens import unseen_tokens
from megappo.data.unpacking import Unpack, unpacked
from megappo.userland.forms import NOTHING, Takes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """One line of a data file.

    Attributes:
        index: position in the dataset (files in order, lines in order), from 0.
        tokens: token ids, at least one.
        text: the prompt as the model sees it; chat messages are rendered by the chat template.
        label: what the reward function gets, as the file has it.
        columns: what it takes besides, by name.
    """

    index: int
    tokens: list[int]
    text: str
    label: Any
    columns: dict[str, Any] = field(default_factory=dict)


class PromptDataset:
    """All prompts of some files. They are parsed and tokenised when they are asked for; `check` tells what is wrong.

    Args:
        files: jsonl or parquet files.
        config: the data section, but for its files.
        seed: of the order (trainer.seed).
        key: that names the files, for messages.
        takes: what reward function and environment take besides prompt and label.
        unpack: see `open_records`.
        weights: of the files, each of which has epochs of its own then; none: they are one.
        reward: the section, with the functions that score responses.
        order_by: see data.order_by; in this order prompts are taken once all have been looked at.

    Attributes:
        kept: positions in the dataset of the prompts that a run uses: all, until some are left out.

    Raises:
        ConfigError: a file is missing, empty, or of another kind; the chat template does not read what it is given.
    """

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: "PreTrainedTokenizerBase",
        config: Data,
        seed: int,
        key: str = "data.train_files",
        takes: Takes = NOTHING,
        unpack: Unpack = unpacked,
        weights: Sequence[float] = (),
        order_by: str | None = None,
        reward: Reward = NO_REWARD,
    ):
        self.config = config
        self.seed = seed
        self._key = key
        self._tokenizer = tokenizer
        self._chat = Chat(tokenizer, config, takes.tools)
        section = key.rpartition(".")[0]
        self._fields = Fields(config.prompt_key, config.label_key, takes, section, order_by, reward)
        self.files = [DataFile(key, file, _open(key, file, self._fields.names, unpack)) for file in files]
        self._starts = [0, *itertools.accumulate(len(file.records) for file in self.files)]
        self.kept: Sequence[int] = range(self._starts[-1])
        self._weights = weights
        self._turns = Turns(weights or [1])
        self._orders = [] if order_by else self._arranged(array("d"))

    def __len__(self) -> int:
        return len(self.kept)

    def batch(self, num_drawn: int, rank: int = 0, world_size: int = 1) -> list[Prompt]:
        """The prompts that are drawn at a time, behind so many that were drawn before: a pure function of (seed,
        num_drawn). Of several ranks this one's share, a part of them behind each other.

        Each epoch is a permutation of all prompts (their own order without shuffle), or of each file's where these have
        weights; a batch at its end runs on into the next epoch, so nothing is dropped.
        """
        return self.at(share(self.indices(num_drawn), rank, world_size))

    def indices(self, num_drawn: int) -> list[int]:
        """The positions of such a batch's prompts in the dataset."""
        turns = self._turns.between(num_drawn, num_drawn + self.config.draw_size)
        return [self.kept[first + order[place]] for whose, place in turns for first, order in [self._orders[whose]]]

    def shares(self) -> list[tuple[str, int, int]]:
        """Of each part that has epochs of its own: what it is, its prompts of a batch at most, and in all."""
        names = [file.path for file in self.files] if self._weights else [self._key]
        most = [self._turns.most(part, self.config.draw_size) for part in range(len(names))]
        return list(zip(names, most, map(len, self._parts()), strict=True))

    def at(self, indices: Sequence[int]) -> list[Prompt]:
        """The prompts of these positions in the dataset, each of which is right."""
        entries = [self._entry(index) for index in indices]
        tokens = tokens_of(entries, self._tokenizer)
        return list(map(self._prompt, indices, tokens, entries))

    @cached_property
    def all(self) -> list[Prompt]:
        """Every prompt that is kept, in the files' order."""
        return self.at(self.kept)

    def check(self, vocab_size: int, chosen: Callable[[int], Sequence[int]] = range) -> list[Check]:
        """What is wrong with the records of each file.

        Args:
            vocab_size: tokens below it are known to every model.
            chosen: which records of a file, by their numbers from 0, when it has so many.
        """
        checker = Checker(self._fields, self._chat, self._tokenizer, self.config, vocab_size)
        return [checker.check(file.records, chosen(len(file.records))) for file in self.files]

    def errors(self, parts: Sequence[Sequence[Check]]) -> list[str]:
        """What several ranks' `check` found together with which the run does not start, one line each."""
        left_out, looked_at = _counts(parts)
        if left_out == looked_at:
            whole = f"{self._key}: no prompt is left: all {looked_at:,} records that were looked at are left out"
            return [whole, *self._lines(parts, "skip")]
        return self._lines(parts, "error", "bad_row")

    def warnings(self, parts: Sequence[Sequence[Check]]) -> list[str]:
        """What else several ranks' `check` found, and what reward functions do not see, one line for each reason."""
        of_files = zip(self.files, zip(*parts, strict=True), strict=True)
        lost = (check_lines(file, checks, self._fields.wanted, "lost") for file, checks in of_files)
        lines = itertools.chain.from_iterable(itertools.islice(of_file, 1) for of_file in lost)
        unseen = (f"{self._key}: {line}" for line in unseen_tokens(self._fields.reward, self._tokenizer))
        return [*lines, *self._lines(parts, "warn"), *unseen]

    def leave_out(self, parts: Sequence[Sequence[Check]]) -> list[str]:
        """Go on without the records that are to be left out; how many, these and prompts that are cut, one line for
        each reason.

        Args:
            parts: several ranks' `check`, of which each has looked at records behind those of the one before.
        """
        left_out, looked_at = _counts(parts)
        is_kept = bytearray(b"\1") * self._starts[-1]
        for part in parts:
            for start, check in zip(self._starts[:-1], part, strict=True):
                for number in check.left_out:
                    is_kept[start + number] = 0
        if left_out:
            self.kept = array("I", itertools.compress(range(self._starts[-1]), is_kept))
        if self._fields.order_by is None or looked_at == self._starts[-1]:
            ranks = itertools.chain.from_iterable(check.ranks for file in zip(*parts, strict=True) for check in file)
            self._orders = self._arranged(array("d", itertools.compress(ranks, is_kept)))
        if not left_out:
            return self._told(parts, "truncate_left")
        whole = f"{BEGINNINGS['skip']}{self._key}: {left_out:,} of {looked_at:,} records"
        return [whole, *self._told(parts, "skip"), *self._told(parts, "truncate_left")]

    def _parts(self) -> list[range]:
        """Places in `kept` of what has epochs of its own."""
        bounds = self._starts if self._weights else [0, self._starts[-1]]
        places = [bisect.bisect_left(self.kept, bound) for bound in bounds]
        return list(map(range, places, places[1:]))

    def _arranged(self, ranks: "array[float]") -> list[tuple[int, Order]]:
        """Of each of these parts, where it begins in `kept`, and its order; `ranks` are of all that are kept."""
        return [
            (
                part.start,
                Order(
                    f"{self.seed}/{number}" if self._weights else str(self.seed),
                    len(part),
                    shuffle=self.config.shuffle,
                    values=ranks[part.start : part.stop],
                ),
            )
            for number, part in enumerate(self._parts())
        ]

    def _told(self, parts: Sequence[Sequence[Check]], done: Done) -> list[str]:
        return [BEGINNINGS[done] + line for line in self._lines(parts, done)]

    def _lines(self, parts: Sequence[Sequence[Check]], *done: Done) -> list[str]:
        of_files = zip(self.files, zip(*parts, strict=True), strict=True)
        return [line for file, checks in of_files for line in check_lines(file, checks, self._fields.wanted, *done)]

    def _prompt(self, index: int, tokens: list[int], entry: Entry) -> Prompt:
        limit, text = self.config.max_prompt_length, entry.text
        if len(tokens) > limit and self.config.too_long == "truncate_left":
            tokens = tokens[-limit:]
            text = self._tokenizer.decode(tokens)
        return Prompt(index, tokens, text, entry.label, entry.columns)

    def _entry(self, index: int) -> Entry:
        file = bisect.bisect_right(self._starts, index) - 1
        [record] = self.files[file].records.at([index - self._starts[file]])
        return entry_of(record, self._fields, self._chat)


def open_datasets(
    config: Config,
    tokenizer: "PreTrainedTokenizerBase",
    takes: Mapping[str, Takes] = MappingProxyType({}),
    unpack: Unpack = unpacked,
) -> tuple[PromptDataset | None, dict[str, PromptDataset]]:
    """Training prompts, None where there are only evaluations, and held-out ones by the name of each of `eval_sets`.

    Args:
        takes: what reward function and environment of each of `played_tasks` take of a record besides prompt and label.
        unpack: see `open_records`.
    Raises:
        ConfigError: a file is missing, empty, or of another kind.
    """
    data, seed = config.data, config.trainer.seed
    taken = defaultdict(lambda: NOTHING, takes)
    train = None
    if not config.trainer.eval_only:
        train = PromptDataset(
            data.files,
            tokenizer,
            data,
            seed,
            takes=taken[TRAINING],
            unpack=unpack,
            weights=tuple(data.shares.values()),
            order_by=data.order_by,
            reward=config.reward,
        )
    val = {
        name: PromptDataset(one.files, tokenizer, one.data, seed, one.key, taken[name], unpack, reward=one.reward)
        for name, one in eval_sets(config).items()
    }
    return train, val


def batch_errors(train: PromptDataset | None) -> list[str]:
    """Whether a step takes more prompts than there are."""
    if train is None or not len(train):  # which is told as such
        return []
    size = train.config.draw_size
    key = f"data.{'train' if train.config.gen_batch_size is None else 'gen'}_batch_size"
    return [
        f"{key} {size} is more than the {there:,} prompts of data.train_files, so that a step would "
        "hold some twice: lower it, or name more files"
        if name == "data.train_files"
        else f"data.train_files: {name} gives {most:,} of the {key} {size:,} prompts of a step and has "
        f"{there:,}, so that a step would hold some twice: lower its weight, or that"
        for name, most, there in train.shares()
        if most > there
    ]


def share(items: Sequence[T], rank: int, world_size: int) -> Sequence[T]:
    """A rank's share of some items, behind each other, when all have as many."""
    return items[len(items) * rank // world_size : len(items) * (rank + 1) // world_size]


def _counts(parts: Sequence[Sequence[Check]]) -> tuple[int, int]:
    """Records that are left out, and those that were looked at."""
    checks = [check for part in parts for check in part]
    return sum(len(check.left_out) for check in checks), sum(check.looked_at for check in checks)


def _open(key: str, file: str, names: Sequence[str] | None, unpack: Unpack) -> Records:
    try:
        return open_records(file, names, unpack)
    except RecordsError as error:
        raise ConfigError(f"{key}: {file} {error}") from error
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {file} ({error.strerror}): correct the path, or its rights") from error

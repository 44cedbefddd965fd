"""Prompts of jsonl or parquet files, in an order that needs no saved state to resume."""

import bisect
import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from megappo.config.config_error import ConfigError
from megappo.config.eval_sets import TRAINING, eval_sets
from megappo.config.schema import Config, Data, Reward
from megappo.data.chat import Chat
from megappo.data.entries import NO_REWARD, PromptEntry, RecordFields, entry_of, tokens_of
from megappo.data.faults import PREFIXES, Action, Check, DataFile, fault_lines
from megappo.data.file_formats import RecordsError, Unpack, unpacked
from megappo.data.order import Order, Turns
from megappo.data.prompt_checks import PromptChecker, hidden_token_warnings
from megappo.data.records import Records, open_records
from megappo.userland.signatures import NO_INPUT, InputSpec

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
        label: for the reward function, as the file has it.
        columns: further fields for it, by name.
    """

    index: int
    tokens: list[int]
    text: str
    label: Any
    columns: dict[str, Any] = field(default_factory=dict)


class PromptDataset:
    """Prompts of some files, parsed and tokenised on request; `check` finds their faults.

    Args:
        files: jsonl or parquet files.
        config: the data section, apart from its files.
        seed: of the order (trainer.seed).
        key: that names the files, for messages.
        takes: fields for reward function and environment besides prompt and label.
        unpack: see `open_records`.
        weights: of the files, each of which then has its own epochs; none: they are one.
        order_by: see data.order_by; prompts are ordered once all have been checked.
        reward: the section with the functions that score responses.

    Attributes:
        kept: positions in the dataset of the prompts that a run uses: all, until some are left out.

    Raises:
        ConfigError: a file is missing, empty, or of another format; the chat template does not read its arguments.
    """

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: "PreTrainedTokenizerBase",
        config: Data,
        seed: int,
        key: str = "data.train_files",
        takes: InputSpec = NO_INPUT,
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
        self._fields = RecordFields(config.prompt_key, config.label_key, takes, section, order_by, reward)
        self.files = [DataFile(key, file, _open(key, file, self._fields.names, unpack)) for file in files]
        self._starts = [0, *itertools.accumulate(len(file.records) for file in self.files)]
        self.kept: Sequence[int] = range(self._starts[-1])
        self._weights = weights
        self._turns = Turns(weights or [1])
        self._orders = [] if order_by else self._arranged(array("d"))

    def __len__(self) -> int:
        return len(self.kept)

    def batch(self, num_drawn: int, rank: int = 0, world_size: int = 1) -> list[Prompt]:
        """Return this rank's share of the prompts drawn next after `num_drawn`: a pure function of seed and num_drawn.

        Each epoch is a permutation of all prompts (their own order without shuffle), or of each file's where these have
        weights; a batch at its end runs on into the next epoch, so nothing is dropped.
        """
        return self.at(share(self.indices(num_drawn), rank, world_size))

    def indices(self, num_drawn: int) -> list[int]:
        """Return the positions of such a batch's prompts in the dataset."""
        indices = []
        for part, place in self._turns.between(num_drawn, num_drawn + self.config.draw_size):
            first, order = self._orders[part]
            indices.append(self.kept[first + order[place]])
        return indices

    def shares(self) -> list[tuple[str, int, int]]:
        """Return (name, most prompts in a batch, prompts in all) of each part that has its own epochs."""
        names = [file.path for file in self.files] if self._weights else [self._key]
        most = [self._turns.most(part, self.config.draw_size) for part in range(len(names))]
        return list(zip(names, most, map(len, self._parts()), strict=True))

    def at(self, indices: Sequence[int]) -> list[Prompt]:
        """Return the prompts at these positions in the dataset, which must have no fault."""
        entries = [self._entry(index) for index in indices]
        tokens = tokens_of(entries, self._tokenizer)
        return list(map(self._prompt, indices, tokens, entries))

    @cached_property
    def all(self) -> list[Prompt]:
        """Every prompt that is kept, in the files' order."""
        return self.at(self.kept)

    def check(self, vocab_size: int, chosen: Callable[[int], Sequence[int]] = range) -> list[Check]:
        """Check the records of each file.

        Args:
            vocab_size: tokens below it are known to every model.
            chosen: returns the numbers, from 0, of the records to check for the number of records of a file.
        """
        checker = PromptChecker(self._fields, self._chat, self._tokenizer, self.config, vocab_size)
        return [checker.check(file.records, chosen(len(file.records))) for file in self.files]

    def errors(self, parts: Sequence[Sequence[Check]]) -> list[str]:
        """Return the errors that several ranks' `check` found and that keep a run from starting, one line each."""
        num_left_out, num_checked = _counts(parts)
        if num_left_out == num_checked:
            whole = f"{self._key}: no prompt remains: all {num_checked:,} records that were checked are left out"
            return [whole, *self._lines(parts, "skip")]
        return self._lines(parts, "error", "bad_row")

    def warnings(self, parts: Sequence[Sequence[Check]]) -> list[str]:
        """Return the warnings of several ranks' `check`, and of reward functions' source, one line per reason."""
        lines: list[str] = []
        for file, checks in self._checks_of_files(parts):
            lost = fault_lines(file, checks, self._fields.required, "lost")
            lines += itertools.islice(lost, 1)
        hidden = hidden_token_warnings(self._fields.reward, self._tokenizer)
        return [*lines, *self._lines(parts, "warn"), *(f"{self._key}: {line}" for line in hidden)]

    def leave_out(self, parts: Sequence[Sequence[Check]]) -> list[str]:
        """Drop the records to leave out; report these and the prompts to cut, one line per reason.

        Args:
            parts: several ranks' `check`, each of records after those of the rank before.
        """
        num_left_out, num_checked = _counts(parts)
        is_kept = bytearray(b"\1") * self._starts[-1]
        for part in parts:
            for start, check in zip(self._starts[:-1], part, strict=True):
                for number in check.left_out:
                    is_kept[start + number] = 0
        if num_left_out:
            self.kept = array("I", itertools.compress(range(self._starts[-1]), is_kept))
        if self._fields.order_by is None or num_checked == self._starts[-1]:
            ranks = array("d")
            for _, checks in self._checks_of_files(parts):
                for check in checks:
                    ranks.extend(check.ranks)
            self._orders = self._arranged(array("d", itertools.compress(ranks, is_kept)))
        lines = [f"{self._key}: {num_left_out:,} of {num_checked:,} records"] if num_left_out else []
        lines += self._lines(parts, "skip") if num_left_out else []
        cut = self._lines(parts, "truncate_left")
        return [PREFIXES["skip"] + line for line in lines] + [PREFIXES["truncate_left"] + line for line in cut]

    def _parts(self) -> list[range]:
        """Return the places in `kept` of each part that has its own epochs."""
        bounds = self._starts if self._weights else [0, self._starts[-1]]
        places = [bisect.bisect_left(self.kept, bound) for bound in bounds]
        return list(map(range, places, places[1:]))

    def _arranged(self, ranks: "array[float]") -> list[tuple[int, Order]]:
        """Return the first place in `kept` and the order of each of these parts; `ranks` are of all that are kept."""
        orders = []
        for number, part in enumerate(self._parts()):
            seed = f"{self.seed}/{number}" if self._weights else str(self.seed)
            values = ranks[part.start : part.stop]
            orders.append((part.start, Order(seed, len(part), shuffle=self.config.shuffle, values=values)))
        return orders

    def _checks_of_files(self, parts: Sequence[Sequence[Check]]) -> Iterator[tuple[DataFile, Sequence[Check]]]:
        return zip(self.files, zip(*parts, strict=True), strict=True)

    def _lines(self, parts: Sequence[Sequence[Check]], *actions: Action) -> list[str]:
        lines: list[str] = []
        for file, checks in self._checks_of_files(parts):
            lines += fault_lines(file, checks, self._fields.required, *actions)
        return lines

    def _prompt(self, index: int, tokens: list[int], entry: PromptEntry) -> Prompt:
        limit, text = self.config.max_prompt_length, entry.text
        if len(tokens) > limit and self.config.too_long == "truncate_left":
            tokens = tokens[-limit:]
            text = self._tokenizer.decode(tokens)
        return Prompt(index, tokens, text, entry.label, entry.columns)

    def _entry(self, index: int) -> PromptEntry:
        file = bisect.bisect_right(self._starts, index) - 1
        [record] = self.files[file].records.at([index - self._starts[file]])
        return entry_of(record, self._fields, self._chat)


def open_datasets(
    config: Config,
    tokenizer: "PreTrainedTokenizerBase",
    takes: Mapping[str, InputSpec] = MappingProxyType({}),
    unpack: Unpack = unpacked,
) -> tuple[PromptDataset | None, dict[str, PromptDataset]]:
    """Open the training prompts, None where there are only evaluations, and those of each of `eval_sets`, by name.

    Args:
        takes: fields for reward function and environment of each of `played_tasks`, besides prompt and label.
        unpack: see `open_records`.
    Raises:
        ConfigError: a file is missing, empty, or of another format.
    """
    data, seed = config.data, config.trainer.seed
    train = None
    if not config.trainer.eval_only:
        train = PromptDataset(
            data.files,
            tokenizer,
            data,
            seed,
            takes=takes.get(TRAINING, NO_INPUT),
            unpack=unpack,
            weights=tuple(data.shares.values()),
            order_by=data.order_by,
            reward=config.reward,
        )
    val = {}
    for name, one in eval_sets(config).items():
        taken = takes.get(name, NO_INPUT)
        val[name] = PromptDataset(one.files, tokenizer, one.data, seed, one.key, taken, unpack, reward=one.reward)
    return train, val


def batch_errors(train: PromptDataset | None) -> list[str]:
    """Return errors for a step that takes more prompts than there are."""
    if train is None or not len(train):  # which is an error of its own
        return []
    size = train.config.draw_size
    key = f"data.{'train' if train.config.gen_batch_size is None else 'gen'}_batch_size"
    errors = []
    for name, most, there in train.shares():
        if most > there and name == "data.train_files":
            errors.append(
                f"{key} {size} is more than the {there:,} prompts of data.train_files, so that a step would hold some "
                "twice: lower it, or name more files"
            )
        elif most > there:
            errors.append(
                f"data.train_files: {name} gives {most:,} of the {key} {size:,} prompts of a step and has {there:,}, "
                "so that a step would hold some twice: lower its weight, or that"
            )
    return errors


def share(items: Sequence[T], rank: int, world_size: int) -> Sequence[T]:
    """Return a rank's share of some items: consecutive ones, as many for all ranks as they divide."""
    return items[len(items) * rank // world_size : len(items) * (rank + 1) // world_size]


def _counts(parts: Sequence[Sequence[Check]]) -> tuple[int, int]:
    """Return the numbers of records that are left out and that were checked."""
    checks = [check for part in parts for check in part]
    return sum(len(check.left_out) for check in checks), sum(check.num_checked for check in checks)


def _open(key: str, file: str, names: Sequence[str] | None, unpack: Unpack) -> Records:
    try:
        return open_records(file, names, unpack)
    except RecordsError as error:
        raise ConfigError(f"{key}: {file} {error}") from error
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {file} ({error.strerror}): correct the path, or its rights") from error

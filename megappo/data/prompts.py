"""Prompts of jsonl or parquet files, in an order that needs no saved state to resume."""

import bisect
import itertools
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from megappo.config.config_error import ConfigError
from megappo.config.eval_sets import TRAINING, eval_sets, training_task
from megappo.config.schema import Config, Data, Reward
from megappo.data.chat import Chat, PromptContent
from megappo.data.entries import NO_REWARD, PromptEntry, RecordFields, entry_of, tokens_of
from megappo.data.order import Order, Turns
from megappo.data.prompt_checks import Action, Check, PromptChecker, hidden_token_warnings, merge_checks
from megappo.data.records import Records, RecordsError, Unpack, open_records
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
        place: file and line, for messages.
    """

    index: int
    tokens: list[int]
    text: str
    label: Any
    columns: dict[str, Any] = field(default_factory=dict)
    place: str = ""


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
        needs_label: see `RecordFields`.

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
        unpack: Unpack | None = None,
        weights: Sequence[float] = (),
        order_by: str | None = None,
        reward: Reward = NO_REWARD,
        needs_label: bool = True,
    ):
        self.config = config
        self.seed = seed
        self._key = key
        self._tokenizer = tokenizer
        self._chat = Chat(tokenizer, config, takes.tools)
        section = key.rpartition(".")[0]
        self._fields = RecordFields(config.prompt_key, config.label_key, takes, section, order_by, reward, needs_label)
        self.files = [_open(key, file, self._fields.names, unpack) for file in files]
        self._starts = list(itertools.accumulate(map(len, self.files), initial=0))
        self.kept: Sequence[int] = range(self._starts[-1])
        self._weights = weights
        self._turns = Turns(weights or [1])
        self._arrange(array("d"))

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
            indices.append(self.kept[self._parts[part][self._orders[part][place]]])
        return indices

    def drawn(self, positions: Sequence[int]) -> list[Prompt]:
        """Return the prompts at these positions in the order in which prompts are drawn."""
        return self.at([self.indices(position)[0] for position in positions])

    def batch_errors(self) -> list[str]:
        """Return errors for a step that takes more prompts than there are."""
        key = "data.train_batch_size" if self.config.gen_batch_size is None else "data.gen_batch_size"
        errors = []
        for number, part in enumerate(self._parts):
            name = self.files[number].path if self._weights else self._key
            most = self._turns.most(number, self.config.draw_size)
            if most > len(part):
                errors.append(
                    f"{key} {self.config.draw_size} takes {most:,} prompts of {name}, which has {len(part):,}, so that "
                    "a step would hold some twice: lower it, or name more files"
                )
        return errors

    def at(self, indices: Sequence[int]) -> list[Prompt]:
        """Return the prompts at these positions in the dataset, which must have no fault."""
        entries = [self._entry(index) for index in indices]
        tokens = tokens_of(entries, self._tokenizer)
        return list(map(self._prompt, indices, tokens, entries))

    def content_at(self, index: int) -> PromptContent:
        """Return the text or the messages, with the system prompt, of the prompt at a position in the dataset."""
        return self._entry(index).content

    def check(self, vocab_size: int, chosen: Callable[[int], Sequence[int]] = range) -> list[Check]:
        """Check the records of each file.

        Args:
            vocab_size: tokens below it are known to every model.
            chosen: returns the numbers, from 0, of the records to check for the number of records of a file.
        """
        checker = PromptChecker(self._fields, self._chat, self._tokenizer, self.config, vocab_size)
        return [checker.check(file, chosen(len(file))) for file in self.files]

    def errors(self, parts: Sequence[Sequence[Check]]) -> list[str]:
        """Return the errors that several ranks' `check` found and that keep a run from starting, one line each."""
        checks = _merged(parts)
        num_checked = sum(check.num_checked for check in checks)
        if sum(len(check.left_out) for check in checks) == num_checked:
            whole = f"{self._key}: no prompt remains: all {num_checked:,} records that were checked are left out"
            return [whole, *self._lines(checks, "skip")]
        return self._lines(checks, "error")

    def warnings(self, parts: Sequence[Sequence[Check]]) -> list[str]:
        """Return the warnings of several ranks' `check`, and of reward functions' source, one line per reason."""
        hidden = hidden_token_warnings(self._fields.reward, self._tokenizer)
        return self._lines(_merged(parts), "warn") + [f"{self._key}: {line}" for line in hidden]

    def leave_out(self, parts: Sequence[Sequence[Check]]) -> list[str]:
        """Drop the records to leave out; report these and the prompts to cut, one line per reason.

        Args:
            parts: several ranks' `check`, each of records after those of the rank before.
        """
        checks = _merged(parts)
        is_kept = bytearray(b"\1") * self._starts[-1]
        ranks = array("d")
        for start, check in zip(self._starts[:-1], checks, strict=True):
            ranks.extend(check.ranks)
            for number in check.left_out:
                is_kept[start + number] = 0
        lines = []
        if num_left_out := is_kept.count(0):
            self.kept = array("I", itertools.compress(range(self._starts[-1]), is_kept))
            num_checked = sum(check.num_checked for check in checks)
            lines = [f"{self._key}: {num_left_out:,} of {num_checked:,} records", *self._lines(checks, "skip")]
        self._arrange(array("d", itertools.compress(ranks, is_kept)))
        cut = self._lines(checks, "truncate_left")
        return [f"left out: {line}" for line in lines] + [f"cut to its last tokens: {line}" for line in cut]

    def _arrange(self, ranks: "array[float]") -> None:
        """Find the places in `kept` of each part that has its own epochs, and its order.

        Args:
            ranks: of all that are kept; if some are missing, there is no order by them.
        """
        bounds = self._starts if self._weights else [0, self._starts[-1]]
        places = [bisect.bisect_left(self.kept, bound) for bound in bounds]
        self._parts = list(map(range, places, places[1:]))
        self._orders: list[Order] = []
        if self._fields.order_by is None or len(ranks) == len(self.kept):
            for number, part in enumerate(self._parts):
                seed = f"{self.seed}/{number}" if self._weights else str(self.seed)
                values = ranks[part.start : part.stop]
                self._orders.append(Order(seed, len(part), shuffle=self.config.shuffle, values=values))

    def _lines(self, checks: Sequence[Check], action: Action) -> list[str]:
        lines: list[str] = []
        for file, check in zip(self.files, checks, strict=True):
            lines += check.lines(self._key, file, action)
        return lines

    def _prompt(self, index: int, tokens: list[int], entry: PromptEntry) -> Prompt:
        limit, text = self.config.max_prompt_length, entry.text
        if len(tokens) > limit and self.config.too_long == "truncate_left":
            tokens = tokens[-limit:]
            text = self._tokenizer.decode(tokens)
        file, number = self._located(index)
        return Prompt(index, tokens, text, entry.label, entry.columns, f"{file.path} {file.unit} {number + 1}")

    def _entry(self, index: int) -> PromptEntry:
        file, number = self._located(index)
        [record] = file.at([number])
        return entry_of(record, self._fields, self._chat)

    def _located(self, index: int) -> tuple[Records, int]:
        """Return the file of a prompt, and the number of its record there, from 0."""
        file = bisect.bisect_right(self._starts, index) - 1
        return self.files[file], index - self._starts[file]


def open_datasets(
    config: Config,
    tokenizer: "PreTrainedTokenizerBase",
    takes: Mapping[str, InputSpec] = MappingProxyType({}),
    unpack: Unpack | None = None,
) -> tuple[PromptDataset | None, dict[str, PromptDataset]]:
    """Open the training prompts, None where there are only evaluations, and those of each of `eval_sets`, by name.

    Args:
        takes: fields for reward function and environment of each of `played_tasks`, besides prompt and label.
        unpack: see `open_records`.
    Raises:
        ConfigError: a file is missing, empty, or of another format.
    """
    data, train, val = config.data, None, {}
    opened = partial(PromptDataset, tokenizer=tokenizer, seed=config.trainer.seed, unpack=unpack)
    if not config.trainer.eval_only:
        task = training_task(config)
        train = opened(
            data.files,
            config=data,
            takes=takes.get(TRAINING, NO_INPUT),
            weights=tuple(data.shares.values()),
            order_by=data.order_by,
            reward=config.reward,
            needs_label=task.has_labels,
        )
    for name, one in eval_sets(config).items():
        taken = takes.get(name, NO_INPUT)
        val[name] = opened(
            one.files, config=one.data, key=one.key, takes=taken, reward=one.reward, needs_label=one.has_labels
        )
    return train, val


def share(items: Sequence[T], rank: int, world_size: int) -> Sequence[T]:
    """Return a rank's share of some items: consecutive ones, as many for all ranks as they divide."""
    return items[len(items) * rank // world_size : len(items) * (rank + 1) // world_size]


def _merged(parts: Sequence[Sequence[Check]]) -> list[Check]:
    """Return the check of each file, from several ranks' parts of it."""
    return [merge_checks(checks) for checks in zip(*parts, strict=True)]


def _open(key: str, file: str, names: Sequence[str] | None, unpack: Unpack | None) -> Records:
    try:
        return open_records(file, names, unpack)
    except RecordsError as error:
        raise ConfigError(f"{key}: {file} {error}") from error
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {file} ({error.strerror}): correct the path, or its rights") from error

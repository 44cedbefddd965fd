"""Records of data files, in an order that needs no saved state to resume."""

import bisect
import itertools
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from megappo.config.config_error import ConfigError
from megappo.config.schema import Data
from megappo.data.chat import PromptContent
from megappo.data.order import Order, Turns
from megappo.data.prompt_checks import (
    COMPARED,
    LOST_TEXT,
    OTHER_TOKENS,
    READ_AT_ONCE,
    RECORDS_AT_ONCE,
    Action,
    Check,
    loses_text,
    merge_checks,
    message_warnings,
)
from megappo.data.records import Records, RecordsError, Unpack, open_records
from megappo.data.tokenizer import RenderedText, ids_by_file, keeps_bytes, one_bos, special_tokens
from megappo.runtime.heartbeat import heartbeat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
E = TypeVar("E")


class RecordDataset(ABC, Generic[E]):
    """Records of some files, drawn in an order.

    Args:
        files: jsonl or parquet files.
        config: the data section, apart from its files.
        seed: seed of the order (trainer.seed).
        key: key that names the files, for messages.
        names: fields that are read; None: any.
        unpack: see `open_records`.
        weights: weights of the files, each of which then has its own epochs; none: they are one.
        is_ordered: records are ordered by numbers that `leave_out` gets, once all have been checked.

    Attributes:
        noun: what the records are.
        kept: positions in the dataset of the records that a run uses: all, until some are left out.

    Raises:
        ConfigError: a file is missing, empty, or of another format.
    """

    noun: ClassVar[str] = "prompts"

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: "PreTrainedTokenizerBase",
        config: Data,
        seed: int,
        key: str,
        names: Sequence[str] | None,
        unpack: Unpack | None = None,
        weights: Sequence[float] = (),
        is_ordered: bool = False,
    ):
        self._tokenizer = tokenizer
        self._keeps_bytes = keeps_bytes(tokenizer)
        self._specials = special_tokens(tokenizer)
        self.config = config
        self.seed = seed
        self._key = key
        self.files = [_open(key, file, names, unpack) for file in files]
        self._starts = list(itertools.accumulate(map(len, self.files), initial=0))
        self.kept: Sequence[int] = range(self._starts[-1])
        self._weights = weights
        self._turns = Turns(weights or [1])
        self._is_ordered = is_ordered
        self._arrange(array("d"))

    def __len__(self) -> int:
        return len(self.kept)

    @property
    def singular(self) -> str:
        """One of `noun`."""
        return self.noun.replace("ies", "ys")[:-1]

    def batch(self, num_drawn: int, rank: int = 0, world_size: int = 1) -> list[E]:
        """Return this rank's share of the entries drawn next after `num_drawn`: a pure function of seed and num_drawn.

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

    @abstractmethod
    def at(self, indices: Sequence[int]) -> list[E]:
        """Return the entries at these positions in the dataset, which must have no fault."""

    @abstractmethod
    def _read(self, record: Any, file: Records) -> tuple[Any, Iterable[str]]:
        """Return the text and the other values of a record, and warnings.

        Raises:
            ValueError: it has none; each argument is a fault.
        """

    @abstractmethod
    def _check_entries(
        self,
        check: Check,
        entries: Mapping[int, Any],
        numbers: Sequence[int],
        vocab_size: int,
    ) -> None:
        """Check what `_read` returned, by the numbers of the records; faulty ones of the numbers have none."""

    def check(self, vocab_size: int, chosen: Callable[[int], Sequence[int]] = range) -> list[Check]:
        """Check the records of each file.

        Args:
            vocab_size: tokens below it are known to every model.
            chosen: returns the numbers, from 0, of the records to check for the number of records of a file.
        """
        return [self._check_file(file, chosen(len(file)), vocab_size) for file in self.files]

    def _check_file(self, file: Records, numbers: Sequence[int], vocab_size: int) -> Check:
        check = Check(len(numbers))
        for start in range(0, len(numbers), RECORDS_AT_ONCE):
            part = numbers[start : start + RECORDS_AT_ONCE]
            entries = {}
            some = [part[first : first + READ_AT_ONCE] for first in range(0, len(part), READ_AT_ONCE)]
            for number, record in zip(part, itertools.chain.from_iterable(map(file.at, some)), strict=True):
                heartbeat.beat()
                try:
                    entries[number], warnings = self._read(record, file)
                    check.note(number, "warn", warnings)
                except ValueError as error:
                    self._note_bad_row(check, number, error.args)
            self._check_entries(check, entries, part, vocab_size)
        return check

    def _note_bad_row(self, check: Check, number: int, faults: Sequence[str]) -> None:
        if self.config.on_bad_row == "skip":
            check.note(number, "skip", faults)
        else:
            check.note(number, "error", [f"{fault} (data.on_bad_row=skip leaves such out)" for fault in faults])

    def _check_text(
        self,
        check: Check,
        number: int,
        rendered: RenderedText,
        content: PromptContent,
        tokens: list[int],
        *,
        is_cut: bool = False,
    ) -> None:
        """Note a text with other tokens than tokenizer.json gives it, special tokens in messages, and lost text.

        Args:
            is_cut: tokens may follow, which are not read.
        """
        if number >= COMPARED or not (tokens and rendered.text):  # else its tokens are given
            return
        by_file = ids_by_file(rendered.text, self._tokenizer, special=not rendered.is_chat) or tokens
        expected = one_bos(by_file, self._tokenizer)
        if tokens != (expected[: len(tokens)] if is_cut else expected):
            check.note(number, "error", [OTHER_TOKENS.format(self.singular)])
        check.note(number, "warn", message_warnings(content, self._specials))
        if not self._keeps_bytes and loses_text(rendered.text, tokens, self._tokenizer):
            check.note(number, "warn", [LOST_TEXT.format(self.singular)])

    def _unknown_tokens(self, tokens: Sequence[int], vocab_size: int) -> Iterator[str]:
        """Yield the fault of tokens that a model does not know: the tokenizer is another model's."""
        if max(tokens) >= vocab_size:
            yield (
                f"the {self.singular} has token {max(tokens)}, for which a model has no embedding (the smallest "
                f"vocab_size in config.json is {vocab_size}): drop it, or use the tokenizer that belongs to the model"
            )

    def drawn(self, positions: Sequence[int]) -> list[E]:
        """Return the entries at these positions in the order in which they are drawn."""
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
                    f"{key} {self.config.draw_size} takes {most:,} {self.noun} of {name}, which has {len(part):,}, so "
                    "that a step would hold some twice: lower it, or name more files"
                )
        return errors

    def errors(self, parts: Sequence[Sequence[Check]]) -> list[str]:
        """Return the errors that several ranks' `check` found and that keep a run from starting, one line each."""
        checks = merged(parts)
        num_checked = sum(check.num_checked for check in checks)
        if sum(len(check.left_out) for check in checks) == num_checked:
            whole = (
                f"{self._key}: no {self.singular} remains: all {num_checked:,} records that were checked are left out"
            )
            return [whole, *self._lines(checks, "skip")]
        return self._lines(checks, "error")

    def warnings(self, parts: Sequence[Sequence[Check]]) -> list[str]:
        """Return the warnings of several ranks' `check`, one line per reason."""
        return self._lines(merged(parts), "warn")

    def leave_out(self, parts: Sequence[Sequence[Check]]) -> list[str]:
        """Drop the records to leave out; report these and the prompts to cut, one line per reason.

        Args:
            parts: several ranks' `check`, each of the records after the previous rank's.
        """
        checks = merged(parts)
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
            ranks: ranks of all kept records; if some are missing, there is no order by them.
        """
        bounds = self._starts if self._weights else [0, self._starts[-1]]
        places = [bisect.bisect_left(self.kept, bound) for bound in bounds]
        self._parts = list(map(range, places, places[1:]))
        self._orders: list[Order] = []
        if not self._is_ordered or len(ranks) == len(self.kept):
            for number, part in enumerate(self._parts):
                seed = f"{self.seed}/{number}" if self._weights else str(self.seed)
                values = ranks[part.start : part.stop]
                order = Order(seed, len(part), shuffle=self.config.shuffle, values=values)
                self._orders.append(order)

    def _lines(self, checks: Sequence[Check], action: Action) -> list[str]:
        lines: list[str] = []
        for file, check in zip(self.files, checks, strict=True):
            lines += check.lines(self._key, file, action)
        return lines

    def _record(self, index: int) -> Any:
        """Return the record at a position in the dataset."""
        file, number = self._located(index)
        [record] = file.at([number])
        return record

    def _place(self, index: int) -> str:
        """Return the file and line of a record, for messages."""
        file, number = self._located(index)
        return f"{file.path} {file.unit} {number + 1}"

    def _located(self, index: int) -> tuple[Records, int]:
        """Return the file of a prompt, and the number of its record there, from 0."""
        file = bisect.bisect_right(self._starts, index) - 1
        return self.files[file], index - self._starts[file]


def share(items: Sequence[T], rank: int, world_size: int) -> Sequence[T]:
    """Return a rank's share of some items: consecutive ones, as many for all ranks as they divide."""
    return items[len(items) * rank // world_size : len(items) * (rank + 1) // world_size]


def merged(parts: Sequence[Sequence[Check]]) -> list[Check]:
    """Return the check of each file, from several ranks' parts of it."""
    return [merge_checks(checks) for checks in zip(*parts, strict=True)]


def _open(key: str, file: str, names: Sequence[str] | None, unpack: Unpack | None) -> Records:
    try:
        return open_records(file, names, unpack)
    except RecordsError as error:
        raise ConfigError(f"{key}: {file} {error}") from error
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {file} ({error.strerror}): correct the path, or its rights") from error

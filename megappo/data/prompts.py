"""Prompts of jsonl or parquet files, in an order that needs no saved state to resume."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megappo.config.eval_sets import TRAINING, eval_sets, training_task
from megappo.config.schema import Config, Data, Reward
from megappo.data.chat import Chat, PromptContent
from megappo.data.entries import NO_REWARD, PromptEntry, RecordFields, entry_of, tokens_of
from megappo.data.prompt_checks import Check, PromptChecker, hidden_token_warnings
from megappo.data.record_dataset import RecordDataset
from megappo.data.records import Unpack
from megappo.userland.signatures import NO_INPUT, InputSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


class PromptDataset(RecordDataset[Prompt]):
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
        self._tokenizer = tokenizer
        self._chat = Chat(tokenizer, config, takes.tools)
        section = key.rpartition(".")[0]
        self._fields = RecordFields(config.prompt_key, config.label_key, takes, section, order_by, reward, needs_label)
        names, is_ordered = self._fields.names, order_by is not None
        super().__init__(files, config, seed, key, names, unpack, weights, is_ordered)

    def at(self, indices: Sequence[int]) -> list[Prompt]:
        """Return the prompts at these positions in the dataset, which must have no fault."""
        entries = [self._entry(index) for index in indices]
        tokens = tokens_of(entries, self._tokenizer)
        return list(map(self._prompt, indices, tokens, entries))

    def content_at(self, index: int) -> PromptContent:
        """Return the text or the messages, with the system prompt, of the prompt at a position in the dataset."""
        return self._entry(index).content

    def check(self, vocab_size: int, chosen: Callable[[int], Sequence[int]] = range) -> list[Check]:
        """Check the records of each file."""
        checker = PromptChecker(self._fields, self._chat, self._tokenizer, self.config, vocab_size)
        return [checker.check(file, chosen(len(file))) for file in self.files]

    def warnings(self, parts: Sequence[Sequence[Check]]) -> list[str]:
        """Return the warnings of several ranks' `check`, and of reward functions' source, one line per reason."""
        hidden = hidden_token_warnings(self._fields.reward, self._tokenizer)
        return super().warnings(parts) + [f"{self._key}: {line}" for line in hidden]

    def _prompt(self, index: int, tokens: list[int], entry: PromptEntry) -> Prompt:
        limit, text = self.config.max_prompt_length, entry.text
        if len(tokens) > limit and self.config.too_long == "truncate_left":
            tokens = tokens[-limit:]
            text = self._tokenizer.decode(tokens)
        return Prompt(index, tokens, text, entry.label, entry.columns, self._place(index))

    def _entry(self, index: int) -> PromptEntry:
        return entry_of(self._record(index), self._fields, self._chat)


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

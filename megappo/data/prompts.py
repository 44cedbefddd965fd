"""Prompts from jsonl or parquet files, tokenised, in an order that needs no saved state to resume."""

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow.parquet
from pyarrow import ArrowException
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megappo.config.schema import Data
from megappo.torchvision_on_cpu import define_torchvision_operators

MAX_ERRORS_SHOWN = 10
"""Bad lines listed in one message; the rest are counted."""


class DataError(ValueError):
    """What is wrong with a data file or a tokenizer, where, and what to do about it."""


@dataclass(frozen=True)
class Prompt:
    """One line of a data file.

    Attributes:
        index: position in the dataset (files in order, lines in order), from 0.
        tokens: token ids, at least one.
        text: the prompt as the model sees it; chat messages are rendered by the chat template.
        label: what the reward function gets, as the file has it.
        source: the file, as the config spells it.
    """

    index: int
    tokens: list[int]
    text: str
    label: Any
    source: str


class PromptDataset:
    """All prompts of some files, checked and tokenised when built.

    Args:
        files: jsonl or parquet files (data.train_files or data.val_files).
        tokenizer: see `load_tokenizer`.
        config: the data section: prompt_key, label_key, max_prompt_length, train_batch_size, shuffle.
        seed: of the order (trainer.seed).

    Raises:
        DataError, OSError: a missing, empty, unreadable or malformed file; the message lists bad lines by file and
            line (parquet: row), both from 1.
    """

    def __init__(self, files: Sequence[str], tokenizer: PreTrainedTokenizerBase, config: Data, seed: int):
        self.config = config
        self.seed = seed
        self.prompts: list[Prompt] = []
        errors: list[str] = []
        for file in files:
            self._add_file(file, tokenizer, errors)
        if errors:
            shown = errors[:MAX_ERRORS_SHOWN]
            if len(errors) > len(shown):
                shown.append(f"and {len(errors) - len(shown)} more")
            raise DataError("\n  ".join(["correct or remove these prompts:", *shown]))

    def __len__(self) -> int:
        return len(self.prompts)

    def batch(self, step: int) -> list[Prompt]:
        """The train_batch_size prompts of a step, counted from 0: a pure function of (seed, step).

        Each epoch is a permutation of all prompts (their own order without shuffle); a batch at its end runs on into
        the next epoch, so nothing is dropped.
        """
        size = self.config.train_batch_size
        return [self._at(position) for position in range(step * size, (step + 1) * size)]

    def _at(self, position: int) -> Prompt:
        epoch, offset = divmod(position, len(self.prompts))
        if self.config.shuffle:
            offset = _epoch_order(self.seed, epoch, len(self.prompts))[offset]
        return self.prompts[offset]

    def _add_file(self, file: str, tokenizer: PreTrainedTokenizerBase, errors: list[str]) -> None:
        empty = True
        for where, record in _read(file):
            empty = False
            try:
                prompt, label = _prompt_and_label(record, self.config)
                text, tokens = _tokenise(prompt, tokenizer)
                self._check_length(tokens)
            except ValueError as error:
                errors.append(f"{where}: {error}")
                continue
            self.prompts.append(Prompt(len(self.prompts), tokens, text, label, file))
        if empty:
            raise DataError(f"{file} is empty: expected at least one prompt")

    def _check_length(self, tokens: list[int]) -> None:
        limit = self.config.max_prompt_length
        if len(tokens) > limit:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens, more than data.max_prompt_length {limit}: raise it or drop this"
            )


def check_vocabulary(prompts: Sequence[Prompt], vocab_size: int) -> None:
    """Refuse tokens for which a model has no embedding: some tokenizers know more than the model beside them.

    Raises:
        DataError: naming the first such prompt, and how many there are.
    """
    beyond = [prompt for prompt in prompts if max(prompt.tokens) >= vocab_size]
    if beyond:
        raise DataError(
            f"{beyond[0].source}: the prompt {beyond[0].text[:80]!r} holds token {max(beyond[0].tokens)}, for which a "
            f"model has no embedding (vocab_size in its config.json is {vocab_size}); prompts like this: {len(beyond)}."
            " Drop them, or use the tokenizer and the critic.model_path that belong to the model"
        )


def load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """Tokenizer of a local Hugging Face folder; code in the folder is not run.

    Raises:
        DataError: the folder has no usable tokenizer.
    """
    if not (Path(folder) / "tokenizer_config.json").is_file():
        raise DataError(f"no tokenizer in {folder}: expected tokenizer_config.json and tokenizer.json in it")
    define_torchvision_operators()  # which some tokenizers need, Llama's among them
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises whatever its parsers do
        raise DataError(f"cannot load the tokenizer in {folder}: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, size: int) -> list[int]:
    order = list(range(size))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def _read(file: str) -> Iterator[tuple[str, Any]]:
    """(where, record) of each line; `where` names file and line. The record of an unreadable line is a ValueError."""
    if not Path(file).is_file():
        raise FileNotFoundError(f"data file {file} does not exist (looked in {Path.cwd()})")
    if file.endswith(".jsonl"):
        return _read_jsonl(file)
    if file.endswith(".parquet"):
        return _read_parquet(file)
    raise DataError(f"data file {file}: expected a name ending in .jsonl or .parquet")


def _read_jsonl(file: str) -> Iterator[tuple[str, Any]]:
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line) if line.strip() else ValueError("the line is empty: remove it")
            except json.JSONDecodeError as error:
                record = ValueError(f"not valid JSON: {error.msg} (column {error.pos + 1})")
            except ValueError as error:  # not UTF-8
                record = ValueError(f"not valid JSON: {error}")
            yield f"{file} line {number}", record


def _read_parquet(file: str) -> Iterator[tuple[str, Any]]:
    numbers = itertools.count(1)
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches():
                for record in batch.to_pylist():
                    yield f"{file} row {next(numbers)}", record
    except ArrowException as error:
        raise DataError(f"{file} is not a readable parquet file: {error}") from error


def _prompt_and_label(record: Any, config: Data) -> tuple[Any, Any]:
    if isinstance(record, ValueError):
        raise record
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, found {type(record).__name__}")
    for option, key in (("prompt_key", config.prompt_key), ("label_key", config.label_key)):
        if key not in record:
            raise ValueError(f"no field {key!r} (data.{option}); found {', '.join(map(repr, record)) or 'no fields'}")
    return record[config.prompt_key], record[config.label_key]


def _tokenise(prompt: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[int]]:
    """Text and token ids of a string or of chat messages, whose template brings its special tokens itself."""
    if isinstance(prompt, str):
        text, tokens = prompt, tokenizer(prompt)["input_ids"]
    else:
        text = _render(prompt, tokenizer)
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not text or not tokens:
        raise ValueError("the prompt is empty")
    return text, tokens


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _render(messages: Any, tokenizer: PreTrainedTokenizerBase) -> str:
    if not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
        raise ValueError(f"expected a string or a list of {{'role': str, 'content': str}}, found {repr(messages)[:80]}")
    if not tokenizer.chat_template:
        raise ValueError("the prompt is chat messages but the tokenizer has no chat template: use strings, or add one")
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates refuse messages with jinja2's own exceptions
        raise ValueError(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error

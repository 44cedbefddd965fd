"""Prompts of jsonl or parquet files, in an order that needs no saved state to resume."""

import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megappo.batch.images import Image
from megappo.config.eval_sets import TRAINING, eval_sets, training_task
from megappo.config.model_sections import Teacher
from megappo.config.schema import Config, Data, Reward
from megappo.data.chat import Chat, PromptContent
from megappo.data.entries import NO_REWARD, PromptEntry, RecordFields, entry_of
from megappo.data.image_files import ImageFile, ImageReader
from megappo.data.prompt_checks import COMPARED, MOST_LENGTHS, Check, end_warnings, hidden_token_warnings
from megappo.data.record_dataset import RecordDataset
from megappo.data.records import Records, Unpack
from megappo.data.tokenizer import encode
from megappo.userland.signatures import NO_INPUT, InputSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_CUT = "set data.too_long=skip, or lower data.max_image_pixels"


@dataclass(frozen=True)
class Prompt:
    """One line of a data file.

    Attributes:
        index: position in the dataset (files in order, lines in order), from 0.
        tokens: token ids, at least one.
        text: the prompt as the model sees it; chat messages are rendered by the chat template.
        label: label for the reward function, as the file has it.
        columns: further fields for it, by name.
        place: file and line, for messages.
        teacher: number of its teacher, from 1; 0 = none.
        record: number of the dataset in `open_datasets`, and `index`.
        images: its images, by their places in `tokens`.
    """

    index: int
    tokens: list[int]
    text: str
    label: Any
    columns: dict[str, Any] = field(default_factory=dict)
    place: str = ""
    teacher: int = 0
    record: tuple[int, int] = (0, 0)
    images: Sequence[Image] = ()


class PromptDataset(RecordDataset[Prompt]):
    """Prompts of some files, parsed and tokenised on request; `check` finds their faults.

    Args:
        files: jsonl or parquet files.
        config: the data section, apart from its files.
        seed: seed of the order (trainer.seed).
        key: key that names the files, for messages.
        takes: fields for reward function and environment besides prompt and label.
        unpack: see `open_records`.
        weights: weights of the files, each of which then has its own epochs; none: they are one.
        order_by: see data.order_by; prompts are ordered once all have been checked.
        reward: the section with the functions that score responses.
        needs_label, teachers, without_teacher: see `RecordFields`.
        images: reads the images of prompts; None: they may have none.
        number: number of the dataset in `open_datasets`.

    Attributes:
        kept: positions in the dataset of the prompts that a run uses: all, until some are left out.
        image_reader: see `images`.

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
        teachers: Mapping[str, Teacher] = MappingProxyType({}),
        without_teacher: str = "reward",
        images: ImageReader | None = None,
        number: int = 0,
    ):
        self._chat = Chat(tokenizer, config, takes.tools, reads_images=images is not None)
        section = key.rpartition(".")[0]
        self._fields = RecordFields(
            *(config.prompt_key, config.label_key, takes, section, order_by, reward, needs_label),
            teachers=teachers,
            without_teacher=without_teacher,
            image_key=config.image_key,
            images=images,
        )
        self.image_reader = images
        self._number = number
        names = self._fields.names
        is_ordered = order_by is not None
        self._max_token = max(tokenizer.get_vocab().values())
        self._num_special = tokenizer.num_special_tokens_to_add(pair=False)
        super().__init__(files, tokenizer, config, seed, key, names, unpack, weights, is_ordered)

    def at(self, indices: Sequence[int]) -> list[Prompt]:
        """Return the prompts at these positions in the dataset, which must have no fault."""
        entries = [self._entry(index) for index in indices]
        tokens = encode([entry.rendered for entry in entries], self._tokenizer)
        return list(map(self._prompt, indices, tokens, entries))

    def content_at(self, index: int) -> PromptContent:
        """Return the text or the messages, with the system prompt, of the prompt at a position in the dataset."""
        return self._entry(index).content

    def image_files(self, index: int) -> Sequence[ImageFile]:
        """Return the files of the images of the prompt at a position in the dataset."""
        return self._entry(index).images

    def images_at(self, index: int) -> Sequence[Image]:
        """Return the images of the prompt at a position in the dataset."""
        return self.at([index])[0].images

    @property
    def image_column(self) -> str | None:
        """Name under which reward functions get the paths of a prompt's images; None if no function takes them."""
        taken = (*self._fields.takes.needed, *(self._fields.takes.optional or ()))
        return self._fields.image_key if self._fields.image_key in taken else None

    def _read(self, record: Any, file: Records) -> tuple[PromptEntry, Sequence[str]]:
        entry = entry_of(record, self._fields, self._chat, file.path)
        if self.image_reader is not None:
            grids = [self.image_reader.measure(image, whole=True)[0] for image in entry.images]
            entry = replace(entry, images=(), image_tokens=list(map(self.image_reader.num_tokens, grids)))
        return entry, entry.warnings

    def _check_entries(
        self,
        check: Check,
        entries: Mapping[int, PromptEntry],
        numbers: Sequence[int],
        vocab_size: int,
    ) -> None:
        """Note prompts with no, too many or unknown tokens. Prompts that are certain to fit are not tokenised."""
        if self._fields.order_by is not None:
            check.ranks.extend(entries[number].rank if number in entries else math.nan for number in numbers)
        limit = self.config.max_prompt_length
        too_long = self.config.too_long
        unsure = {}
        for number, entry in entries.items():
            if number < COMPARED or entry.image_tokens or not self._is_short(entry.rendered.text, vocab_size):
                unsure[number] = entry
        tokenised = encode([entry.rendered for entry in unsure.values()], self._tokenizer)
        lengths = []
        for entry, tokens in zip(unsure.values(), tokenised, strict=True):
            lengths.append(len(tokens) - len(entry.image_tokens) + sum(entry.image_tokens))
        excessive = {length for length in lengths if length > limit}
        longest = f" (the longest has {max(excessive)})" if len(excessive) > MOST_LENGTHS else ""
        for (number, entry), tokens, length in zip(unsure.items(), tokenised, lengths, strict=True):
            if not tokens:
                self._note_bad_row(check, number, ["the prompt is empty: it has no token"])
                continue
            if length > limit and entry.image_tokens and too_long == "truncate_left":
                check.note(number, "error", [f"{self._too_long(length, longest)}, and images cannot be cut: {NO_CUT}"])
            elif length > limit:
                check.note(number, too_long, [self._too_long(length, longest)])
            if length <= limit or too_long == "truncate_left":
                check.note(number, "error", self._unknown_tokens(tokens[-limit:], vocab_size))
            self._check_text(check, number, entry.rendered, entry.content, tokens)
            if number < COMPARED:
                check.note(number, "warn", end_warnings(tokens, self._tokenizer))

    def _is_short(self, text: str, vocab_size: int) -> bool:
        """True if a prompt fits by its bytes, of which each token has one or more, and every model knows its tokens."""
        if not (self._keeps_bytes and self._max_token < vocab_size and unicodedata.is_normalized("NFC", text)):
            return False
        return len(text.encode()) + self._num_special <= self.config.max_prompt_length

    def _too_long(self, num_tokens: int, longest: str) -> str:
        """Return the fault of a prompt; many prompts have the same, with the length of the longest."""
        limit = f"{self._fields.section}.max_prompt_length {self.config.max_prompt_length}"
        if self.config.too_long != "error":
            return f"the prompt has more tokens than {limit}"  # the same for all, which are counted together
        count = "more tokens" if longest else f"{num_tokens} tokens, more"
        return f"the prompt has {count} than {limit}{longest}: raise it, drop this, or set data.too_long"

    def warnings(self, parts: Sequence[Sequence[Check]]) -> list[str]:
        """Return the warnings of several ranks' `check`, and of reward functions' source, one line per reason."""
        hidden = hidden_token_warnings(self._fields.reward, self._tokenizer)
        return super().warnings(parts) + [f"{self._key}: {line}" for line in hidden]

    def _prompt(self, index: int, tokens: list[int], entry: PromptEntry) -> Prompt:
        limit = self.config.max_prompt_length
        text = entry.rendered.text
        record = self._number, index
        tokens, images = self._expanded(tokens, entry.images, record)
        if len(tokens) > limit and self.config.too_long == "truncate_left":
            tokens = tokens[-limit:]
            text = self._tokenizer.decode(tokens)
        facts = entry.label, entry.columns, self._place(index), entry.teacher, record
        return Prompt(index, tokens, text, *facts, images)

    def _expanded(
        self, tokens: list[int], files: Sequence[ImageFile], record: tuple[int, int]
    ) -> tuple[list[int], list[Image]]:
        """Return tokens with one image token for each merged patch, and the images."""
        images: list[Image] = []
        reader = self.image_reader
        if reader is None or not files:
            return tokens, images
        whole: list[int] = []
        for token in tokens:
            count = 1
            if token == reader.vision.image_token:
                grid, digest = reader.measure(files[len(images)])
                count = reader.num_tokens(grid)
                images.append(Image(len(whole), grid, (*record, len(images)), digest))
            whole += [token] * count
        return whole, images

    def _entry(self, index: int) -> PromptEntry:
        file, number = self._located(index)
        [record] = file.at([number])
        return entry_of(record, self._fields, self._chat, file.path)


def open_datasets(
    config: Config,
    tokenizer: "PreTrainedTokenizerBase",
    takes: Mapping[str, InputSpec] = MappingProxyType({}),
    unpack: Unpack | None = None,
    images: ImageReader | None = None,
) -> tuple[PromptDataset | None, dict[str, PromptDataset]]:
    """Open the training prompts (None where there are only evaluations), and the prompts of each of `eval_sets`, by
    name.

    Args:
        takes: fields for reward function and environment of each of `played_tasks`, besides prompt and label.
        unpack: see `open_records`.
        images: reads the images of prompts that get single responses.
    Raises:
        ConfigError: a file is missing, empty, or of another format.
    """
    data = config.data
    train = None
    val = {}
    opened = partial(
        PromptDataset,
        tokenizer=tokenizer,
        seed=config.trainer.seed,
        unpack=unpack,
        teachers=config.teachers,
    )
    if config.recipe.has_steps:
        task = training_task(config)
        train = opened(
            data.files,
            config=data,
            takes=takes.get(TRAINING, NO_INPUT),
            weights=tuple(data.shares.values()),
            order_by=data.order_by,
            reward=config.reward,
            needs_label=task.has_labels,
            without_teacher=config.distillation.without_teacher,
            images=None if task.rollout.has_episodes else images,
        )
    for number, (name, one) in enumerate(eval_sets(config).items(), start=1):
        val[name] = opened(
            one.files,
            config=one.data,
            key=one.key,
            takes=takes.get(name, NO_INPUT),
            reward=one.reward,
            needs_label=one.has_labels,
            images=None if one.rollout.has_episodes else images,
            number=number,
        )
    return train, val

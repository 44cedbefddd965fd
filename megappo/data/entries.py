"""Records of data files as prompts: the fields a run reads, checked, chat messages rendered, texts as tokens."""

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

from megappo.config.config_error import shorten
from megappo.config.model_sections import Teacher
from megappo.config.schema import Reward
from megappo.data.chat import Chat, PromptContent
from megappo.data.image_files import ImageFile, ImageReader, image_file, images_in, place_images
from megappo.data.tokenizer import RenderedText
from megappo.userland.grades import fits_float32
from megappo.userland.signatures import PROMPTS, InputSpec
from megappo.userland.spec import check_label

NO_REWARD = Reward(function=None)
ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
MEDIA = {
    **dict.fromkeys(
        ("images", "image"),
        "only prompts of a model with vision may have images, where it writes single responses (no environment, tools "
        "or agent), in the field that data.image_key names; choose other data, or drop it",
    ),
    **dict.fromkeys(("videos", "audios"), "models read texts and images only; choose other data, or drop it"),
}
"""Fields with what is no text -> what to do about them."""
HISTORY = {"history": "put the earlier turns into messages, or drop it"}
UNREAD = {"system": "write it as the first message", "tools": "name the functions in rollout.tools"}
"""Fields that examples have beside their messages -> what to do about them in a record of a prompt."""
CODE_KEYS = {"reward": "reward.function", "environment": "rollout.environment"}
"""Keys that name user code for training; a data set has keys of its own."""


@dataclass(frozen=True)
class RecordFields:
    """Fields that a run reads of each record.

    Attributes:
        takes: fields of the reward function and the environment.
        section: section of the config with the keys of these files.
        order_by: see data.order_by.
        reward: the section with the functions that get the label.
        needs_label: records must have one; else it is None.
        teachers: teachers by name, of which a record has one at most.
        without_teacher: see distillation.without_teacher.
        image_key: field with the images of a prompt.
        images: reads these; None: prompts may have none.
    """

    prompt_key: str
    label_key: str
    takes: InputSpec
    section: str = "data"
    order_by: str | None = None
    reward: Reward = NO_REWARD
    needs_label: bool = True
    teachers: Mapping[str, Teacher] = field(default_factory=dict)
    without_teacher: str = "reward"
    image_key: str = "images"
    images: ImageReader | None = None

    @cached_property
    def required(self) -> dict[str, str]:
        """Name of each field that a record must have -> the config key that needs it. Names may be dotted."""
        keys = {self.prompt_key: f"{self.section}.prompt_key"}
        if self.needs_label:
            keys[self.label_key] = f"{self.section}.label_key"
        if self.order_by is not None:
            keys.setdefault(self.order_by.removeprefix("-"), "data.order_by")
        for name in self.takes.needed:
            kind = "environment" if name in self.takes.by_environment else "reward"
            keys.setdefault(name, CODE_KEYS[kind] if self.section == "data" else f"{self.section}.{kind}")
        return keys

    @property
    def names(self) -> Sequence[str] | None:
        """All fields that may be read; None: any."""
        if self.takes.optional is None:
            return None
        routing = chain.from_iterable(one.when for one in self.teachers.values())
        return [*self.required, *self.takes.optional, *routing, *MEDIA, self.image_key, *UNREAD]

    @cached_property
    def taken(self) -> Collection[str]:
        """Fields that are read by name."""
        images = [self.image_key, self.image_key.partition(".")[0]] if self.images else []
        return {*self.required, *(self.takes.optional or ()), *images}

    def rank_of(self, values: Mapping[str, Any]) -> float:
        """Return the number by which a record with these values is ordered, ascending.

        Raises:
            ValueError: the value of order_by is no number.
        """
        if self.order_by is None:
            return 0.0
        value = values[self.order_by.removeprefix("-")]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and abs(value) <= sys.float_info.max):
            raise ValueError(f"expected a number for data.order_by, found {repr(value)[:80]}")
        return -float(value) if self.order_by.startswith("-") else float(value)

    def teacher_of(self, record: Mapping[str, Any]) -> int:
        """Return the number of a record's teacher, from 1; 0 if it has none.

        Raises:
            ValueError: it has none, and needs one.
        """
        values: dict[str, Any] = {}
        for number, one in enumerate(self.teachers.values(), 1):
            values |= {name: _value_of(record, name) for name in one.when}
            if all(values[name] in wanted for name, wanted in one.when.items()):
                return number
        if self.teachers and self.without_teacher == "error":
            found = ", ".join(f"{name} {shorten(repr(value))}" for name, value in values.items())
            raise ValueError(
                f"no teacher has this row ({found}): correct the `when` of teachers, add a teacher, or set "
                "distillation.without_teacher to reward"
            )
        return 0


@dataclass(frozen=True)
class PromptEntry:
    """Text and label of a record.

    Attributes:
        content: the text or messages that the text was made from.
        columns: further fields for the reward function.
        rank: number by which it is ordered.
        teacher: see `RecordFields.teacher_of`.
        warnings: fields that are not read, and why.
        images: its images, in their order.
        image_tokens: tokens of each, in place of `images` once they have been measured.
    """

    rendered: RenderedText
    content: PromptContent
    label: Any
    columns: dict[str, Any]
    rank: float
    teacher: int
    warnings: list[str]
    images: Sequence[ImageFile] = ()
    image_tokens: Sequence[int] = ()


def entry_of(record: Any, fields: RecordFields, chat: Chat, data_file: str) -> PromptEntry:
    """Return the entry of a record.

    Args:
        data_file: path of its file.
    Raises:
        ValueError: it has none; each argument is a fault.
    """
    values = required_values(record, fields.required)
    prompt = values[fields.prompt_key]
    label = values[fields.label_key] if fields.needs_label else None
    rank = fields.rank_of(values)
    check_value("label", label)
    check_label(label, fields.reward.weights)
    columns, warnings = _columns(record, fields)
    refuse_fields(record, MEDIA, fields.taken)
    for name, remedy in UNREAD.items():
        if record.get(name) and name not in fields.taken and fields.takes.optional is not None:
            warnings.append(f"the field {name!r} is not read: {remedy}, or drop it")
    content = chat.content_of(prompt)
    images: list[Any] = []
    if fields.images is not None:
        content, images = place_images(
            content, images_in(_value_of(record, fields.image_key)), fields.images.placeholder
        )
    check_value("prompt", content)
    if fields.takes.raw_prompts:
        columns[PROMPTS] = content
    rendered = RenderedText(chat.text_of(content), not isinstance(content, str))
    if fields.images is not None:
        fields.images.check_text(rendered.text, len(images))
    warnings += chat.unread_fields(content)
    files = [image_file(image, data_file) for image in images]
    return PromptEntry(rendered, content, label, columns, rank, fields.teacher_of(record), warnings, files)


def refuse_fields(record: Mapping[str, Any], remedies: Mapping[str, str], taken: Collection[str]) -> None:
    """Raise ValueError if a record has one of the fields of `remedies` that is neither empty nor taken."""
    for name, remedy in remedies.items():
        if record.get(name) and name not in taken:
            raise ValueError(f"the field {name!r} is not read: {remedy}")


def required_values(record: Any, required: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of fields that a record must have, by name.

    Args:
        required: name, which may be dotted -> key of the config to correct if there is no such field.
    Raises:
        ValueError: the record is no object, or lacks a field; each argument is a fault.
    """
    if isinstance(record, ValueError):
        raise record
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, found {type(record).__name__}")
    values = {}
    missing = []
    for name, key in required.items():
        try:
            values[name] = look_up(record, name)
        except KeyError:
            missing.append(f"no field {name!r}: correct {key}, or add it")
    if missing:
        raise ValueError(*missing)
    return values


def look_up(fields: Any, name: str) -> Any:
    """Return the value of the field of this very name, else of the objects that the names between its dots lead to.

    Raises:
        KeyError: there is none.
    """
    if not isinstance(fields, Mapping):
        raise KeyError(name)
    if name in fields:
        return fields[name]
    first, _, rest = name.partition(".")
    return look_up(fields[first], rest)


def _value_of(record: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field, see `look_up`; None if there is none."""
    with suppress(KeyError):
        return look_up(record, name)
    return None


def _columns(record: Mapping[str, Any], fields: RecordFields) -> tuple[dict[str, Any], list[str]]:
    """Return the columns for the reward function, and why others are left out.

    Raises:
        ValueError: a column that a function requests by name is not JSON.
    """
    named = (*fields.takes.needed, *(fields.takes.optional or ()))
    takes_any = fields.takes.optional is None
    names = [name for name in record if name in named or (takes_any and name != fields.prompt_key)]
    if fields.images is not None and fields.image_key in names:
        names.remove(fields.image_key)  # functions get paths, see `PromptImages`
    columns = {}
    left_out = []
    for name in names:
        try:
            check_value(f"field {name!r}, which reward.function takes,", record[name])
            columns[name] = record[name]
        except ValueError as error:
            if name in named:
                raise
            left_out.append(f"{error}, or do without: it is left out")
    return columns, left_out


def finite_number(value: Any, name: str) -> float:
    """Return a number of a record.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, bool) or not fits_float32(value):
        raise ValueError(f"expected a number as {name}, found {value!r:.80}")
    return float(value)


def check_value(name: str, value: Any) -> None:
    """Raise ValueError for a value that cannot be tokenised, passed to another process or written as JSON."""
    try:
        text = value if isinstance(value, str) else ENCODER.encode(value)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the {name} is not JSON ({error}): convert it to text or a number") from None

"""Faults in the records of data files: noted by several ranks, reported once."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megappo.data.entries import RequiredField, listed
from megappo.data.records import Records

MAX_FAULTS = 10
"""Different faults of a file that are reported; the records with others are counted."""
MAX_NAMED = 3
"""Records named for one fault."""
Action = Literal["error", "bad_row", "skip", "truncate_left", "warn", "lost"]
"""Actions on a fault, by data.too_long and data.on_bad_row; a bad row is an error that may be skipped.
warn: a warning for all such records; lost: text that the tokenizer loses, a warning for the first."""
PREFIXES: dict[Action, str] = {"skip": "left out: ", "truncate_left": "cut to its last tokens: "}
"""Beginnings of the lines about faults that are no errors."""


@dataclass(frozen=True)
class DataFile:
    """A data file, with its names for messages.

    Attributes:
        key: that names it, such as data.train_files.
        path: as the config spells it.
    """

    key: str
    path: str
    records: Records


@dataclass
class Faults:
    """Faults of one kind of action among the checked records of a file.

    Attributes:
        found: fault -> (number of records with it, the numbers, from 1, of the first ones).
        num_others: records with further faults.
    """

    found: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    num_others: int = 0

    def add(self, fault: str, numbers: Sequence[int], count: int = 1) -> None:
        """Note a fault of `count` records, of which `numbers` are the first ones."""
        if fault not in self.found and len(self.found) == MAX_FAULTS:
            self.num_others += count
            return
        known, named = self.found.get(fault, (0, []))
        self.found[fault] = known + count, sorted([*named, *numbers])[:MAX_NAMED]


@dataclass
class Check:
    """Result of checking some records of a file.

    Attributes:
        num_checked: how many.
        found: action -> faults.
        left_out: numbers, from 0, of the records that the run leaves out.
        ranks: by which the records are ordered, NaN for faulty ones; empty without data.order_by.
    """

    num_checked: int
    found: dict[Action, Faults] = field(default_factory=dict)
    left_out: "array[int]" = field(default_factory=lambda: array("I"))
    ranks: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, number: int, faults: Iterable[str], action: Action) -> None:
        """Note a record's faults, and what is done about them."""
        for fault in faults:
            self.found.setdefault(action, Faults()).add(fault, [number + 1])
        if action == "skip":
            self.left_out.append(number)


def fault_lines(
    file: DataFile, parts: Sequence[Check], required: Sequence[RequiredField], *actions: Action
) -> Iterator[str]:
    """Return one line per fault with one of these actions, of all parts of a file together."""
    num_checked = sum(part.num_checked for part in parts)
    unit = file.records.unit
    for action in actions:
        end = " (data.on_bad_row=skip leaves such out)" if action == "bad_row" else ""
        whole = _merged([part.found[action] for part in parts if action in part.found])
        for fault, (count, numbers) in whole.found.items():
            missing = next((field for field in required if fault.startswith(field.fault)), None)
            if missing and 2 * count > num_checked:  # hardly any record has the field: the key is wrong
                yield _wrong_key(file, num_checked, count, missing, fault.removeprefix(missing.fault))
            else:
                yield f"{file.key}: {file.path} {_named(unit, count, numbers)}: {fault}{end}"
        if whole.num_others:
            yield f"{file.key}: {file.path}: {whole.num_others:,} {unit}(s) more are wrong in other ways"


def _merged(parts: Sequence[Faults]) -> Faults:
    """Merge the faults that several ranks have found, in the order of the file."""
    whole = Faults(num_others=sum(part.num_others for part in parts))
    entries = [(fault, count, numbers) for part in parts for fault, (count, numbers) in part.found.items()]
    for fault, count, numbers in sorted(entries, key=lambda entry: entry[2][0]):
        whole.add(fault, numbers, count)
    return whole


def _wrong_key(file: DataFile, num_checked: int, count: int, missing: RequiredField, reached: str) -> str:
    unit = file.records.unit
    some = "any" if count == num_checked else f"{count:,}"
    checked = f"its {num_checked:,} {unit}s"
    if num_checked < len(file.records):
        checked = f"the {num_checked:,} {unit}s checked"
    remedy = f"{missing.remedy}; the file has: {listed(file.records.fields)}"
    return f"{missing.key}: {file.path} has no field {missing.name!r} in {some} of {checked}{reached}: {remedy}"


def _named(unit: str, count: int, numbers: Sequence[int]) -> str:
    """Return `line 3`, `lines 3, 5` or `lines 3, 5, 9 and 1,000 more`."""
    text = f"{unit}{'s' if count > 1 else ''} {', '.join(map(str, numbers))}"
    return f"{text} and {count - len(numbers):,} more" if count > len(numbers) else text

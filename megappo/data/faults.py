"""What is wrong with the records of a data file: noted by several ranks, told once."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megappo.data.fields import Wanted, listed
from megappo.data.records import Records

MAX_FAULTS = 10
"""Different faults of a file that are told; the records with others are counted."""
MAX_NAMED = 3
"""Records named for one fault."""


@dataclass(frozen=True)
class DataFile:
    """A data file as messages speak of it.

    Attributes:
        key: that names it, such as data.train_files.
        path: as the config spells it.
    """

    key: str
    path: str
    records: Records


@dataclass
class Faults:
    """The faults among some records of a file.

    Attributes:
        looked_at: how many records.
        found: fault -> (how many records have it, the first ones' numbers from 1).
        untold: records with still other faults.
    """

    looked_at: int = 0
    found: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    untold: int = 0

    def add(self, fault: str, numbers: Sequence[int], count: int = 1) -> None:
        """Note a fault of `count` records, of which `numbers` are the first ones."""
        if fault not in self.found and len(self.found) == MAX_FAULTS:
            self.untold += count
            return
        known, named = self.found.get(fault, (0, []))
        self.found[fault] = known + count, sorted([*named, *numbers])[:MAX_NAMED]


Done = Literal["error", "bad_row", "skip", "truncate_left", "warn", "lost"]
"""What is done about a fault, as data.too_long and data.on_bad_row say; a bad row is an error that may be skipped.
warn: a warning for all such records; lost: text that the tokenizer loses, a warning for the first."""
BEGINNINGS: dict[Done, str] = {"skip": "left out: ", "truncate_left": "cut to its last tokens: "}
"""How a line about what is not an error begins."""


@dataclass
class Check:
    """What a look at some records of a file found.

    Attributes:
        found: what is done about them -> faults.
        left_out: numbers, from 0, of the records that the run goes on without.
        ranks: by which the records are ordered, NaN of those that are wrong; empty without data.order_by.
    """

    looked_at: int
    found: dict[Done, Faults] = field(default_factory=dict)
    left_out: "array[int]" = field(default_factory=lambda: array("I"))
    ranks: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, number: int, faults: Iterable[str], done: Done) -> None:
        """Note a record's faults, and what is done about them."""
        for fault in faults:
            self.found.setdefault(done, Faults(self.looked_at)).add(fault, [number + 1])
        if done == "skip":
            self.left_out.append(number)


def check_lines(file: DataFile, parts: Sequence[Check], wanted: Sequence[Wanted], *done: Done) -> Iterator[str]:
    """One line per fault about which this is done, of all parts of a file together."""
    for one in done:
        end = " (data.on_bad_row=skip leaves such out)" if one == "bad_row" else ""
        yield from fault_lines(file, [part.found.get(one, Faults(part.looked_at)) for part in parts], wanted, end)


def fault_lines(file: DataFile, parts: Sequence[Faults], wanted: Sequence[Wanted], end: str) -> Iterator[str]:
    """One line per fault, of all parts of a file together; a field that hardly any record has is the key's fault.

    Args:
        wanted: the fields that every record must have.
        end: of lines about records.
    """
    whole = Faults(sum(part.looked_at for part in parts), untold=sum(part.untold for part in parts))
    entries = [(fault, count, numbers) for part in parts for fault, (count, numbers) in part.found.items()]
    for fault, count, numbers in sorted(entries, key=lambda entry: entry[2][0]):  # as the file has them
        whole.add(fault, numbers, count)
    for fault, (count, numbers) in whole.found.items():
        lacked = next((field for field in wanted if fault.startswith(field.fault)), None)
        if lacked and 2 * count > whole.looked_at:
            yield _wrong_key(file, whole.looked_at, count, lacked, fault.removeprefix(lacked.fault))
        else:
            yield f"{file.key}: {file.path} {_named(file.records.unit, count, numbers)}: {fault}{end}"
    if whole.untold:
        yield f"{file.key}: {file.path}: {whole.untold:,} {file.records.unit}(s) more are wrong in other ways"


def _wrong_key(file: DataFile, looked_at: int, count: int, lacked: Wanted, reached: str) -> str:
    some = "any" if count == looked_at else f"{count:,}"
    them = f"its {looked_at:,} {file.records.unit}s"
    if looked_at < len(file.records):
        them = f"the {looked_at:,} {file.records.unit}s looked at"
    remedy = f"{lacked.remedy}; the file has: {listed(file.records.fields)}"
    return f"{lacked.key}: {file.path} has no field {lacked.name!r} in {some} of {them}{reached}: {remedy}"


def _named(unit: str, count: int, numbers: Sequence[int]) -> str:
    """`line 3`, `lines 3, 5` or `lines 3, 5, 9 and 1,000 more`."""
    text = f"{unit}{'s' if count > 1 else ''} {', '.join(map(str, numbers))}"
    return f"{text} and {count - len(numbers):,} more" if count > len(numbers) else text

"""What is wrong with the records of a data file: noted by several ranks, told once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megappo.data.records import Records

MAX_FAULTS = 10
"""Different faults of a file that are told; the records with others are counted."""
MAX_NAMED = 3
"""Records named for one fault."""
MAX_FIELDS = 200
"""Characters of the fields that a file has."""


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


def lacking(option: str, name: str) -> str:
    """The fault of a record without the field that an option of the data section names."""
    return f"no field {name!r} (data.{option})"


def fault_lines(file: DataFile, parts: Sequence[Faults], options: dict[str, str]) -> Iterator[str]:
    """One line per fault, of all parts of a file together; a field that hardly any record has is the key's fault.

    Args:
        options: prompt_key and label_key, and the fields that they name.
    """
    whole = Faults(sum(part.looked_at for part in parts), untold=sum(part.untold for part in parts))
    entries = [(fault, count, numbers) for part in parts for fault, (count, numbers) in part.found.items()]
    for fault, count, numbers in sorted(entries, key=lambda entry: entry[2][0]):  # as the file has them
        whole.add(fault, numbers, count)
    key_faults = {lacking(option, name): (option, name) for option, name in options.items()}
    for fault, (count, numbers) in whole.found.items():
        if fault in key_faults and 2 * count > whole.looked_at:
            yield _wrong_key(file, whole.looked_at, count, *key_faults[fault])
        else:
            yield f"{file.key}: {file.path} {_named(file.records.unit, count, numbers)}: {fault}"
    if whole.untold:
        yield f"{file.key}: {file.path}: {whole.untold:,} {file.records.unit}(s) more are wrong in other ways"


def _wrong_key(file: DataFile, looked_at: int, count: int, option: str, name: str) -> str:
    some = "any" if count == looked_at else f"{count:,}"
    them = f"its {looked_at:,} {file.records.unit}s"
    if looked_at < len(file.records):
        them = f"the {looked_at:,} {file.records.unit}s looked at"
    fields = ", ".join(file.records.fields) or "none"
    shown = fields if len(fields) <= MAX_FIELDS else f"{fields[:MAX_FIELDS]}..."
    remedy = f"set data.{option}; the file has: {shown}"
    return f"data.{option}: {file.path} has no field {name!r} in {some} of {them}: {remedy}"


def _named(unit: str, count: int, numbers: Sequence[int]) -> str:
    """`line 3`, `lines 3, 5` or `lines 3, 5, 9 and 1,000 more`."""
    text = f"{unit}{'s' if count > 1 else ''} {', '.join(map(str, numbers))}"
    return f"{text} and {count - len(numbers):,} more" if count > len(numbers) else text

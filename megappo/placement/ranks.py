"""Read and write lists of ranks as text, and group ranks by node. Without torch."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from megappo.config.config_error import counted, shorten
from megappo.config.values import MOST_RANKS


def parse_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """Read ranks written as `all`, `5`, `0-7` (inclusive) or `0-3,6`, in ascending order.

    Raises:
        ValueError: the text is not of this form, a range runs backwards, a rank is named twice or not below world_size.
    """
    if is_everywhere(text):
        return tuple(range(world_size))
    ranks: set[int] = set()
    for first, last in rank_ranges(text):
        if last >= world_size:
            raise ValueError(
                f"{_quoted(text)} names rank {last}, but this run has {counted(world_size, 'rank')}, numbered from 0: "
                f"start {last + 1} processes or more (NPROC={last + 1} with launch/local.sh), or name lower ranks"
            )
        for rank in range(first, last + 1):
            if rank in ranks:
                raise ValueError(f"{_quoted(text)} names rank {rank} twice: name it once")
            ranks.add(rank)
    return tuple(sorted(ranks))


def is_everywhere(text: str) -> bool:
    """Return whether a text names all ranks of a run of any size."""
    return text.strip() == "all"


def rank_ranges(text: str) -> list[tuple[int, int]]:
    """Return the first and last rank of each part of a text, which is not `all`.

    Raises:
        ValueError: the text is not a list of ranks.
    """
    return [_rank_range(part, text) for part in text.split(",")]


def _rank_range(part: str, text: str) -> tuple[int, int]:
    first, dash, last = (number.strip() for number in part.partition("-"))
    numbers = (first, last) if dash else (first, first)
    if not all(number.isascii() and number.isdigit() for number in numbers):
        raise ValueError(f"{_quoted(text)} is not a list of ranks: write 'all', '0-7', '0,2' or '0-3,6'")
    if any(len(number) > len(str(MOST_RANKS)) or int(number) >= MOST_RANKS for number in numbers):
        raise ValueError(f"{_quoted(text)} names ranks above {MOST_RANKS - 1}: write lower ones")
    if int(first) > int(numbers[1]):
        raise ValueError(f"{_quoted(text)}: the range {part.strip()} runs backwards: write {last}-{first}")
    return int(numbers[0]), int(numbers[1])


def _quoted(text: str) -> str:
    return shorten(repr(text))


def format_ranks(ranks: Iterable[int]) -> str:
    """Write ascending ranks as `parse_ranks` reads them: `0-3,6`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    return ",".join("-".join(map(str, run)) for run in runs)


def by_node(ranks: Sequence[int], ranks_per_node: int) -> tuple[tuple[int, ...], ...]:
    """Group ascending ranks by node: torchrun numbers them node by node, and starts as many on each."""
    return tuple(tuple(part) for _, part in groupby(ranks, key=lambda rank: rank // ranks_per_node))

"""The groups of responses that one rank's engine samples for training, and the counts of all ranks' groups."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from threading import Event
from typing import Literal

from torch.distributed import Store

from megappo.data.prompts import Prompt
from megappo.rollouts.fingerprint import prompt_digest
from megappo.rollouts.group_queue import block_of
from megappo.rollouts.journal import Group, GroupFacts, Journal, NoJournal
from megappo.rollouts.sample_rows import Sample
from megappo.rollouts.sampler import Request
from megappo.userland.grades import Grade
from megappo.userland.rewards import RewardError

SCORE = "score"
"""The metric that is the sum of a response's scores; other metrics are numbers that reward functions return."""
Kind = Literal["finished", "equal"]
"""Groups that a step trains on, and groups that algorithm.filter_groups leaves out."""


class SharedCounts:
    """Counts that the engines of all ranks share, in the run's store.

    Args:
        store: a connection on which nothing waits, so that threads can share it.
        block_size: prompts of which finished groups are counted together.
    """

    def __init__(self, store: Store, block_size: int):
        self._store = store
        self._block_size = block_size

    def take(self, count: int) -> int:
        """Take the next `count` admitted prompts; return how many were taken before."""
        return self._store.add("groups/taken", count) - count

    def add(self, kind: Kind, position: int, count: int) -> None:
        """Add `count` finished groups of this prompt to the shared count: 1, or -1 to take back an earlier 1."""
        self._store.add(f"groups/{kind}/{block_of(position, self._block_size)}", count)

    def total(self, kind: Kind, blocks: Iterable[int]) -> Counter[int]:
        """Return the number of finished groups of each block."""
        return Counter({block: self._store.add(f"groups/{kind}/{block}", 0) for block in blocks})


class RankGroups:
    """This rank's groups, from their beginning until a step removes them.

    The sampling thread begins and finishes groups, and removes unfinished ones. The main thread calls `restore`, before
    that thread is started, `finished`, and `remove` for finished ones.

    Args:
        shared: counts the finished groups; None on ranks without an engine.
        journal: keeps what is sampled.
    Attributes:
        has_finished: set when a group is finished.
        num_equal: finished groups so far that algorithm.filter_groups leaves out.
    """

    num_equal = 0

    def __init__(self, shared: SharedCounts | None, journal: Journal | NoJournal):
        self.has_finished = Event()
        self._shared = shared
        self._journal = journal
        self._groups: dict[int, Group] = {}  # by position

    def restore(self, groups: dict[int, Group]) -> None:
        """Add groups of an earlier process, by position."""
        self._groups |= groups
        for group in groups.values():
            if group.is_finished:
                self._count(group, 1)

    def begin(self, prompts: Mapping[int, Prompt], version: int) -> list[Group]:
        """Add groups of this version, for prompts by position, and return them."""
        groups = [Group(position, version, prompt_digest(prompt)) for position, prompt in prompts.items()]
        self._groups |= {group.position: group for group in groups}
        return groups

    def unfinished(self) -> list[Group]:
        """Return the groups that are begun and not finished, in the order of their prompts."""
        groups = [group for group in list(self._groups.values()) if not group.is_finished]
        return sorted(groups, key=lambda group: group.position)

    def add_sample(self, sample: Sample) -> Group:
        """Add a finished response; return its group."""
        group = self._groups[sample.prompt_index]
        self._journal.write_sample(group, sample)
        group.samples.append(sample)
        group.written.pop(sample.sample_index, None)
        return group

    def keep_written(self, request: Request) -> None:
        """Keep what an aborted request has written."""
        group = self._groups[request.prompt_index]
        group.written[request.sample_index] = request.written
        self._journal.write_partial(group, request.sample_index)

    def finish(self, group: Group) -> None:
        """Let the main thread take a group, unless it has been removed."""
        if group.position not in self._groups:
            return
        self._journal.write_grades(group)
        group.is_finished = True
        self.num_equal += group.is_equal
        self._count(group, 1)
        self.has_finished.set()

    def finished(self) -> list[GroupFacts]:
        """Return the facts about the finished groups."""
        return [group.facts for group in list(self._groups.values()) if group.is_finished]

    def remove(self, positions: Iterable[int]) -> list[Group]:
        """Remove the groups of these positions; return this rank's groups."""
        groups = [self._groups.pop(position) for position in positions if position in self._groups]
        for group in groups:
            if group.is_finished:
                self._count(group, -1)
        return groups

    def _count(self, group: Group, count: int) -> None:
        self._shared.add("equal" if group.is_equal else "finished", group.position, count)


def differ(group: Sequence[Sample], metric: str) -> bool:
    """Return whether a metric differs within a group. Nothing is known of responses for which a function failed.

    Raises:
        RewardError: the reward function returns no such metric.
    """
    return len({_value(one.grade, metric) for one in group if not one.grade.failed}) > 1


def _value(grade: Grade, metric: str) -> float:
    if metric == SCORE:
        return sum(grade.totals)
    if metric not in grade.parts:
        raise RewardError(
            f"algorithm.filter_groups.metric {metric}: the reward function returned no such number for a response, but "
            f"{', '.join([SCORE, *grade.parts])}\nset one that it returns for each response"
        )
    return grade.parts[metric]

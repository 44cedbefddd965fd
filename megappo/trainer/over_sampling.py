"""More prompts than a step trains on: when the groups of responses that are there are enough."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megappo.rollouts.responses import SampleScoring
from megappo.rollouts.sampler import ENOUGH_SECONDS
from megappo.runtime.heartbeat import LIFE
from megappo.userland.forms import Graded


@dataclass(frozen=True)
class Wanted:
    """So many groups, each with all of its responses.

    Attributes:
        counts: whether a group with such scores is one of them; None: any is.
    """

    num_groups: int
    counts: Callable[[Sequence[Graded]], bool] | None = None


class Enough:
    """Whether the engines of all ranks together have written what is wanted; asked now and then by each.

    Args:
        scoring: of this rank's samples.
        take: a `sampler.store_counter` that all ranks share.
    """

    def __init__(self, wanted: Wanted, scoring: SampleScoring, take: Callable[[int], int]):
        self._wanted, self._scoring, self._take = wanted, scoring, take
        self._undecided: list[range] = []

    def add(self, positions: range) -> None:
        """A group is there, with these positions in `scoring`."""
        self._undecided.append(positions)

    def __call__(self) -> bool:
        verdicts = [(positions, self._counts(positions)) for positions in self._undecided]
        self._undecided = [positions for positions, verdict in verdicts if verdict is None]
        num_new = sum(verdict is True for _, verdict in verdicts)
        return self._take(num_new) + num_new >= self._wanted.num_groups

    def tell_all(self, stop: Callable[[], bool]) -> None:
        """Until this rank has told of all its groups, whose scores may come late, or there is enough, or `stop` says
        so: the engines of others go on meanwhile."""
        while not self() and self._undecided and not stop():
            with LIFE.waiting():
                time.sleep(ENOUGH_SECONDS)

    def _counts(self, positions: range) -> bool | None:
        """None: its scores are not known yet."""
        if self._wanted.counts is None:
            return True
        graded = self._scoring.known(positions)
        return None if graded is None else self._wanted.counts(graded)

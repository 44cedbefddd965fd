"""Order of prompts: a pure function of the seed and of the number drawn before, so a run needs no state to resume."""

import math
import random
from array import array
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache

import numpy


class Order:
    """The order of some prompts, epoch after epoch.

    Args:
        seed: seed of the shuffling.
        size: number of prompts.
        shuffle: shuffle each epoch; else they keep their order.
        values: numbers, one per prompt, by which an epoch ascends; prompts with equal ones keep their order. Empty:
            none.
    """

    def __init__(self, seed: str, size: int, *, shuffle: bool, values: "array[float]"):
        self._seed = seed
        self._size = size
        self._shuffle = shuffle
        self._values = values
        self._epoch = lru_cache(maxsize=2)(self._epoch_order)

    def __getitem__(self, place: int) -> int:
        """Return the prompt at a place, counted over all epochs; each epoch has every prompt once."""
        epoch, offset = divmod(place, self._size)
        return self._epoch(epoch)[offset]

    def _epoch_order(self, epoch: int) -> Sequence[int]:
        if not self._shuffle and not self._values:
            return range(self._size)
        order = array("I", range(self._size))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return _ascending(order, self._values) if self._values else order


class Turns:
    """Turns of several parts that share a sequence by weights.

    The i-th turn, from 0, of a part with weight w comes at (i + 1/2) / w. So each has its share of any stretch of the
    sequence, up to about one turn.

    Source: the divisor method of Webster and Sainte-Lague.
    """

    def __init__(self, weights: Sequence[float]):
        exact = [Fraction(repr(float(weight))) for weight in weights]  # 0.1 is a tenth
        unit = math.lcm(*(weight.denominator for weight in exact))
        self._weights = [int(weight * unit) for weight in exact]
        self._whole = sum(self._weights)
        common = math.lcm(*self._weights)
        self._steps = [common // weight for weight in self._weights]  # from one turn of a part to the next

    def most(self, part: int, count: int) -> int:
        """Return a part's share of `count` turns, rounded up."""
        return -(-self._weights[part] * count // self._whole)

    def between(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """Return, for each place, the part whose turn it is and the number of its turns before."""
        had = self._had(first)
        for place in range(sum(had), stop):
            part = min(range(len(had)), key=lambda one: (2 * had[one] + 1) * self._steps[one])
            if place >= first:
                yield part, had[part]
            had[part] += 1

    def _had(self, place: int) -> list[int]:
        """Return the turns of each part until a time before which they have at most `place` turns together."""
        time = 2 * place - len(self._weights)  # in halves of a turn, with a half for each that may be rounded up
        return [max(0, (weight * time + self._whole) // (2 * self._whole)) for weight in self._weights]


def _ascending(order: "array[int]", values: "array[float]") -> "array[int]":
    """Sort prompts by their values; prompts with equal values keep their order."""
    shuffled = numpy.frombuffer(order, numpy.uint32)
    ascending = numpy.argsort(numpy.frombuffer(values)[shuffled], kind="stable")
    return array("I", shuffled[ascending].tobytes())

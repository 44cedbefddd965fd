"""Engines that fail are started anew, and get the weights of the others."""

from collections.abc import Callable, Iterable, Sequence

from megappo.batch.exchange import Exchange, OtherRankError
from megappo.engines.client import EngineError, EngineFault
from megappo.engines.own_engine import OwnEngine
from megappo.observe.observer import NullObserver, Observer
from megappo.runtime import platform


class EngineLost(EngineError):
    """This rank's engine cannot be had back. All ranks raise this, or EngineLostElsewhere, together: they can save."""


class EngineLostElsewhere(OtherRankError):
    """The same of another rank's."""


class Restarts:
    """Looks after the engines between what they are asked. All ranks call together.

    Args:
        limit: rollout.max_engine_restarts.
    Attributes:
        give_weights: called when engines that have been started anew, with model.path's weights, are up.
    """

    def __init__(self, own: OwnEngine, exchange: Exchange, observer: Observer | NullObserver, limit: int):
        self.own = own
        self.exchange = exchange
        self.observer = observer
        self.limit = limit
        self.give_weights: Callable[[], object] = lambda: None
        self._in_a_row = 0  # of this rank's engine, without a rollout that went well between them
        self._count = 0

    def take_count(self) -> int:
        """Of all engines since the last call."""
        count, self._count = self._count, 0
        return count

    def restart_after_rollout(self, fault: EngineFault | None) -> bool:
        """Start anew what engines have failed in a rollout; whether any had. Then all are up, with the same weights.

        Args:
            fault: of this rank's engine.
        Raises:
            EngineLost, EngineLostElsewhere: one has failed too often, or does not start.
        """
        if self.restart_failed(fault):
            return True
        self._in_a_row = 0
        return False

    def restart_failed(self, fault: EngineFault | None) -> bool:
        """The same outside of a rollout."""
        lost = f"{fault}{self._tried()}" if fault is not None and self._in_a_row == self.limit else ""
        found, lost_anywhere = zip(*self.exchange.share((self._told(fault), lost)), strict=True)
        _raise_together(lost, lost_anywhere)
        told = [one for one in found if one]
        if not told:
            return False
        for _, text in told:
            self.observer.message(text)
        # All parts before the first would find an old one.
        is_mine = stop_engines(self.own, {number for number, _ in told})
        platform.empty_cache()  # what the allocator of any rank on the engine's GPUs keeps, the engine cannot have
        self.exchange.share(None)
        lost = self._restart() if is_mine else ""
        _raise_together(lost, self.exchange.share(lost))
        self._in_a_row += fault is not None
        self._count += len(told)
        self.give_weights()
        return True

    def _restart(self) -> str:
        """Why this rank's engine does not start; "" if it does."""
        try:
            self.own.restart()
        except EngineError as error:
            return str(error)
        return ""

    def _told(self, fault: EngineFault | None) -> tuple[int, str] | None:
        """The engine that has failed, and what to say of it."""
        if fault is None:
            return None
        times = f"{self._in_a_row + 1} of {self.limit} times in a row"
        text = f"WARNING: engine {self.own.number} has failed ({times}; rollout.max_engine_restarts): {fault}"
        return self.own.number, text

    def _tried(self) -> str:
        if self.limit == 0:
            return ""
        return f"\nengine {self.own.number} has been started anew {self.limit} times (rollout.max_engine_restarts)"


def stop_engines(own: OwnEngine, engines: Iterable[int]) -> bool:
    """End this rank's part of these engines, or the whole of one, if it has any; return whether it has."""
    is_mine = not {own.number, own.part_of}.isdisjoint(engines)
    if is_mine:
        own.stop()
    return is_mine


def _raise_together(lost: str, anywhere: Sequence[str]) -> None:
    """Raise if this rank has lost its engine for good, or any other has: `anywhere` is the same on all."""
    if lost:
        raise EngineLost(lost)
    if any(anywhere):
        raise EngineLostElsewhere(next(filter(None, anywhere)))

"""Restart engines that fail; a callback gives them the weights of the others."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megappo.batch.exchange import Exchange
from megappo.engines.client import EngineError, EngineFault
from megappo.engines.handle import EngineHandle
from megappo.runtime import platform


class EngineLost(EngineError):
    """An engine has failed for good. All ranks raise this together, and can save; where the engine is another rank's,
    the error is a consequence of that rank's."""


@dataclass
class EngineRestarts:
    """Restarts engines between requests. All ranks call together.

    Attributes:
        engine_handle: this rank's engine, or its part of one.
        warn: prints a line about an engine that has failed, on one rank.
        limit: rollout.max_engine_restarts.
        give_weights: called when restarted engines serve with model.path's weights.
        on_restart: called when this rank's engine has been restarted and has the weights.
    """

    engine_handle: EngineHandle
    exchange: Exchange
    warn: Callable[[str], object]
    limit: int
    give_weights: Callable[[], object] = lambda: None
    on_restart: Callable[[], object] = lambda: None

    _in_a_row = 0  # restarts of this rank's engine since its last rollout without a fault
    _count = 0

    def take_count(self) -> int:
        """Return how often engines, of all ranks, were restarted since the last call."""
        count = self._count
        self._count = 0
        return count

    def restart_after_rollout(self, fault: EngineFault | None) -> bool:
        """Restart the engines that failed in a rollout; return whether any did. All then have the same weights.

        Args:
            fault: fault of this rank's engine.
        Raises:
            EngineLost: an engine has failed too often, or does not start.
        """
        if self.restart_failed(fault):
            return True
        self._in_a_row = 0
        return False

    def restart_failed(self, fault: EngineFault | None) -> bool:
        """Restart the engines that failed outside a rollout; as `restart_after_rollout`."""
        number = self.engine_handle.number
        warning = lost = ""
        if fault is not None:
            reason = self.engine_handle.engine.explain(fault)
            times = f"{self._in_a_row + 1} of {self.limit} times in a row; rollout.max_engine_restarts"
            warning = f"WARNING: engine {number} has failed ({times}): {reason}"
            if self._in_a_row == self.limit:
                tried = f"\nengine {number} has been restarted {self.limit} times (rollout.max_engine_restarts)"
                lost = f"{reason}{tried if self.limit else ''}"
        numbers, warnings, losses = zip(*self.exchange.all_gather((number, warning, lost)), strict=True)
        _raise_together(lost, losses)
        failed = [number for number, warning in zip(numbers, warnings, strict=True) if warning]
        if not failed:
            return False
        for text in filter(None, warnings):
            self.warn(text)
        # All parts stop before the first starts, which would otherwise connect to an old one.
        is_mine = stop_engines(self.engine_handle, failed)
        platform.empty_cache()  # an engine cannot use what the allocators of the ranks on its GPUs keep
        self.exchange.all_gather(None)
        if is_mine:
            try:
                self.engine_handle.restart()
            except EngineError as error:
                lost = str(error)
        _raise_together(lost, self.exchange.all_gather(lost))
        self._in_a_row += fault is not None
        self._count += len(failed)
        self.give_weights()
        if is_mine:
            self.on_restart()
        return True


def stop_engines(engine_handle: EngineHandle, numbers: Iterable[int]) -> bool:
    """End this rank's engine or part if it belongs to one of these engines; return whether it does."""
    is_mine = not {engine_handle.number, engine_handle.part_of}.isdisjoint(numbers)
    if is_mine:
        engine_handle.stop()
    return is_mine


def _raise_together(lost: str, losses: Sequence[str]) -> None:
    """Raise on all ranks if any has lost its engine for good; `losses` has one entry for each rank."""
    if any(losses):
        error = EngineLost(lost or next(filter(None, losses)))
        error.is_consequence = not lost
        raise error

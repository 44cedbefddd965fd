"""Handles of ranks' engines, for tests without an engine's process."""

from collections.abc import Callable

from megappo.batch.exchange import Exchange
from megappo.engines.handle import EngineHandle
from megappo.engines.restarts import EngineRestarts


def restarts_of(own: EngineHandle, exchange: Exchange, warn: Callable[[str], object] = print) -> EngineRestarts:
    return EngineRestarts(own, exchange, warn, limit=3)

"""The inference engines of a run, as its ranks see them: they sleep, wake, and take the actor's weights."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from megappo.batch.exchange import Exchange
from megappo.config.schema import Config
from megappo.engines.client import WEIGHTS, WORKING_MEMORY, EngineClient
from megappo.engines.footprint import Footprint
from megappo.engines.own_engine import OwnEngine
from megappo.engines.restarts import Restarts, stop_engines
from megappo.placement.layout import Layout
from megappo.runtime import platform
from megappo.sync.build import build_sync, engine_sleeps
from megappo.sync.proof import Checksums, check_log_probs, verified_sync
from megappo.sync.route import find_route
from megappo.sync.sync import SyncStats, WeightSync
from megappo.trainer.models import Models
from megappo.trainer.phases import Phases
from megappo.trainer.probe import Probe


class Started(NamedTuple):
    """What is known of engines that are up, before any model is there; see `InferenceEngines`."""

    loaded: Checksums
    footprint: Footprint


@dataclass
class InferenceEngines:
    """All ranks call together.

    Attributes:
        client: of the engine this rank owns; None on the others.
        sleeps: this rank owns an engine that gives its memory up while the models on its GPUs are trained.
        weight_sync: the way of the actor's weights to the engines.
        probe: asks engines and actor about the same tokens.
        asleep: the engines that sleep do so now.
        loaded: checksums of the weights that the engine of this rank has loaded; see `verified_sync`.
        footprint: of the engine on this rank's GPU.
        sent: what the engines were last given.
    """

    exchange: Exchange
    client: EngineClient | None
    sleeps: bool
    weight_sync: WeightSync
    probe: Probe
    asleep: bool = False
    loaded: Checksums = ()
    footprint: Footprint = Footprint(0)
    sent: SyncStats = SyncStats()

    def sync(self, *, changed: bool = True) -> dict[str, float]:
        """Wake the engines with the actor's weights.

        Args:
            changed: the actor may have been trained since the last call.
        Returns:
            `sync/{bytes,seconds,gib_per_second}`, by the slowest rank's clock; and, if it was the probe's turn,
            `sync/log_prob_diff/{mean,max,warnings}`.
        """
        self.wake(changed=changed)
        num_bytes, seconds = self.sent.bytes, max(self.exchange.share(self.sent.seconds))
        metrics = {"sync/bytes": num_bytes, "sync/seconds": seconds}
        return metrics | {"sync/gib_per_second": num_bytes / 2**30 / seconds} | self.probe()

    def first_sync(self, *, verify: bool, as_loaded: bool) -> None:
        """The first one, with the proof that all of the engines' weights are the actor's: until no engine fails in it.

        Args:
            verify, as_loaded: see `verified_sync`.
        """
        self._wake(partial(self._prove, as_loaded) if verify else self._send)
        while self._restart_failed():
            if verify:
                self._prove(as_loaded)
        self._note_awake()
        self.probe()

    def check_rollouts(self, difference: float) -> dict[str, int]:
        """See that the engines wrote as the actor would; see `check_log_probs`."""
        warn = self.probe.rollouts.observer.message
        return {"rollout/log_prob_diff/warnings": check_log_probs("the rollouts", difference, self.probe.config, warn)}

    def sleep(self) -> None:
        """Free the engines' GPU memory for the trainer: on return, of the engines on all ranks' GPUs."""
        if self.asleep:
            return
        self.asleep = True
        put_to_sleep(self.client if self.sleeps else None, self.restarts.own, self.exchange)
        self.footprint.wait_asleep()

    def end(self) -> None:
        """`sleep` for good, also of engines that hang or have ended: those that the run has started are ended."""
        self.asleep = True
        self.restarts.own.stop()
        self.exchange.share(None)

    def wake(self, *, changed: bool = False) -> None:
        """Give the engines their GPU memory back, and the weights: those that slept have none.

        First what the weights take, and the rest when the sync's buffers are gone, so that the peak is lower.

        Those that have failed are started anew.

        Args:
            changed: see `sync`.
        Raises:
            EngineError: one has failed too often.
        """
        self._wake(partial(self._send, changed=changed))
        self._mend()
        self._note_awake()

    @property
    def restarts(self) -> Restarts:
        """What starts engines anew."""
        return self.probe.rollouts.restarts

    def reconnect(self, make_sync: Callable[[], WeightSync]) -> None:
        """Give all engines, awake, all of the weights, by a way made anew: some of them have been started anew."""
        for sender in self.weight_sync.senders:
            sender.abandon()
        self.weight_sync = make_sync()
        platform.empty_cache()
        self.exchange.share(None)
        self._send()
        self._mend()
        self.probe()

    def _wake(self, give: Callable[[], object]) -> None:
        """Wake the engines that sleep, and give all engines the weights before what else of their memory wakes."""
        self._give_back(WEIGHTS)
        if not any(self.exchange.share(self._has_failed())):
            give()
        self._give_back(WORKING_MEMORY)

    def _note_awake(self) -> None:
        self.asleep = False
        self.footprint.note_awake()

    def _prove(self, as_loaded: bool) -> None:
        self.weight_sync.forget()  # what is frozen, too, is spoiled and must come anew
        with self._keeping_fault():
            barrier = partial(self.exchange.share, None)
            verified_sync(self.weight_sync, self.client, barrier=barrier, as_loaded=as_loaded, loaded=self.loaded)

    def _send(self, *, changed: bool = True) -> None:
        """The actor's weights to the engines, as far as they are there."""
        with self._keeping_fault():
            self.sent = self.weight_sync(changed=changed)

    def _keeping_fault(self) -> AbstractContextManager[None]:
        """Of this rank's engine, while other ranks wait for what this one does."""
        return nullcontext() if self.client is None else self.client.keeping_fault()

    def _has_failed(self) -> bool:
        """Whether this rank's engine has, in something it was asked for or meanwhile."""
        if self.client is None:
            return False
        with self.client.keeping_fault():
            self.client.check_health()
        return self.client.has_failed

    def _mend(self) -> None:
        """Have the engines that have failed started anew, and given the weights."""
        while self._restart_failed():
            pass

    def _restart_failed(self) -> bool:
        """Start anew those that have; whether there were any."""
        return self.restarts.restart_failed(None if self.client is None else self.client.take_fault())

    def _give_back(self, memory: Sequence[str]) -> None:
        platform.empty_cache()  # what the allocator of any rank on the engine's GPUs keeps, the engine cannot have
        self.exchange.share(None)
        if self.client is not None and self.sleeps and self.asleep:
            with self.client.keeping_fault():
                self.client.wake(memory)


class NoEngines:
    """The engines of a run that replays a record: there are none. Same methods as InferenceEngines."""

    def sync(self, *, changed: bool = True) -> dict[str, float]:
        """Nothing."""
        return {}

    def first_sync(self, *, verify: bool, as_loaded: bool) -> None:
        """Nothing."""

    def check_rollouts(self, difference: float) -> dict[str, int]:
        """Nothing: they may be another policy's."""
        return {}

    def sleep(self) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""

    def wake(self, *, changed: bool = False) -> None:
        """Nothing."""


def start_engines(
    config: Config, layouts: dict[str, Layout], own: OwnEngine, exchange: Exchange, *, as_loaded: bool
) -> Started:
    """Wait until all engines are up, then put to sleep those that share GPUs with models. All ranks together.

    Models are built afterwards, as an engine sizes its KV cache by the memory that is free.

    Args:
        own: this rank's engine, which has been started.
        as_loaded: take the checksums of the loaded weights first, as an engine that sleeps loses them.
    """
    route, client = find_route(config, layouts, int(os.environ["LOCAL_WORLD_SIZE"])), own.wait_ready()
    sleeps = own.number is not None and engine_sleeps(route, own.number)
    loaded, held_bytes = list[Mapping[str, str]](), 0.0
    if client is not None:
        with client.keeping_fault():
            loaded = client.weight_checksums() if as_loaded else []
            held_bytes = client.held_bytes() if sleeps else 0.0
    of_ranks = exchange.share(held_bytes)
    footprint = Footprint(sum(of_ranks[one.owner] for one in route.engines if exchange.rank in one.ranks))
    footprint.note_awake()
    exchange.share(None)  # all have seen what the engines take
    put_to_sleep(client if sleeps else None, own, exchange)
    footprint.wait_asleep()
    return Started(loaded, footprint)


def put_to_sleep(client: EngineClient | None, own: OwnEngine, exchange: Exchange) -> None:
    """Have engines free their GPU memory; all ranks together. An engine that fails is ended, and restarted when the
    engines wake.

    Args:
        client: of this rank's engine, if that one sleeps.
    """
    if client is not None:
        with client.keeping_fault():
            client.sleep()
    has_failed = client is not None and client.has_failed
    failed = set(exchange.share(own.number if has_failed else None)) - {None}
    if failed:  # what is left of them, on all their nodes, may have memory
        stop_engines(own, failed)
        exchange.share(None)


def connect(
    config: Config, layouts: dict[str, Layout], started: Started, models: Models, probe: Probe, phase: Phases
) -> InferenceEngines:
    """The engines of a run, once its models are there."""
    rollouts, exchange = probe.rollouts, models.actor.exchange
    route = find_route(config, layouts, int(os.environ["LOCAL_WORLD_SIZE"]))
    sleeps = rollouts.engine_number is not None and engine_sleeps(route, rollouts.engine_number)
    ends = (models.actor.engine, rollouts.client)
    make_sync = partial(build_sync, config, route, models.architecture, *ends, exchange)
    engines = InferenceEngines(exchange, rollouts.client, sleeps, make_sync(), probe, True, *started)

    def give_weights() -> None:
        with phase("sync"):
            engines.reconnect(make_sync)

    rollouts.restarts.give_weights = give_weights
    return engines

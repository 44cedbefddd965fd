"""Engines and weight sync together: engines sleep, wake, take the actor's weights, and are probed afterwards."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from megappo.batch.exchange import Batch, Exchange
from megappo.config.schema import Config
from megappo.data.prompts import Prompt, PromptDataset
from megappo.engines.client import WEIGHTS, WORKING_MEMORY, EngineClient, deferring_faults
from megappo.engines.generations import EngineFault, Generation, SamplingParams
from megappo.engines.handle import EngineHandle, Footprint
from megappo.engines.restarts import EngineRestarts, stop_engines
from megappo.placement.run_plan import RunPlan
from megappo.rollouts.sample_rows import response_sample, sample_rows
from megappo.runtime import platform
from megappo.sync.build import build_sync, engine_sleeps
from megappo.sync.proof import Checksums, check_log_probs, check_probe, verified_sync
from megappo.sync.sync import SyncStats, WeightSync
from megappo.trainer.component_batch import Component, gather
from megappo.trainer.models import Models
from megappo.trainer.phases import Phases

NUM_PROBE_PROMPTS = 4  # each engine continues all of them
PROBE_TOKENS = 4


class StartedEngines(NamedTuple):
    """Facts about engines that serve, before any model is built.

    Attributes:
        loaded: checksums of the weights that this rank's engine has loaded; see `verified_sync`.
        footprint: of the engine on this rank's GPU.
    """

    loaded: Checksums = ()
    footprint: Footprint = Footprint(0)


class Probe:
    """A few tokens that every engine writes after a weight sync, compared with the actor's log-probs of them.

    Args:
        prompts: the first of these, the same every time.
        stop_token_ids: as for rollouts.
    """

    def __init__(
        self,
        config: Config,
        prompts: PromptDataset,
        stop_token_ids: tuple[int, ...],
        restarts: EngineRestarts,
        actor: Component,
        num_engines: int,
    ):
        self.config = config
        self.restarts = restarts
        self.actor = actor
        rollout = config.rollout
        length = min(PROBE_TOKENS, rollout.max_response_length)
        self.params = SamplingParams(length, rollout.temperature, rollout.top_p, rollout.top_k, stop_token_ids)
        # Every data-parallel shard of the actor needs a row.
        count = max(NUM_PROBE_PROMPTS, -(-actor.layout.data // num_engines))
        self.prompts = prompts.at([prompts.kept[i % len(prompts)] for i in range(count)])
        self._calls = 0

    def __call__(self) -> dict[str, float]:
        """`sync/log_prob_diff/{mean,max,warnings}` every `rollout.sync.probe_interval` syncs; all ranks together.

        Raises:
            EngineError: the difference is too large, see `check_probe`; or an engine has failed too often.
        """
        self._calls += 1
        interval = self.config.rollout.sync.probe_interval
        if interval == 0 or (self._calls - 1) % interval:
            return {}
        exchange = self.actor.exchange
        generations, fault = self._generate()
        while self.restarts.restart_failed(fault):
            generations, fault = self._generate()
        batch = probe_batch(generations, self.prompts, self.restarts.own.number, exchange)
        at_actor = self.actor.scatter(batch)
        rows = gather([(at_actor, at_actor.forward(), {"log_probs": "old_log_probs"})], batch.rows)
        return check_probe(rows, self.restarts.own.number, self.config, exchange, self.restarts.warn)

    def _generate(self) -> tuple[list[Generation], EngineFault | None]:
        """Return the responses of this rank's engine, if it owns one, or the engine's fault."""
        client = self.restarts.own.client
        if client is None:
            return [], None
        try:
            return client.generate([prompt.tokens for prompt in self.prompts], self.params), None
        except EngineFault as fault:
            return [], fault


def probe_batch(
    generations: Sequence[Generation], prompts: Sequence[Prompt], engine_number: int | None, exchange: Exchange
) -> Batch:
    """Each engine's responses as rows at the rank that owns the engine; all ranks together."""
    samples = []
    for i, (prompt, generation) in enumerate(zip(prompts, generations, strict=False)):
        samples.append(response_sample(i, engine_number, prompt.tokens, generation))
    batch = exchange.number(sample_rows(samples))
    # Pads the fields, also on ranks without an engine, to the longest response of all ranks.
    return exchange.move(batch, batch.owners, list(batch.rows.fields))


@dataclass
class InferenceEngines:
    """The engines of a run as its ranks see them. All ranks call together.

    Attributes:
        restarts: restarts engines, and has this rank's `own`.
        weight_sync: the actor's weights to the engines.
        sleeps: this rank owns an engine that gives its memory up while the models on its GPUs are trained.
        asleep: the engines that sleep do so now.
        sent: stats of the last sync.
    """

    exchange: Exchange
    restarts: EngineRestarts
    weight_sync: WeightSync
    probe: Probe
    sleeps: bool
    started: StartedEngines = StartedEngines()
    asleep: bool = False
    sent: SyncStats = SyncStats()

    @property
    def client(self) -> EngineClient | None:
        """Client of the engine that this rank owns."""
        return self.restarts.own.client

    def sync(self, *, changed: bool = True) -> dict[str, float]:
        """Wake the engines with the actor's weights.

        Args:
            changed: the actor may have been trained since the last call.
        Returns:
            `sync/{bytes,seconds,gib_per_second}`, by the slowest rank's clock; and the probe's metrics.
        """
        self.wake(changed=changed)
        num_bytes, seconds = self.sent.bytes, max(self.exchange.share(self.sent.seconds))
        metrics = {"sync/bytes": num_bytes, "sync/seconds": seconds}
        return metrics | {"sync/gib_per_second": num_bytes / 2**30 / seconds} | self.probe()

    def first_sync(self, *, verify: bool, as_loaded: bool) -> None:
        """Sync for the first time, and prove that all of the engines' weights are the actor's.

        Args:
            verify: give the proof, also for engines that are restarted meanwhile.
            as_loaded: see `verified_sync`.
        """
        self._wake(partial(self._prove, as_loaded) if verify else self._send)
        while self._restart_failed():
            if verify:
                self._prove(as_loaded)
        self._note_awake()
        self.probe()

    def check_rollouts(self, difference: float) -> dict[str, int]:
        """Check that the engines' log-probs of the rollouts are the actor's; see `check_log_probs`."""
        warnings = check_log_probs("the rollouts", difference, self.probe.config, self.restarts.warn)
        return {"rollout/log_prob_diff/warnings": warnings}

    def sleep(self) -> None:
        """Free the engines' GPU memory for the trainer; on return it is free on every rank's GPU."""
        if self.asleep:
            return
        self.asleep = True
        put_to_sleep(self.restarts.own, self.exchange, sleeps=self.sleeps)
        self.started.footprint.wait_asleep()

    def end(self) -> None:
        """End the engines that this run has started, even those that hang."""
        self.asleep = True
        self.restarts.own.stop()
        self.exchange.share(None)

    def wake(self, *, changed: bool = False) -> None:
        """Give the engines their GPU memory and the weights, and restart those that have failed.

        The memory of weights comes first, the rest after the sync has freed its buffers, for a lower peak.

        Args:
            changed: see `sync`.
        Raises:
            EngineError: an engine has failed too often.
        """
        self._wake(partial(self._send, changed=changed))
        self._restart_all_failed()
        self._note_awake()

    def give_weights(self, make_sync: Callable[[], WeightSync]) -> None:
        """Send everything to all engines, which are awake, through a new weight sync: some have been restarted."""
        for sender in self.weight_sync.senders:
            sender.abort()
        self.weight_sync = make_sync()
        platform.empty_cache()
        self.exchange.share(None)
        self._send()
        self._restart_all_failed()
        self.probe()

    def _wake(self, give: Callable[[], object]) -> None:
        """Wake the engines that sleep; all get their weights before the rest of their memory wakes."""
        self._wake_memory(WEIGHTS)
        if not any(self.exchange.share(self._has_failed())):
            give()
        self._wake_memory(WORKING_MEMORY)

    def _wake_memory(self, memory: Sequence[str]) -> None:
        platform.empty_cache()  # an engine cannot use what the allocators of the ranks on its GPUs keep
        self.exchange.share(None)
        if self.client is not None and self.sleeps and self.asleep:
            with deferring_faults(self.client):
                self.client.wake(memory)

    def _note_awake(self) -> None:
        self.asleep = False
        self.started.footprint.note_awake()

    def _prove(self, as_loaded: bool) -> None:
        self.weight_sync.forget()  # the proof corrupts frozen weights as well
        barrier = partial(self.exchange.share, None)
        with deferring_faults(self.client):
            verified_sync(
                self.weight_sync, self.client, barrier=barrier, as_loaded=as_loaded, loaded=self.started.loaded
            )

    def _send(self, *, changed: bool = True) -> None:
        with deferring_faults(self.client):
            self.sent = self.weight_sync(changed=changed)

    def _has_failed(self) -> bool:
        """Return whether this rank's engine has failed, in a request or between requests."""
        if self.client is None:
            return False
        with deferring_faults(self.client):
            self.client.check_health()
        return self.client.has_failed

    def _restart_all_failed(self) -> None:
        """Restart the engines that have failed, and those that fail while they get the weights."""
        while self._restart_failed():
            pass

    def _restart_failed(self) -> bool:
        return self.restarts.restart_failed(None if self.client is None else self.client.take_fault())


class NoEngines:
    """Null object with the methods of InferenceEngines, for a run that replays a record."""

    def sync(self, *, changed: bool = True) -> dict[str, float]:
        """Do nothing."""
        return {}

    def first_sync(self, *, verify: bool, as_loaded: bool) -> None:
        """Do nothing."""

    def check_rollouts(self, difference: float) -> dict[str, int]:
        """Do nothing: the recorded log-probs may be another policy's."""
        return {}

    def sleep(self) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""

    def wake(self, *, changed: bool = False) -> None:
        """Do nothing."""


def start_engines(plan: RunPlan, own: EngineHandle, exchange: Exchange, *, as_loaded: bool) -> StartedEngines:
    """Wait until all engines serve, then put those that share GPUs with models to sleep. All ranks together.

    Models are built afterwards, because an engine sizes its KV cache by the free memory.

    Args:
        own: this rank's engine, which has been started.
        as_loaded: take the checksums of the loaded weights, which an engine that sleeps loses.
    """
    route, client = plan.route, own.wait_ready()
    sleeps = own.number is not None and engine_sleeps(route, own.number)
    loaded, held_bytes = list[Mapping[str, str]](), 0.0
    if client is not None:
        with deferring_faults(client):
            loaded = client.weight_checksums() if as_loaded else []
            held_bytes = client.held_bytes() if sleeps else 0.0
    held_bytes_per_rank = exchange.share(held_bytes)
    on_this_gpu = [engine.owner for engine in route.engines if exchange.rank in engine.ranks]
    footprint = Footprint(sum(held_bytes_per_rank[owner] for owner in on_this_gpu))
    footprint.note_awake()
    exchange.share(None)  # every rank has measured the engines that are awake
    put_to_sleep(own, exchange, sleeps=sleeps)
    footprint.wait_asleep()
    return StartedEngines(loaded, footprint)


def put_to_sleep(own: EngineHandle, exchange: Exchange, *, sleeps: bool) -> None:
    """Have engines free their GPU memory; all ranks together.

    An engine that fails here is ended, and restarted when the engines wake.

    Args:
        sleeps: this rank's engine is one that sleeps.
    """
    has_failed = False
    if own.client is not None and sleeps:
        with deferring_faults(own.client):
            own.client.sleep()
        has_failed = own.client.has_failed
    failed = set(exchange.share(own.number if has_failed else None)) - {None}
    if failed:  # their processes, on all of their nodes, may still hold memory
        stop_engines(own, failed)
        exchange.share(None)


def connect(
    plan: RunPlan,
    started: StartedEngines,
    restarts: EngineRestarts,
    models: Models,
    probe: Probe,
    phase: Phases,
) -> InferenceEngines:
    """Build the engines' weight sync, once the models are there. All ranks together."""
    exchange, own = models.actor.exchange, restarts.own
    route = plan.route
    sleeps = own.number is not None and engine_sleeps(route, own.number)
    make_sync = partial(build_sync, plan.config, route, models.architecture, models.actor.engine, own.client, exchange)
    engines = InferenceEngines(exchange, restarts, make_sync(), probe, sleeps, started, asleep=True)

    def give_weights() -> None:
        with phase("sync"):
            engines.give_weights(make_sync)

    restarts.give_weights = give_weights
    return engines

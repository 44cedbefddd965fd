"""Engines and weight sync together: engines sleep, wake, take the actor's weights, and are probed afterwards."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

from megappo.architecture.architecture import Architecture
from megappo.batch.exchange import Batch, Exchange
from megappo.data.prompts import Prompt, PromptDataset
from megappo.engines.client import WEIGHTS, WORKING_MEMORY, EngineClient, deferring_faults, taking_weights
from megappo.engines.generations import EngineFault, Generation, WeightVersion
from megappo.engines.handle import EngineHandle, Footprint
from megappo.engines.restarts import stop_engines
from megappo.placement.run_plan import RunPlan
from megappo.rollouts.datasets import Datasets
from megappo.rollouts.rollouts import Rollouts
from megappo.rollouts.sample_rows import response_sample, sample_rows
from megappo.runtime import platform
from megappo.runtime.status import STATUS
from megappo.sync.build import build_sync, engine_sleeps
from megappo.sync.proof import check_log_probs, check_probe, verified_sync
from megappo.sync.sync import SyncStats
from megappo.trainer.component_batch import Component
from megappo.trainer.models import Models, Phases

NUM_PROBE_PROMPTS = 4  # each engine continues all of them
PROBE_CHOICE = 64
"""First prompts of the data, of which a probe takes the ones with images first."""
PROBE_TOKENS = 4


class Probe:
    """A few tokens that every engine writes after a weight sync, compared with the actor's log-probs of them.

    Args:
        prompts: the probe uses the first of these, the same every time.
    """

    def __init__(self, rollouts: Rollouts, prompts: PromptDataset, actor: Component):
        self.config = rollouts.config
        self.restarts = rollouts.restarts
        self.actor = actor
        length = min(PROBE_TOKENS, self.config.rollout.max_response_length)
        self.params = replace(rollouts.training, max_response_length=length)
        # Every data-parallel shard of the actor needs a row.
        count = max(NUM_PROBE_PROMPTS, -(-actor.layout.data // rollouts.num_engines))
        self.images = rollouts.images
        chosen = sorted(prompts.at(prompts.kept[: max(count, PROBE_CHOICE)]), key=lambda prompt: not prompt.images)
        self.prompts = [chosen[i % len(chosen)] for i in range(count)]
        self._calls = 0

    def __call__(self) -> dict[str, float]:
        """Return `sync/log_prob_diff/{mean,max,warnings}` every rollout.sync.probe_interval syncs; all ranks together.

        Raises:
            EngineError: the difference is too large, see `check_probe`; or an engine has failed too often.
        """
        self._calls += 1
        interval = self.config.rollout.sync.probe_interval
        if interval == 0 or (self._calls - 1) % interval:
            return {}
        number = self.restarts.engine_handle.number
        exchange = self.actor.exchange
        generations, fault = self._generate()
        while self.restarts.restart_failed(fault):
            generations, fault = self._generate()
        batch = probe_batch(generations, self.prompts, number, exchange, self.params.replayed)
        shard = self.actor.scatter(batch)
        batch = shard.gather(shard.forward(), {"log_probs": "old_log_probs"}, batch)
        return check_probe(batch.rows, number, self.config, exchange, self.restarts.warn)

    def _generate(self) -> tuple[list[Generation], EngineFault | None]:
        """Return the responses of this rank's engine, if it owns one, or the engine's fault."""
        client = self.restarts.engine_handle.client
        if client is None:
            return [], None
        try:
            images = [] if self.images is None else list(map(self.images.sent, self.prompts))
            return client.generate([prompt.tokens for prompt in self.prompts], self.params, images), None
        except EngineFault as fault:
            return [], fault


def probe_batch(
    generations: Sequence[Generation],
    prompts: Sequence[Prompt],
    engine_number: int | None,
    exchange: Exchange,
    replayed: Architecture | None = None,
) -> Batch:
    """Return each engine's responses as rows at the rank that owns the engine; all ranks together."""
    samples = []
    for i, (prompt, generation) in enumerate(zip(prompts, generations, strict=False)):
        samples.append(response_sample(i, engine_number, prompt.tokens, generation))
    batch = exchange.number(sample_rows(samples, replayed=replayed, prompts=prompts))
    # Pads the fields, also on ranks without an engine, to the longest response of all ranks.
    return exchange.move(batch, batch.owners, list(batch.rows.fields))


class InferenceEngines:
    """The engines of a run as its ranks see them. All ranks call every method together.

    They start before the models are built, because an engine sizes its KV cache by the free memory, and are connected
    with the actor afterwards.

    Args:
        engine_handle: this rank's engine, which has been started.
        is_new: the actor starts with its initial weights.
    Attributes:
        as_loaded: the first sync leaves the engines the weights that they have loaded: a new actor's, or the weights
            beside adapters. Servers that were already running may hold the weights of an earlier run.
        sleeps: this rank owns an engine that frees its memory while the models on its GPUs are trained.
        asleep: the engines that can sleep are asleep.
        loaded: checksums of the weights that this rank's engine has loaded; see `verified_sync`.
        footprint: memory of the engine on this rank's GPU.
        sent: stats of the last sync.
        version: training steps that the engines' weights have been trained for.
        hold: context manager that a run which samples ahead of training enters on every rank while the engines take
            weights.
    """

    def __init__(
        self,
        plan: RunPlan,
        engine_handle: EngineHandle,
        exchange: Exchange,
        *,
        is_new: bool,
    ):
        self.plan = plan
        self.engine_handle = engine_handle
        self.exchange = exchange
        keeps_loaded = is_new or plan.config.sent_lora is not None
        self.as_loaded = keeps_loaded and not (plan.config.model.dist_checkpointing_path or plan.config.rollout.engines)
        self.sleeps = engine_handle.number is not None and engine_sleeps(plan.route, engine_handle.number)
        self.asleep = False
        self.loaded = ()
        self.footprint = Footprint(0)
        self.sent = SyncStats()
        self.version = 0
        self.hold: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def client(self) -> EngineClient | None:
        """Client of the engine that this rank owns."""
        return self.engine_handle.client

    def start(self) -> None:
        """Wait until all engines serve, then put engines that share GPUs with models to sleep."""
        with STATUS.step("engine start"):
            client = self.engine_handle.wait_ready()
            held_bytes = 0.0
        if client is not None:
            with deferring_faults(client):
                if self.as_loaded and self.plan.config.rollout.sync.verify:
                    self.loaded = client.weight_checksums()  # now: an engine that sleeps loses its weights
                held_bytes = client.held_bytes() if self.sleeps else 0.0
        held_bytes_per_rank = self.exchange.all_gather(held_bytes)
        on_this_gpu = [engine.owner for engine in self.plan.route.engines if self.exchange.rank in engine.ranks]
        self.footprint = Footprint(sum(held_bytes_per_rank[owner] for owner in on_this_gpu))
        self.footprint.note_awake()
        self.exchange.all_gather(None)  # every rank has measured the engines that are awake
        self.sleep()

    def connect(
        self,
        models: Models,
        rollouts: Rollouts,
        datasets: Datasets,
        phase: Phases,
    ) -> None:
        """Build the weight sync and the probe, once the models are there."""
        self.phase = phase
        self.restarts = rollouts.restarts
        actor = models.actor
        prompts = datasets.train if datasets.train is not None else next(iter(datasets.val.values()))
        self.probe = Probe(rollouts, prompts, actor)
        self.make_sync = partial(
            build_sync,
            config=self.plan.config,
            route=self.plan.route,
            architecture=models.architecture,
            actor=actor.engine,
            client=self.client,
            exchange=self.exchange,
        )
        self.weight_sync = self.make_sync()
        self.restarts.give_weights = self.give_weights

    def sync(self, step: int, *, changed: bool = True) -> dict[str, float]:
        """Wake the engines with the actor's weights after a step.

        Args:
            changed: the actor may have been trained since the last call.
        Returns:
            `sync/{bytes,seconds,gib_per_second}`, by the slowest rank's clock; and the probe's metrics.
        """
        self.version = step
        self.wake(changed=changed)
        num_bytes = self.sent.bytes
        seconds = max(self.exchange.all_gather(self.sent.seconds))
        metrics = {"sync/bytes": num_bytes, "sync/seconds": seconds}
        return metrics | {"sync/gib_per_second": num_bytes / 2**30 / seconds} | self.probe()

    def first_sync(self, step: int) -> None:
        """Sync for the first time, after this step, and prove that all of the engines' weights are the actor's."""
        self.version = step
        with STATUS.step("first weight sync"):
            self._wake(self._prove if self.plan.config.rollout.sync.verify else self._send)
            self.probe()

    def check_rollouts(self, metrics: Mapping[str, float]) -> dict[str, int]:
        """Check that the engines' log-probs of the rollouts are the actor's, if a step's metrics compare them; see
        `check_log_probs`."""
        difference = metrics.get("rollout/log_prob_diff/mean")
        if difference is None:
            return {}
        warnings = check_log_probs("the rollouts", difference, self.probe.config, self.restarts.warn)
        return {"rollout/log_prob_diff/warnings": warnings}

    def sleep(self) -> None:
        """Free the engines' GPU memory for the trainer; on return it is free on every rank's GPU.

        An engine that fails here is ended, and restarted when the engines wake.
        """
        if self.asleep:
            return
        self.asleep = True
        has_failed = False
        if self.client is not None and self.sleeps:
            with deferring_faults(self.client):
                self.client.sleep()
            has_failed = self.client.has_failed
        failed = set(self.exchange.all_gather(self.engine_handle.number if has_failed else None)) - {None}
        if failed:  # their processes, on all of their nodes, may still hold memory
            stop_engines(self.engine_handle, failed)
            self.exchange.all_gather(None)
        self.footprint.wait_asleep()

    def stop(self) -> None:
        """Stop the engines that this run has started, even if they hang."""
        self.asleep = True
        self.engine_handle.stop()
        self.exchange.all_gather(None)

    def wake(self, *, changed: bool = False) -> None:
        """Give the engines their GPU memory and the weights, and restart failed engines.

        Args:
            changed: see `sync`.
        Raises:
            EngineError: an engine has failed too often.
        """
        self._wake(partial(self._send, changed=changed))

    def give_weights(self) -> None:
        """Send everything to all engines, which are awake, through a new weight sync: some have been restarted."""
        with self.phase("sync"):
            for sender in self.weight_sync.senders:
                sender.abort()
            self.weight_sync = self.make_sync()
            platform.empty_cache()
            self.exchange.all_gather(None)
            self._send()
            while self._restart_failed():
                pass
            self.probe()

    def _wake(self, give: Callable[[], object]) -> None:
        """Wake the sleeping engines, and restart failed engines.

        The memory of weights comes first, the rest after the sync has freed its buffers, for a lower peak.

        Args:
            give: gives the engines the weights; called again after a restart.
        """
        self._wake_memory(WEIGHTS)
        if not any(self.exchange.all_gather(self._has_failed())):
            give()
        self._wake_memory(WORKING_MEMORY)
        while self._restart_failed():
            give()
        self.asleep = False
        self.footprint.note_awake()

    def _wake_memory(self, memory: Sequence[str]) -> None:
        platform.empty_cache()  # an engine cannot use what the allocators of the ranks on its GPUs keep
        self.exchange.all_gather(None)
        if self.client is not None and self.sleeps and self.asleep:
            with deferring_faults(self.client):
                self.client.wake(memory)

    def _prove(self) -> None:
        self.weight_sync.forget()  # the proof corrupts frozen weights as well
        barrier = partial(self.exchange.all_gather, None)
        with deferring_faults(self.client), self._taking_weights():
            verified_sync(
                self.weight_sync,
                self.client,
                barrier=barrier,
                as_loaded=self.as_loaded,
                loaded=self.loaded,
                overwrites=self.plan.config.sent_lora is None,
            )

    def _send(self, *, changed: bool = True) -> None:
        with deferring_faults(self.client), self._taking_weights(changed=changed):
            self.sent = self.weight_sync(changed=changed)

    @contextmanager
    def _taking_weights(self, *, changed: bool = True) -> Iterator[None]:
        """Prepare the engines for weights, if any are to be sent: engines that sample ahead of training pause."""
        rollout = self.plan.config.rollout
        if not rollout.runs_ahead:
            yield
            return
        version = WeightVersion(self.version, keeps_cache=not rollout.recompute_cache)
        if self.weight_sync.pending(changed=changed):
            with self.hold(), taking_weights(self.client, version):
                yield
        else:
            yield
            if self.client is not None:
                self.client.version = version
                self.client.name_weights(str(version.number))

    def _has_failed(self) -> bool:
        """Return whether this rank's engine has failed, in a request or between requests."""
        if self.client is None:
            return False
        with deferring_faults(self.client):
            self.client.check_health()
        return self.client.has_failed

    def _restart_failed(self) -> bool:
        return self.restarts.restart_failed(None if self.client is None else self.client.take_fault())


class NoEngines:
    """Null object with the methods of InferenceEngines, for a run without engines, or without an actor to sync."""

    def _do_nothing(self, *args: object, **settings: object) -> dict[str, float]:
        """Do nothing; return no metrics."""
        return {}

    connect = first_sync = sync = check_rollouts = sleep = wake = stop = _do_nothing

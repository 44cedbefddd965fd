"""What a run is made of on this rank, and what is done with it between the phases of a step."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from megappo import platform
from megappo.architecture.architecture import Architecture
from megappo.batch.exchange import Exchange
from megappo.checkpoint.store import CheckpointStore
from megappo.config.schema import Config
from megappo.data.prompts import PromptDataset
from megappo.observe.files import HF_ACTOR
from megappo.observe.metrics import reduce_ranks
from megappo.observe.observer import NullObserver, Observer
from megappo.observe.timers import Timers
from megappo.placement.components import components_of
from megappo.ppo.kl import KLController
from megappo.ppo.reward_shaping import RunningMoments
from megappo.rollout.client import EngineClient
from megappo.sync.proof import verified_sync
from megappo.sync.sync import WeightSync
from megappo.trainer.models import Models
from megappo.trainer.probe import Probe
from megappo.trainer.rollouts import Rollouts
from megappo.weights.hf_folder import write_hf_folder


class Stateful(Protocol):
    """What a checkpoint holds as plain numbers."""

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, float]) -> None: ...


def models_of(config: Config) -> str:
    """What a run's checkpoints hold, in words: a run with other models cannot go on from them."""
    trained = {name: spec for name, spec in components_of(config).items() if spec.training}
    words = [
        f"{'an' if name[0] in 'aeiou' else 'a'} {name}{' with a value head' * (spec.head == 'policy_value')}"
        for name, spec in trained.items()
    ]
    return " and ".join(words) if len(words) > 1 or "with" in words[0] else f"{words[0]} alone"


@dataclass
class Run:
    """A run's parts. The same on every rank, but for null objects where a part is absent.

    Attributes:
        architecture: the language model's.
        reward_moments: of all scores so far, for reward.normalize running.
        client: of the engine this rank owns; None on the others.
        val_prompts: dataset name -> its prompts.
        sleeps: this rank owns an engine that gives its memory up while the models on its GPUs are trained.
        weight_sync: the way of the actor's weights to the engines.
        probe: asks engines and actor about the same tokens.
        start_step: steps done before this process started.
    """

    config: Config
    architecture: Architecture
    exchange: Exchange
    models: Models
    client: EngineClient | None
    sleeps: bool
    weight_sync: WeightSync
    probe: Probe
    rollouts: Rollouts
    train_prompts: PromptDataset
    val_prompts: dict[str, PromptDataset]
    kl: KLController
    reward_moments: RunningMoments
    store: CheckpointStore
    observer: Observer | NullObserver
    timers: Timers
    start_step: int = field(default=0)

    def sync_weights(self, *, changed: bool = True) -> dict[str, float]:
        """Reshard the actor's weights into the engines; all ranks together.

        Args:
            changed: the actor may have been trained since the last call.
        Returns:
            `sync/{bytes,seconds,gib_per_second}`, by the slowest rank's clock; and, if it was the probe's turn,
            `sync/log_prob_diff/{mean,max}`.
        """
        stats = self.weight_sync(changed=changed)
        seconds = max(self.exchange.share(stats.seconds))
        metrics = {"sync/bytes": stats.bytes, "sync/seconds": seconds}
        return metrics | {"sync/gib_per_second": stats.bytes / 2**30 / seconds} | self.probe()

    def first_sync(self) -> None:
        """The first one, with the proof that all of the engines' weights are the actor's."""
        if self.config.rollout.sync.verify:
            as_loaded = self.start_step == 0
            verified_sync(self.weight_sync, self.client, barrier=lambda: self.exchange.share(None), as_loaded=as_loaded)
        else:
            self.weight_sync()
        self.probe()

    def engine_sleep(self) -> None:
        """Free the engine's GPU memory for the trainer."""
        if self.client is not None and self.sleeps:
            self.client.sleep()

    def engine_wake(self) -> None:
        """Give the engines their GPU memory back; their weights must be synced before they are used."""
        platform.empty_cache()  # what the allocator of any rank on the engine's GPUs keeps, the engine cannot have
        self.exchange.share(None)
        if self.client is not None and self.sleeps:
            self.client.wake()

    def lap(self) -> dict[str, float]:
        """End the step: this rank's `timing_s/*`, and `memory/*` over all ranks."""
        timings, memory = self.timers.lap()
        return timings | reduce_ranks(self.exchange.share(memory))

    def save(self, step: int) -> None:
        """Write the checkpoint of a finished step; all ranks together."""
        state = {"step": step, "kl": self.kl.state_dict(), "reward_moments": self.reward_moments.state_dict()}
        path = self.store.save(step, self.models.trained, state | {"models": models_of(self.config)})
        self.observer.message(f"checkpoint {path}")

    def finish(self) -> None:
        """Export the actor and report; all ranks together."""
        if self.config.trainer.export_hf:
            target = Path(self.config.trainer.output_dir) / HF_ACTOR
            actor = self.models.actor.engine
            if actor is not None:
                write_hf_folder(actor.chunks, self.architecture, actor.groups, self.config.model.path, target)
        self.exchange.share(None)
        self.observer.finish()

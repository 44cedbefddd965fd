"""The inference engine that a rank owns, if it is the first rank of an engine's group."""

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megappo import platform
from megappo.config.errors import ConfigError
from megappo.config.schema import Config
from megappo.placement.layout import Layout
from megappo.placement.ranks import format_ranks
from megappo.rewards.pool import RewardPool, load_configured
from megappo.rollout.client import EngineClient
from megappo.rollout.external import ExternalEngine
from megappo.rollout.inference_engine import Engine


@dataclass(frozen=True)
class OwnEngine:
    """An engine and what goes with it; without them where the rank owns none.

    Attributes:
        number: of the engine, among all.
        rewards: workers of the reward function, which score what the engine writes.
    """

    number: int | None = None
    engine: Engine | ExternalEngine | None = None
    rewards: RewardPool | None = None

    def wait_ready(self) -> EngineClient | None:
        """Its client, once it is up."""
        return self.engine.wait_ready() if self.engine is not None else None

    def restart(self) -> None:
        """Start it anew, whatever has become of it; its client serves on."""
        self.engine.restart()

    def stop(self) -> None:
        """End it, whatever has become of it, if it was started by this run."""
        if isinstance(self.engine, Engine):
            self.engine.stop()


def start_engine(config: Config, layout: Layout, cleanup: ExitStack) -> OwnEngine:
    """Start this rank's SGLang engine and reward workers, if it is to own any; does not wait for them. An engine of
    rollout.engines runs already."""
    rank = dist.get_rank()
    number = layout.shard_of(rank)
    if number is None or layout.output_rank(number) != rank:
        return OwnEngine()
    engine: Engine | ExternalEngine
    if config.rollout.engines:
        engine = ExternalEngine(config.rollout.engines[number], config.rollout)
    else:
        engine = _engine(config, layout, number, rank)
        cleanup.callback(engine.stop)
        engine.start()
    reward = config.reward
    rewards = load_configured(reward, num_workers=reward.num_workers)
    cleanup.callback(rewards.close)
    return OwnEngine(number, engine, rewards)


def _engine(config: Config, layout: Layout, number: int, rank: int) -> Engine:
    local_world = int(os.environ["LOCAL_WORLD_SIZE"])
    node = rank // local_world
    ranks = layout.shard_ranks(number)
    if ranks[-1] // local_world != node:
        raise ConfigError(
            f"rollout.tensor_parallel: engine {number} on ranks {format_ranks(ranks)} reaches over several nodes "
            f"of {local_world} ranks: make it a divisor of {local_world}, and start placement.rollout on a multiple"
        )
    first_on_node = next(i for i in range(layout.data) if layout.output_rank(i) // local_world == node)
    return Engine(
        config.model.path,
        config.rollout,
        config.model.dtype,
        index=number - first_on_node,
        gpu_ids=platform.gpu_ids([r % local_world for r in ranks]),
        log_path=Path(config.trainer.output_dir) / "engines" / f"engine_{number}.log",
        seed=config.trainer.seed + number,
    )

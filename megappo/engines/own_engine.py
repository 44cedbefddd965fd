"""The inference engine that a rank owns, if it is the first rank of an engine's group."""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from torch.distributed import Store

from megappo.config.eval_sets import played_tasks
from megappo.config.schema import Config
from megappo.engines.client import EngineClient
from megappo.engines.external import ExternalEngine
from megappo.engines.launch import NodePart, reserve_port
from megappo.engines.process import Engine
from megappo.placement.layout import Layout
from megappo.placement.nodes import by_node
from megappo.runtime import platform
from megappo.runtime.listening import node_address
from megappo.userland.environment_workers import Workers, start_workers


@dataclass(frozen=True)
class OwnEngine:
    """An engine and what goes with it; without them where the rank owns none.

    Attributes:
        number: of the engine, among all.
        workers: which answer and score what the engine writes, of each of `played_tasks` by its name.
        part: this node's, of an engine that is on several nodes and which a rank of another owns.
        part_of: that engine's number.
    """

    number: int | None = None
    engine: Engine | ExternalEngine | None = None
    workers: Mapping[str, Workers] = field(default_factory=dict)
    part: Engine | None = None
    part_of: int | None = None

    def wait_ready(self) -> EngineClient | None:
        """Its client, once it is up; the same at each call."""
        return self._client

    @cached_property
    def _client(self) -> EngineClient | None:
        if self.part is not None:
            self.part.wait_ready()
        return self.engine.wait_ready() if self.engine is not None else None

    def restart(self) -> None:
        """Start it anew, whatever has become of it; its client serves on."""
        (self.part or self.engine).restart()

    def stop(self) -> None:
        """End it, whatever has become of it, if it was started by this run."""
        for engine in (self.part, self.engine):
            if isinstance(engine, Engine):
                engine.stop()


def start_engine(config: Config, layout: Layout, rank: int, store: Store, cleanup: ExitStack) -> OwnEngine:
    """Start this rank's SGLang engine, if it is to own one, without waiting for it, and its workers. An engine of
    rollout.engines runs already. Of one that is on several nodes, the first rank on each starts that node's part.

    Args:
        layout: the engines'.
        store: torchrun's, by which those parts meet.
    """
    number = layout.shard_of(rank)
    if number is None or rank not in _starting(layout, number):
        return OwnEngine()
    engine: Engine | ExternalEngine
    if config.rollout.engines:
        engine = ExternalEngine(config.rollout.engines[number], config.rollout)
    else:
        engine = _engine(config, layout, number, rank, lambda node: _meeting(store, number, node, cleanup))
        cleanup.callback(engine.stop)
        engine.start()
        if rank != layout.output_rank(number):
            return OwnEngine(part=engine, part_of=number)
        if number == 0:  # it takes a while, in which nothing else may be told
            print(f"{layout.data} engine(s) start, logs in {engine.log_path.parent}", flush=True)
    return OwnEngine(number, engine, start_workers(played_tasks(config), cleanup))


def _starting(layout: Layout, number: int) -> list[int]:
    """The ranks that start an engine's parts, the owner's first."""
    return [part[0] for part in by_node(layout.shard_ranks(number), _ranks_per_node())]


def _engine(config: Config, layout: Layout, number: int, rank: int, meeting: Callable[[int], str]) -> Engine:
    per_node = _ranks_per_node()
    starting = _starting(layout, number)
    node, several = starting.index(rank), len(starting) > 1
    before = [i for i in range(number) if any(other // per_node == rank // per_node for other in _starting(layout, i))]
    ranks = by_node(layout.shard_ranks(number), per_node)[node]
    return Engine(
        config.model.path,
        config.rollout,
        config.model.dtype,
        index=len(before),
        gpu_ids=platform.gpu_ids([one % per_node for one in ranks]),
        log_path=Path(config.trainer.output_dir, "engines", f"engine_{number}{f'_node_{node}' if node else ''}.log"),
        seed=(config.trainer.seed + number) % 2**32,  # numpy takes no larger one
        part=NodePart(node, len(starting), meeting(node)) if several else None,
        num_threads=platform.engine_threads(sum(one // per_node == rank // per_node for one in layout.ranks)),
        lora=config.actor.lora,
    )


def _meeting(store: Store, number: int, node: int, cleanup: ExitStack) -> str:
    """Where an engine's parts find each other, host:port: the owner keeps a free port of its node for it."""
    key = f"engine/{number}"
    if node == 0:
        guard = cleanup.enter_context(reserve_port(0, node_address()))
        host, port = guard.getsockname()
        store.set(key, f"{host}:{port}")
    return store.get(key).decode()


def _ranks_per_node() -> int:
    return int(os.environ["LOCAL_WORLD_SIZE"])

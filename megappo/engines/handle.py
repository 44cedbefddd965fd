"""Start the inference engine that a rank owns, or its node's part of one that another rank owns."""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed import Store

from megappo.config.eval_sets import played_tasks
from megappo.config.schema import Config
from megappo.engines.client import EngineClient
from megappo.engines.external import ExternalEngine
from megappo.engines.launch import reserve_port
from megappo.engines.process import Engine
from megappo.placement.layout import Layout
from megappo.placement.ranks import by_node
from megappo.placement.run_plan import RunPlan
from megappo.runtime import platform
from megappo.runtime.listening import node_address
from megappo.userland.task_workers import TaskWorkers, start_workers


@dataclass
class EngineHandle:
    """A rank's engine, or its part of one; a rank without either has an empty handle.

    Attributes:
        number: of the engine that this rank owns, among all.
        engine: the process, or the server of somebody else.
        workers: for each of `played_tasks`, the processes that answer and score what the engine writes.
        part_of: number of the engine of which this rank runs a part for another rank, its owner.
        client: of the engine that this rank owns, once `wait_ready` has returned.
    """

    number: int | None = None
    engine: Engine | ExternalEngine | None = None
    workers: Mapping[str, TaskWorkers] = field(default_factory=dict)
    part_of: int | None = None
    client: EngineClient | None = None

    def wait_ready(self) -> EngineClient | None:
        """Wait until the engine serves; return its client on the rank that owns it."""
        if self.engine is not None and self.client is None:
            client = self.engine.wait_ready()
            self.client = client if self.part_of is None else None
        return self.client

    def restart(self) -> None:
        """Restart the engine, even if it hangs; its client stays valid."""
        self.engine.restart()

    def stop(self) -> None:
        """End the engine if this run has started it, even if it hangs."""
        if self.engine is not None:
            self.engine.stop()


def start_engine(plan: RunPlan, rank: int, store: Store, cleanup: ExitStack) -> EngineHandle:
    """Start this rank's SGLang engine, if it is to own one, and its workers, without waiting for the engine.

    Engines of rollout.engines run already. Of an engine on several nodes, the first rank on each node starts a part.

    Args:
        store: torchrun's, through which those parts find each other.
    """
    config, layout = plan.config, plan.layouts["rollout"]
    number = layout.shard_of(rank)
    if number is None or rank not in _starting_ranks(layout, number):
        return EngineHandle()
    if config.rollout.engines:
        external = ExternalEngine(config.rollout.engines[number], config.rollout)
        return EngineHandle(number, external, start_workers(played_tasks(config), cleanup))
    engine = _engine(config, layout, number, rank, lambda node: _meeting_address(store, number, node, cleanup))
    cleanup.callback(engine.stop)
    engine.start()
    if rank != layout.output_rank(number):
        return EngineHandle(engine=engine, part_of=number)
    if number == 0:  # the first line of a run that may print nothing else for a while
        print(f"{layout.data} engine(s) start, logs in {engine.log_path.parent}", flush=True)
    return EngineHandle(number, engine, start_workers(played_tasks(config), cleanup))


def _starting_ranks(layout: Layout, number: int) -> list[int]:
    """Ranks that start an engine's parts, the owner first."""
    return [ranks[0] for ranks in by_node(layout.shard_ranks(number), _ranks_per_node())]


def _engine(config: Config, layout: Layout, number: int, rank: int, meeting: Callable[[int], str]) -> Engine:
    per_node = _ranks_per_node()
    here = rank // per_node
    starting = _starting_ranks(layout, number)
    node = starting.index(rank)
    suffix = f"_node_{node}" if node else ""
    engines_before = [i for i in range(number) if here in {one // per_node for one in _starting_ranks(layout, i)}]
    ranks_here = by_node(layout.shard_ranks(number), per_node)[node]
    node_arguments = {}
    if len(starting) > 1:
        node_arguments = {"nnodes": len(starting), "node_rank": node, "dist_init_addr": meeting(node)}
    return Engine(
        config.model.path,
        config.rollout,
        config.model.dtype,
        index=len(engines_before),
        gpu_ids=platform.gpu_ids([one % per_node for one in ranks_here]),
        log_path=Path(config.trainer.output_dir, "engines", f"engine_{number}{suffix}.log"),
        seed=(config.trainer.seed + number) % 2**32,  # numpy takes no larger one
        node_arguments=node_arguments,
        num_threads=platform.engine_threads(sum(one // per_node == here for one in layout.ranks)),
        lora=config.actor.lora,
    )


def _meeting_address(store: Store, number: int, node: int, cleanup: ExitStack) -> str:
    """Return host:port where an engine's parts find each other: the owner reserves a port of its node for it."""
    key = f"engine/{number}"
    if node == 0:
        guard = cleanup.enter_context(reserve_port(0, node_address()))
        host, port = guard.getsockname()
        store.set(key, f"{host}:{port}")
    return store.get(key).decode()


def _ranks_per_node() -> int:
    return int(os.environ["LOCAL_WORLD_SIZE"])

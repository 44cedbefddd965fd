"""A rank's inference engine: start it, or its node's part of one that another rank owns; wait until it sleeps."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed import Store

from megappo.config.eval_sets import played_tasks
from megappo.config.schema import Config
from megappo.engines.client import EngineClient
from megappo.engines.launch import reserve_port
from megappo.engines.process import Engine, ExternalEngine
from megappo.placement.layout import Layout, by_node
from megappo.placement.run_plan import RunPlan
from megappo.runtime import platform
from megappo.runtime.heartbeat import heartbeat
from megappo.runtime.listening import node_address
from megappo.userland.environments import TaskWorkers, start_workers
from megappo.userland.user_code import JsonObject

GIB = 2**30
RETURNED = 0.8
"""Share of the bytes that an engine reports for weights and KV cache that must become free: the report is not exact."""
ASLEEP_SECONDS = 30.0
ASLEEP_POLL_SECONDS = 0.02


@dataclass
class EngineHandle:
    """A rank's engine, or its part of one; a rank without either has an empty handle.

    Attributes:
        number: number of the engine that this rank owns, among all engines.
        engine: the process, or the server of somebody else.
        workers: for each of `played_tasks`, the processes that answer and score what the engine writes.
        part_of: number of the engine of which this rank runs a part for another rank, its owner.
        client: client of the engine that this rank owns, once `wait_ready` has returned.
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

    Engines of rollout.engines are already running. The first rank on each node of an engine on several nodes starts a
    part of it.

    Args:
        store: torchrun's, through which the parts find each other.
    """
    config = plan.config
    layout = plan.layouts["rollout"]
    number = layout.shard_of(rank)
    if number is None:
        return EngineHandle()
    ranks_by_node = by_node(layout.shard_ranks(number), _ranks_per_node())
    starting = [ranks[0] for ranks in ranks_by_node]
    if rank not in starting:
        return EngineHandle()
    if config.rollout.engines:
        external = ExternalEngine(config.rollout.engines[number], config.rollout)
        return EngineHandle(number, external, start_workers(played_tasks(config), cleanup))
    node = starting.index(rank)
    arguments: JsonObject = {}
    if len(starting) > 1:
        address = _meeting_address(store, number, node, cleanup)
        arguments = {"nnodes": len(starting), "node_rank": node, "dist_init_addr": address}
    if config.data.max_image_pixels is not None:
        arguments["mm_process_config"] = {"image": {"max_pixels": config.data.max_image_pixels}}
    engine = _engine(config, layout, number, ranks_by_node[node], node, arguments)
    cleanup.callback(engine.stop)
    engine.start()
    if node > 0:
        return EngineHandle(engine=engine, part_of=number)
    return EngineHandle(number, engine, start_workers(played_tasks(config), cleanup))


def _engine(
    config: Config,
    layout: Layout,
    number: int,
    ranks: Sequence[int],
    node: int,
    node_arguments: JsonObject,
) -> Engine:
    """Return the part of an engine on its node number `node`, for these ranks."""
    per_node = _ranks_per_node()
    here = ranks[0] // per_node
    ranks_here = [rank for rank in layout.ranks if rank // per_node == here]
    earlier = {layout.shard_of(rank) for rank in ranks_here} & set(range(number))
    suffix = f"_node_{node}" if node else ""
    return Engine(
        config.model.path,
        config.rollout,
        config.model.dtype,
        index=len(earlier),
        gpu_ids=platform.gpu_ids([rank % per_node for rank in ranks]),
        log_path=Path(config.trainer.output_dir, "engines", f"engine_{number}{suffix}.log"),
        seed=(config.trainer.seed + number) % 2**32,  # numpy takes no larger one
        node_arguments=node_arguments,
        num_threads=platform.engine_threads(len(ranks_here)),
        lora=config.sent_lora,
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


class Footprint:
    """Memory of this rank's GPU that other processes hold.

    SGLang 0.5.23 answers `release_memory_occupation` as soon as the first of an engine's ranks has released its own.

    Args:
        held_bytes: the part of it that an engine frees when it sleeps; 0 without such an engine.
    """

    def __init__(self, held_bytes: float):
        self._held_bytes = held_bytes
        self._awake = 0

    def note_awake(self) -> None:
        """Note the memory in use while the engine is awake."""
        self._awake = platform.bytes_of_others() if self._held_bytes else 0

    def wait_asleep(self) -> None:
        """Wait until the sleeping engine has freed its memory; warn if it has not within the limit."""
        if not self._held_bytes:
            return
        expected = self._awake - RETURNED * self._held_bytes
        deadline = time.monotonic() + ASLEEP_SECONDS
        while (held := platform.bytes_of_others()) > expected:
            if time.monotonic() > deadline:
                print(  # this rank may have no observer
                    f"WARNING: {platform.device()}: other processes hold {held / GIB:.1f} GiB {ASLEEP_SECONDS:g} s "
                    f"after the engine went to sleep, expected at most {expected / GIB:.1f}; the models may run out of "
                    "memory. End processes that are not of this run (nvidia-smi lists them), or lower "
                    "rollout.mem_fraction_static",
                    flush=True,
                )
                return
            heartbeat.beat()
            time.sleep(ASLEEP_POLL_SECONDS)

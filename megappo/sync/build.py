"""The engines' weights during a run: which way they take, and the proofs that they arrive."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

from megappo import platform
from megappo.architecture.architecture import Architecture
from megappo.batch.exchange import Exchange
from megappo.config.errors import ConfigError
from megappo.config.schema import Config
from megappo.listening import LOOPBACK
from megappo.models.train_engine import MegatronEngine
from megappo.placement.layout import Layout
from megappo.placement.ranks import format_ranks
from megappo.rollout.client import EngineClient, EngineError
from megappo.sync import broadcast
from megappo.sync.disk import DiskReader, DiskWriter
from megappo.sync.handover import HandOver
from megappo.sync.ipc import HandleSender
from megappo.sync.route import sending_rank, shares_gpus, transports
from megappo.sync.sync import WeightSync, wait_for
from megappo.weights.export import Export
from megappo.weights.load import folder_shapes

GPU_BUCKET_BYTES, CPU_BUCKET_BYTES = 512 * 2**20, 128 * 2**20
DISK_FOLDER = "sync"


def engine_sleeps(layouts: Mapping[str, Layout], engine: int) -> bool:
    """Whether an engine gives its memory up while the models on its GPUs are trained; its weights are then lost."""
    return platform.has_cuda() and shares_gpus(layouts, engine)


def build_weight_sync(
    config: Config,
    layouts: dict[str, Layout],
    architecture: Architecture,
    actor: MegatronEngine | None,
    client: EngineClient | None,
    exchange: Exchange,
) -> WeightSync:
    """The way of the actor's weights to the engines; all ranks together, once the engines are up.

    Args:
        architecture: the language model's.
        actor: this rank's part. client: of the engine that this rank owns.
    """
    export = Export(actor.chunks, architecture, actor.groups) if actor is not None else None
    sender = sending_rank(config, layouts)
    shared = exchange.share([tensor.spec for tensor in export.tensors] if export and exchange.rank == sender else None)
    bucket_bytes = config.rollout.sync.bucket_bytes or (GPU_BUCKET_BYTES if platform.has_cuda() else CPU_BUCKET_BYTES)
    return WeightSync(
        export.tensors if export else shared[sender],
        export,
        _hand_overs(config, layouts, architecture, client, exchange, bucket_bytes),
        folder_shapes(config.model.path, architecture),
        bucket_bytes=bucket_bytes,
        barrier=lambda: exchange.share(None),
        engines_keep=not any(engine_sleeps(layouts, engine) for engine in range(layouts["rollout"].data)),
    )


def verified_sync(
    sync: Callable[[], object], client: EngineClient | None, *, barrier: Callable[[], object], as_loaded: bool
) -> None:
    """The first sync, proven by the engines' own checksums: of weights spoiled before, none may be left.

    Args:
        client: of the engine that this rank owns. barrier: waits for all ranks.
        as_loaded: the model's weights are those that the engines loaded from the same folder, so the sync must
            restore them to the bit. Otherwise only a weight that was not set at all is found.
    Raises:
        EngineError: some of an engine's weights were not set, or not to what they were; each named.
    """
    loaded, spoiled = [], []
    if client is not None:
        loaded = client.weight_checksums()
        client.reset_weights()
        spoiled = client.weight_checksums()
    barrier()
    sync()
    if client is None:
        return
    synced = client.weight_checksums()
    for rank, (before, without, now) in enumerate(zip(loaded, spoiled, synced, strict=True)):
        unset = [name for name, checksum in now.items() if checksum == without[name]]
        changed = [name for name, checksum in now.items() if as_loaded and checksum != before[name]]
        for names, what in ((unset, "were not set by"), (changed, "differ from the folder's after")):
            if names:
                raise EngineError(
                    f"{len(names)} of the {len(now)} weights of the engine's rank {rank} {what} the first weight sync: "
                    f"{', '.join(names[:5])}; the engine would not run the actor's model. If SGLang itself changes "
                    "these weights after loading (quantization, say), set rollout.sync.verify to false"
                )


def _hand_overs(
    config: Config,
    layouts: dict[str, Layout],
    architecture: Architecture,
    client: EngineClient | None,
    exchange: Exchange,
    bucket_bytes: int,
) -> list[HandOver]:
    """This rank's part in handing the weights over."""
    rollout, is_sender = layouts["rollout"], exchange.rank == sending_rank(config, layouts)
    ways = transports(config, layouts)
    way = ways[rollout.shard_of(exchange.rank)] if client is not None else None
    folder = Path(config.trainer.output_dir).resolve() / DISK_FOLDER
    found: list[HandOver] = []
    if "broadcast" in ways:
        engines = [engine for engine, way_of_engine in enumerate(ways) if way_of_engine == "broadcast"]
        group = _join_group(config, layouts, engines, client if way == "broadcast" else None, exchange)
        found += [broadcast.BroadcastSender(*group)] if group else []
    if "disk" in ways and is_sender:
        found.append(DiskWriter(folder, architecture, bucket_bytes))
    if client is not None and way == "ipc":
        found.append(HandleSender(client, rollout.tensor))
    if client is not None and way == "broadcast":
        found.append(broadcast.BroadcastRelay(client))
    if client is not None and way == "disk":
        found.append(DiskReader(client, folder))
    return found


def _join_group(
    config: Config, layouts: dict[str, Layout], engines: list[int], client: EngineClient | None, exchange: Exchange
) -> tuple[Any, Any] | None:
    """Make the process group of the sending rank and some engines; the sending rank's end of it.

    Raises:
        ConfigError: an engine uses the sending rank's GPU, which NCCL cannot have twice.
    """
    rollout, sender = layouts["rollout"], sending_rank(config, layouts)
    for engine in engines:
        if platform.has_cuda() and sender in rollout.block(0, engine):
            raise ConfigError(
                [
                    f"engine {engine} on ranks {format_ranks(rollout.block(0, engine))} shares the GPU of rank {sender}"
                    ", which broadcasts the weights: place the engine on other GPUs, or so that its first rank is one "
                    "of the actor's, and leave rollout.sync.transport at auto"
                ]
            )
    world_size = 1 + len(engines) * rollout.tensor
    timeout = timedelta(seconds=config.trainer.process_group_timeout_seconds)
    is_sender = exchange.rank == sender
    store = broadcast.open_store(_own_host(), world_size, timeout) if is_sender else None
    host, port = exchange.share((store.host, store.port) if store is not None else None)[sender]
    backend = "nccl" if platform.has_cuda() else "gloo"
    threads, joining = ThreadPoolExecutor(max_workers=2), []  # the sending rank may own an engine itself
    if store is not None:
        joining.append(threads.submit(broadcast.join, store, world_size, timeout, backend))
    if client is not None:
        offset = 1 + engines.index(rollout.shard_of(exchange.rank)) * rollout.tensor
        where = {"rank_offset": offset, "world_size": world_size, "backend": backend}
        joining.append(threads.submit(client.join_update_group, broadcast.GROUP_NAME, host, port, **where))
    try:
        wait_for(joining)
    finally:
        threads.shutdown(wait=False)
    exchange.share(None)
    return (joining[0].result(), store) if store is not None else None


def _own_host() -> str:
    """This node's address for all ranks: torchrun's rendezvous is reached by all, and reaches all."""
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        return LOOPBACK
    master = os.environ["MASTER_ADDR"]
    return master if os.environ.get("GROUP_RANK", "0") == "0" else broadcast.own_address(master)

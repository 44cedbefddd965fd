"""Build a rank's part of the weight sync from the run's route."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megappo.architecture.architecture import Architecture
from megappo.batch.exchange import Exchange
from megappo.config.config_error import ConfigError
from megappo.config.schema import Config
from megappo.config.transports import CPU_BUCKET_BYTES, GPU_BUCKET_BYTES, Transport
from megappo.engines.client import EngineClient
from megappo.models.megatron_engine import MegatronEngine
from megappo.placement.route import SyncRoute
from megappo.runtime import platform
from megappo.sync.adapters import adapter_shapes
from megappo.sync.sync import WeightSync
from megappo.sync.transport import Link, Sender
from megappo.table import resolved
from megappo.weights.export import Export
from megappo.weights.load import folder_shapes


def engine_sleeps(route: SyncRoute, engine: int) -> bool:
    """Return whether an engine frees its memory, and so loses its weights, while the models on its GPUs are trained."""
    found = route.engines[engine]
    return platform.has_cuda() and found.shares_gpus and not found.stays_awake


def build_sync(
    config: Config,
    route: SyncRoute,
    architecture: Architecture,
    actor: MegatronEngine | None,
    client: EngineClient | None,
    exchange: Exchange,
) -> WeightSync:
    """Build the sync of the actor's weights to the engines, which serve; all ranks together.

    Args:
        architecture: the language model's.
        actor: this rank's part of it.
        client: of the engine that this rank owns.
    Raises:
        ConfigError: the weights cannot take this route on these GPUs.
    """
    on_gpus = platform.has_cuda()
    if errors := list(route.errors(on_gpus=on_gpus)):
        raise ConfigError(*errors)
    bucket_bytes = _bucket_bytes(config, route, on_gpus=on_gpus)
    export = None if actor is None else _export(actor, architecture, route, on_gpus=on_gpus)
    links = {name: Link(config, architecture, bucket_bytes, len(engines)) for name, engines in route.transports.items()}
    senders: dict[str, Sender] = {}
    if exchange.rank in route.senders:
        senders = {name: resolved(entry.sender)(links[name]) for name, entry in route.entries.items() if entry.sender}
    own_addresses = {name: sender.address for name, sender in senders.items()}
    shared = exchange.share((export.tensors if exchange.rank == route.senders[0] else None, own_addresses))
    tensors, _ = shared[route.senders[0]]
    addresses = [shared[rank][1] for rank in route.senders]
    own_ends = list(_engine_ends(config, route, links, addresses, client, exchange.rank))
    receivers = [end for entry, end in own_ends if entry.sender]
    direct_senders = [end for entry, end in own_ends if not entry.sender]
    return WeightSync(
        tensors,
        export if export is not None and export.joins else None,
        [*senders.values(), *direct_senders],
        receivers,
        _expected_shapes(config, architecture),
        bucket_bytes=bucket_bytes,
        barrier=lambda: exchange.share(None),
        engines_keep=not any(engine_sleeps(route, engine) for engine in range(len(route.engines))),
        sender=0 if export is None else export.sender,
    )


def _engine_ends(
    config: Config,
    route: SyncRoute,
    links: Mapping[str, Link],
    addresses: Sequence[Mapping[str, Any]],
    client: EngineClient | None,
    rank: int,
) -> Iterator[tuple[Transport, Any]]:
    """Build this rank's end of the transport to each engine; all ranks together.

    Args:
        links: by transport.
        addresses: each sending rank's, by transport.
    """
    for number, engine in enumerate(route.engines):
        name, ranks = engine.transport, route.ends(engine, on_gpus=platform.has_cuda())
        peers = _peers(ranks, config)
        if rank in ranks:
            place = route.transports[name].index(number)
            of_senders = [by_transport.get(name) for by_transport in addresses]
            link = replace(links[name], number=place, addresses=of_senders, peers=peers)
            yield engine.entry, resolved(engine.entry.engine)(link, client)


def _bucket_bytes(config: Config, route: SyncRoute, *, on_gpus: bool) -> int:
    if route.adapters:
        return sys.maxsize  # an engine takes them all at once
    return config.rollout.sync.bucket_bytes or (GPU_BUCKET_BYTES if on_gpus else CPU_BUCKET_BYTES)


def _export(actor: MegatronEngine, architecture: Architecture, route: SyncRoute, *, on_gpus: bool) -> Export:
    needing, by_stage = route.sources(on_gpus=on_gpus), len(route.senders) > 1
    options = {"needing": needing, "by_stage": by_stage, "adapters": route.adapters}
    return Export(actor.chunks, architecture, actor.groups, **options)


def _expected_shapes(config: Config, architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the shapes that the engines have of what they are sent."""
    shapes = folder_shapes(config.model.path, architecture)
    return shapes if config.actor.lora is None else adapter_shapes(shapes, config.actor.lora)


def _peers(ranks: tuple[int, ...], config: Config) -> dist.ProcessGroup | None:
    """Make a group of an engine's ranks, all ranks together; None for one rank.

    torch names a group that its members make alone by how many groups each of them is in, so that ranks with different
    components would not find each other.
    """
    if len(ranks) == 1:
        return None
    timeout = timedelta(seconds=config.trainer.process_group_timeout_seconds)
    return dist.new_group(list(ranks), timeout=timeout, backend="gloo")

"""Build a rank's part of the weight sync from the run's route."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megappo.architecture.architecture import Architecture
from megappo.architecture.parameters import LORA_A, LORA_B
from megappo.batch.exchange import Exchange
from megappo.config.config_error import ConfigError
from megappo.config.methods import CPU_BUCKET_BYTES, GPU_BUCKET_BYTES
from megappo.config.model_sections import Lora
from megappo.config.schema import Config
from megappo.engines.client import EngineClient
from megappo.models.megatron_engine import MegatronEngine
from megappo.placement.route import SyncRoute
from megappo.runtime import platform
from megappo.sync.sync import WeightSync
from megappo.sync.transport import Link, Receiver, Sender
from megappo.table import resolved
from megappo.weights.export import Export
from megappo.weights.load import folder_shapes


def engine_sleeps(route: SyncRoute, engine: int) -> bool:
    """Return whether an engine frees its memory, and so loses its weights, while the models on its GPUs are trained."""
    return platform.has_cuda() and route.engines[engine].frees_memory


def build_sync(
    config: Config,
    route: SyncRoute,
    architecture: Architecture,
    actor: MegatronEngine | None,
    client: EngineClient | None,
    exchange: Exchange,
) -> WeightSync:
    """Build the sync of the actor's weights to the engines, which must be serving; all ranks together.

    Args:
        architecture: the language model's.
        actor: this rank's part of it.
        client: client of the engine that this rank owns.
    Raises:
        ConfigError: the route does not work on these GPUs.
    """
    on_gpus = platform.has_cuda()
    if errors := list(route.errors(on_gpus=on_gpus)):
        raise ConfigError(*errors)
    export = None
    if actor is not None:
        export = Export(
            actor.chunks,
            architecture,
            actor.groups,
            full_tensor_ranks=route.full_tensor_ranks(on_gpus=on_gpus),
            by_stage=len(route.senders) > 1,
            adapters=route.adapters,
        )
    bucket_bytes = config.rollout.sync.bucket_bytes or (GPU_BUCKET_BYTES if on_gpus else CPU_BUCKET_BYTES)
    shapes = folder_shapes(config.model.path, architecture)
    if config.sent_lora is not None:
        shapes = adapter_shapes(shapes, config.sent_lora)
        bucket_bytes = sys.maxsize  # an engine takes them all at once
    links = {name: Link(config, architecture, bucket_bytes, len(engines)) for name, engines in route.transports.items()}
    senders: dict[str, Sender] = {}
    if exchange.rank in route.senders:
        senders = {name: resolved(entry.sender)(links[name]) for name, entry in route.entries.items() if entry.sender}
    addresses = {name: sender.address for name, sender in senders.items()}
    shared = exchange.all_gather((export.tensors if exchange.rank == route.senders[0] else None, addresses))
    tensors, _ = shared[route.senders[0]]
    own_senders, receivers = _engine_endpoints(
        route, links, [shared[rank][1] for rank in route.senders], client, exchange
    )
    return WeightSync(
        tensors,
        export if export is not None and export.participates else None,
        [*senders.values(), *own_senders],
        receivers,
        shapes,
        bucket_bytes=bucket_bytes,
        barrier=lambda: exchange.all_gather(None),
        engines_keep=not any(engine_sleeps(route, engine) for engine in range(len(route.engines))),
        sender_index=0 if export is None else export.sender_index,
    )


def adapter_shapes(shapes: Mapping[str, tuple[int, ...]], lora: Lora) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a model's adapters, from the names and shapes of its own tensors."""
    found = {}
    for name, shape in shapes.items():
        matrix, _, kind = name.rpartition(".")
        if kind == "weight" and matrix.rpartition(".")[2] in lora.modules:
            found[matrix + LORA_A] = (lora.rank, shape[1])
            found[matrix + LORA_B] = (shape[0], lora.rank)
    return found


def _engine_endpoints(
    route: SyncRoute,
    links: Mapping[str, Link],
    addresses: Sequence[Mapping[str, Any]],
    client: EngineClient | None,
    exchange: Exchange,
) -> tuple[list[Sender], list[Receiver]]:
    """Build this rank's endpoints for the engines whose ranks include it; all ranks together.

    Args:
        links: links by transport.
        addresses: addresses by transport, for each rank of `SyncRoute.senders`.
    """
    senders: list[Sender] = []
    receivers: list[Receiver] = []
    for number, engine in enumerate(route.engines):
        name = engine.transport
        ranks = route.endpoint_ranks(engine, on_gpus=platform.has_cuda())
        peers = None
        if len(ranks) > 1:
            # Made by all ranks: if only its members made it, torch would name it by the number of groups that each is
            # in, so ranks with different components would not find each other.
            timeout = timedelta(seconds=links[name].config.trainer.process_group_timeout_seconds)
            peers = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
        if exchange.rank in ranks:
            position = route.transports[name].index(number)
            sender_addresses = [by_transport.get(name) for by_transport in addresses]
            link = replace(
                links[name],
                number=position,
                addresses=sender_addresses,
                peers=peers,
            )
            endpoint = resolved(engine.entry.engine_endpoint)(link, client)
            if engine.entry.sender:
                receivers.append(endpoint)
            else:
                senders.append(endpoint)
    return senders, receivers

"""The way of the weights during a run, made from its route: what each rank has of it."""

import sys
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from megappo.architecture.architecture import Architecture
from megappo.batch.exchange import Exchange
from megappo.config.errors import ConfigError
from megappo.config.schema import Config
from megappo.config.transports import CPU_BUCKET_BYTES, GPU_BUCKET_BYTES
from megappo.engines.client import EngineClient
from megappo.models.megatron_engine import MegatronEngine
from megappo.placement.route import Route
from megappo.runtime import platform
from megappo.sync.adapters import adapter_shapes
from megappo.sync.sync import WeightSync
from megappo.sync.transport import Link, Receiver, Sender
from megappo.table import resolved
from megappo.weights.export import Export
from megappo.weights.load import folder_shapes


def engine_sleeps(route: Route, engine: int) -> bool:
    """Whether an engine gives its memory up while the models on its GPUs are trained; its weights are then lost."""
    found = route.engines[engine]
    return platform.has_cuda() and found.shares_gpus and not found.stays_awake


def build_sync(
    config: Config,
    route: Route,
    architecture: Architecture,
    actor: MegatronEngine | None,
    client: EngineClient | None,
    exchange: Exchange,
) -> WeightSync:
    """The way of the actor's weights to the engines; all ranks together, once the engines are up.

    Args:
        architecture: the language model's.
        actor: this rank's part. client: of the engine that this rank owns.
    Raises:
        ConfigError: the route cannot be on these GPUs.
    """
    on_gpus = platform.has_cuda()
    if errors := list(route.errors(on_gpus=on_gpus)):
        raise ConfigError(*errors)
    bucket_bytes = _bucket_bytes(config, route, on_gpus=on_gpus)
    links = {name: Link(config, architecture, bucket_bytes, len(engines)) for name, engines in route.transports.items()}
    export, needing = None, route.sources(on_gpus=on_gpus)
    if actor is not None:
        by_stage = len(route.senders) > 1
        options = {"needing": needing, "by_stage": by_stage, "adapters": route.adapters}
        export = Export(actor.chunks, architecture, actor.groups, **options)
    made = {}
    if export is not None and exchange.rank in route.senders:
        made = {name: resolved(entry.sender)(links[name]) for name, entry in route.entries.items() if entry.sender}
    first = export is not None and exchange.rank == route.senders[0]
    told = exchange.share((export.tensors if first else None, {name: sender.address for name, sender in made.items()}))
    tensors, addresses = told[route.senders[0]][0], [told[rank][1] for rank in route.senders]
    senders: list[Sender] = [*made.values()]
    receivers: list[Receiver] = []
    for number, engine in enumerate(route.engines):
        ends = route.ends(engine, on_gpus=on_gpus)
        peers = _peers(ends, config)
        if exchange.rank in ends:
            name, entry = engine.transport, engine.entry
            its_number, found = route.transports[name].index(number), [of_sender.get(name) for of_sender in addresses]
            link = replace(links[name], number=its_number, addresses=found, peers=peers)
            (receivers if entry.sender else senders).append(resolved(entry.engine)(link, client))
    source = export if export is not None and export.joins else None
    return WeightSync(
        tensors,
        source,
        senders,
        receivers,
        _expected(config, architecture),
        bucket_bytes=bucket_bytes,
        barrier=lambda: exchange.share(None),
        engines_keep=not any(engine_sleeps(route, engine) for engine in range(len(route.engines))),
        sender=0 if export is None else export.sender,
    )


def _bucket_bytes(config: Config, route: Route, *, on_gpus: bool) -> int:
    if route.adapters:
        return sys.maxsize  # an engine takes them all at once
    return config.rollout.sync.bucket_bytes or (GPU_BUCKET_BYTES if on_gpus else CPU_BUCKET_BYTES)


def _expected(config: Config, architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """What the engines have of what is sent."""
    shapes = folder_shapes(config.model.path, architecture)
    return shapes if config.actor.lora is None else adapter_shapes(shapes, config.actor.lora)


def _peers(ranks: tuple[int, ...], config: Config) -> dist.ProcessGroup | None:
    """A group of several ranks, which all ranks make together: torch calls one that its members make alone by how many
    groups each of them is in, so that ranks with unlike components would not find each other."""
    if len(ranks) == 1:
        return None
    timeout = timedelta(seconds=config.trainer.process_group_timeout_seconds)
    return dist.new_group(list(ranks), timeout=timeout, backend="gloo")

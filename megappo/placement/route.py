"""Route of the actor's weights to every engine, from config and layouts. Without torch."""

from dataclasses import dataclass

from megappo.config.config_error import Errors
from megappo.config.methods import TRANSPORTS, Transport
from megappo.config.schema import Config
from megappo.placement.layout import Layout, Layouts, Ranks, by_node, format_ranks


@dataclass(frozen=True)
class EngineRoute:
    """The route to one engine.

    Attributes:
        transport: name of the transport.
        entry: the transport's entry in the table, or with adapters alone its `adapters` entry.
        ranks: the engine's ranks; the first owns it.
        shares_gpus: a model is on one of its GPUs.
        frees_memory: the engine sleeps while that model is trained.
        is_external: the engine runs elsewhere, on none of the ranks' GPUs.
        spans_nodes: its ranks are on several nodes.
    """

    transport: str
    entry: Transport
    ranks: Ranks
    shares_gpus: bool
    frees_memory: bool
    is_external: bool
    spans_nodes: bool

    @property
    def owner(self) -> int:
        """The rank that starts the engine and sends requests to it."""
        return self.ranks[0]

    @property
    def required_actor_ranks(self) -> Ranks:
        """Ranks that must be the actor's if the transport has no sender: they pass the weights to the engine."""
        return self.ranks if self.spans_nodes and self.entry.each_rank else self.ranks[:1]

    @property
    def excludes_sender(self) -> bool:
        """True if the sender must not be on the engine's GPUs."""
        return self.entry.needs_other_gpu and not self.is_external


@dataclass(frozen=True)
class SyncRoute:
    """The route from the actor to every engine, by the engine's number.

    Attributes:
        stages: the ranks of the actor's pipeline stages.
        adapters: only adapters are sent; engines have the other weights from model.path.
    """

    stages: tuple[Ranks, ...]
    engines: tuple[EngineRoute, ...]
    adapters: bool = False

    @property
    def actor(self) -> Ranks:
        """The actor's ranks."""
        return tuple(rank for stage in self.stages for rank in stage)

    @property
    def senders(self) -> Ranks:
        """The actor's ranks that send weights to engines whose owners do not.

        Each stage has one: its first rank that is not on a GPU that a transport excludes. One rank sends everything if
        a stage has no such rank, or if the transport of an engine needs everything from one rank.
        """
        excluded: set[int] = set()
        for engine in self.engines:
            if engine.excludes_sender:
                excluded |= set(engine.ranks)
        allowed = [[rank for rank in stage if rank not in excluded] for stage in self.stages]
        if all(allowed) and all(engine.entry.each_stage for engine in self.engines):
            return tuple(stage[0] for stage in allowed)
        for rank in self.actor:
            if rank not in excluded:
                return (rank,)
        return self.actor[:1]

    def endpoint_ranks(self, engine: EngineRoute, *, on_gpus: bool) -> Ranks:
        """Return the engine's ranks that have an endpoint of its transport; the first owns the engine."""
        is_apart = on_gpus or engine.spans_nodes  # on a CPU ranks of one node share their memory
        at_each = is_apart and engine.entry.each_rank and set(engine.ranks) <= set(self.actor)
        return engine.ranks if at_each else engine.ranks[:1]

    def full_tensor_ranks(self, *, on_gpus: bool) -> frozenset[int]:
        """Return the actor's ranks that need full tensors."""
        found: set[int] = set()
        for engine in self.engines:
            found.update(self.senders if engine.entry.sender else self.endpoint_ranks(engine, on_gpus=on_gpus))
        return frozenset(found)

    @property
    def shares_nccl(self) -> bool:
        """True if trainer and engines are in one NCCL group, which takes no GPU twice."""
        return any(engine.entry.needs_other_gpu for engine in self.engines)

    @property
    def transports(self) -> dict[str, tuple[int, ...]]:
        """The numbers of the engines of each transport."""
        found: dict[str, tuple[int, ...]] = {}
        for number, engine in enumerate(self.engines):
            found[engine.transport] = (*found.get(engine.transport, ()), number)
        return found

    @property
    def entries(self) -> dict[str, Transport]:
        """The table's entry of each transport."""
        return {engine.transport: engine.entry for engine in self.engines}

    def describe(self) -> str:
        """Return a line with the engines of each transport."""
        parts = []
        for name, engines in self.transports.items():
            sender = f"from rank {format_ranks(self.senders)} " if self.entries[name].sender else ""
            parts.append(f"{name} {sender}to engine {format_ranks(engines)}")
        return f"{'adapters' if self.adapters else 'weights'}: {'; '.join(parts) or 'sent to no engine'}"

    def errors(self, *, on_gpus: bool) -> Errors:
        """Yield each engine that the weights cannot reach."""
        actor = format_ranks(self.actor)
        sender = next(iter(self.senders), None)
        for name, numbers in self.transports.items():
            required = [rank for number in numbers for rank in self.engines[number].required_actor_ranks]
            elsewhere = [rank for rank in required if rank not in self.actor]
            if elsewhere and not self.entries[name].sender:
                yield (
                    f"rollout.sync.transport is {name}, but the engines' ranks {format_ranks(elsewhere)} are not the "
                    f"actor's ({actor}): set it to auto, or place the engines there"
                )
        for number, engine in enumerate(self.engines):
            if on_gpus and engine.excludes_sender and sender in engine.ranks:
                yield (
                    f"engine {number} on ranks {format_ranks(engine.ranks)} shares the GPU of rank {sender}"
                    f", from which {engine.transport} cannot reach it: place the engine on other GPUs, or so that its "
                    "first rank is one of the actor's, and leave rollout.sync.transport at auto"
                )


def find_route(config: Config, layouts: Layouts, ranks_per_node: int) -> SyncRoute:
    """Return the route to each engine: by rollout.sync.transport, or with auto, or if that one cannot send adapters
    alone, by the first transport of the table that reaches the engine."""
    if "actor" not in layouts:
        return SyncRoute((), ())
    rollout = layouts["rollout"]
    is_external = bool(config.rollout.engines)
    models = {rank for name, layout in layouts.items() if name != "rollout" for rank in layout.ranks}
    has_adapters = config.sent_lora is not None
    may_sleep = config.rollout.sleep != "never"
    entries = {name: entry.adapters if has_adapters else entry for name, entry in TRANSPORTS.items()}
    engines = []
    for number in range(rollout.data):
        ranks = rollout.block(0, number)
        shares_gpus = not is_external and not models.isdisjoint(ranks)
        spans_nodes = len(by_node(ranks, ranks_per_node)) > 1
        facts = ranks, shares_gpus, shares_gpus and may_sleep, is_external, spans_nodes
        routes = {name: EngineRoute(name, entry, *facts) for name, entry in entries.items() if entry}
        chosen = routes.get(config.rollout.sync.transport)
        engines.append(chosen or next(route for route in routes.values() if _is_open(route, layouts["actor"])))
    return SyncRoute(layouts["actor"].stages, tuple(engines), has_adapters)


def _is_open(route: EngineRoute, actor: Layout) -> bool:
    owners_send = not route.is_external and set(route.required_actor_ranks) <= set(actor.ranks)
    return route.entry.sender is not None or owners_send

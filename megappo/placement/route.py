"""The way of the actor's weights to every engine, from config and placement. Without torch."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from megappo.config.schema import Config
from megappo.config.transports import TRANSPORTS, Transport
from megappo.placement.layout import Layout
from megappo.placement.nodes import by_node
from megappo.placement.ranks import format_ranks


@dataclass(frozen=True)
class EngineRoute:
    """The way to one engine.

    Attributes:
        transport: its name. entry: in the table; where adapters alone are sent, the transport's for those.
        ranks: the engine's; the first owns it.
        shares_gpus: a model is on one of them too, so that the engine must give its memory up while that is trained.
        stays_awake: it need not, as there is memory for both.
        is_external: it is elsewhere, on none of their GPUs.
        spans_nodes: its ranks are on several nodes.
    """

    transport: str
    entry: Transport
    ranks: tuple[int, ...]
    shares_gpus: bool
    is_external: bool = False
    spans_nodes: bool = False
    stays_awake: bool = False

    @property
    def owner(self) -> int:
        return self.ranks[0]

    @property
    def sources(self) -> tuple[int, ...]:
        """Where the transport has no sender: its ranks that give the weights themselves, and must be the actor's."""
        return self.ranks if self.spans_nodes and self.entry.each_rank else self.ranks[:1]


@dataclass(frozen=True)
class Route:
    """The way from the actor, whose pipeline stages are on these ranks, to every engine, by its number.

    Attributes:
        adapters: they alone are sent; engines have the other weights from model.path.
    """

    stages: tuple[tuple[int, ...], ...]
    engines: tuple[EngineRoute, ...]
    adapters: bool = False

    @property
    def actor(self) -> tuple[int, ...]:
        """The actor's ranks."""
        return tuple(rank for stage in self.stages for rank in stage)

    @property
    def senders(self) -> tuple[int, ...]:
        """The actor's ranks that send where the engines' owners do not, each its stage's first on no GPU that it must
        keep off. One sends everything where a stage has no such rank, or an engine's transport wants all from one."""
        apart = [engine for engine in self.engines if engine.entry.needs_other_gpu and not engine.is_external]
        taken = {rank for engine in apart for rank in engine.ranks}
        free = [[rank for rank in stage if rank not in taken] for stage in self.stages]
        if all(free) and all(engine.entry.each_stage for engine in self.engines):
            return tuple(stage[0] for stage in free)
        return (next((rank for rank in self.actor if rank not in taken), self.actor[0]),)

    def ends(self, engine: EngineRoute, *, on_gpus: bool) -> tuple[int, ...]:
        """The engine's ranks at which its transport ends; the first owns it."""
        apart = on_gpus or engine.spans_nodes  # on a CPU ranks of one node share their memory
        each = apart and engine.entry.each_rank and set(engine.ranks) <= set(self.actor)
        return engine.ranks if each else engine.ranks[:1]

    def sources(self, *, on_gpus: bool) -> frozenset[int]:
        """The actor's ranks that need whole tensors."""
        found = [self.senders if engine.entry.sender else self.ends(engine, on_gpus=on_gpus) for engine in self.engines]
        return frozenset().union(*found)

    @property
    def shares_nccl(self) -> bool:
        """Whether trainer and engines are in one group of NCCL's, in which no GPU may be twice."""
        return any(engine.entry.needs_other_gpu for engine in self.engines)

    @property
    def transports(self) -> dict[str, tuple[int, ...]]:
        """The engines of each transport."""
        names = [engine.transport for engine in self.engines]
        return {name: tuple(i for i, its in enumerate(names) if its == name) for name in dict.fromkeys(names)}

    @property
    def entries(self) -> dict[str, Transport]:
        """Of each transport."""
        return {engine.transport: engine.entry for engine in self.engines}

    def describe(self) -> str:
        """The engines of each transport, in a line."""
        parts = []
        for name, engines in self.transports.items():
            sender = f"from rank {format_ranks(self.senders)} " if self.entries[name].sender else ""
            parts.append(f"{name} {sender}to engine {format_ranks(engines)}")
        return f"{'adapters' if self.adapters else 'weights'}: " + "; ".join(parts)

    def errors(self, *, on_gpus: bool) -> Iterator[str]:
        """What cannot be, one line each."""
        for name in self.transports:
            owners = [e.owner for e in self.engines if e.transport == name and not e.entry.sender]
            elsewhere = [rank for rank in owners if rank not in self.actor]
            if elsewhere:
                yield (
                    f"rollout.sync.transport is {name}, but the engines' first ranks {format_ranks(elsewhere)} are not "
                    f"the actor's ({format_ranks(self.actor)}): set it to auto, or place the engines there"
                )
        for number, engine in enumerate(self.engines):
            elsewhere = [rank for rank in engine.sources[1:] if rank not in self.actor]
            if elsewhere and not engine.entry.sender:
                yield (
                    f"rollout.sync.transport is {engine.transport}, but of engine {number}, which is on several nodes, "
                    f"ranks {format_ranks(elsewhere)} are not the actor's ({format_ranks(self.actor)}): set it to "
                    "auto, or place the engine there"
                )
            keeps_off = engine.entry.needs_other_gpu and not engine.is_external
            if on_gpus and keeps_off and self.senders[0] in engine.ranks:
                yield (
                    f"engine {number} on ranks {format_ranks(engine.ranks)} shares the GPU of rank {self.senders[0]}"
                    f", from which {engine.transport} cannot reach it: place the engine on other GPUs, or so that its "
                    "first rank is one of the actor's, and leave rollout.sync.transport at auto"
                )


def find_route(config: Config, layouts: Mapping[str, Layout], ranks_per_node: int | None = None) -> Route:
    """Each engine takes rollout.sync.transport; with auto, or one without a way for adapters, the first open to it.

    Args:
        ranks_per_node: None = all are on one.
    """
    actor, rollout, chosen = layouts["actor"].ranks, layouts["rollout"], config.rollout.sync.transport
    models = {rank for name, layout in layouts.items() if name != "rollout" for rank in layout.ranks}
    engines, external, adapters = [], bool(config.rollout.engines), config.actor.lora is not None
    entries = {name: entry.adapters if adapters else entry for name, entry in TRANSPORTS.items()}
    for number in range(rollout.data):
        ranks = rollout.block(0, number)
        shares_gpus = not (external or models.isdisjoint(ranks))
        spans_nodes = _are_apart(ranks, ranks_per_node)
        facts = ranks, shares_gpus, external, spans_nodes, config.rollout.sleep == "never"
        ways = {name: EngineRoute(name, entry, *facts) for name, entry in entries.items() if entry is not None}
        is_open = (
            way for way in ways.values() if way.entry.sender or (not external and set(way.sources) <= set(actor))
        )
        engines.append(ways[chosen] if chosen in ways else next(is_open))
    return Route(layouts["actor"].stages, tuple(engines), adapters)


def _are_apart(ranks: Collection[int], ranks_per_node: int | None) -> bool:
    """Whether they are on several nodes."""
    return ranks_per_node is not None and len(by_node(sorted(ranks), ranks_per_node)) > 1

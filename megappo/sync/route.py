"""The way the actor's weights take to each engine, chosen from the placement. Without torch."""

from collections.abc import Mapping
from typing import Literal

from megappo.config.schema import Config
from megappo.placement.layout import Layout
from megappo.placement.ranks import format_ranks

Transport = Literal["ipc", "broadcast", "disk"]


def transports(config: Config, layouts: Mapping[str, Layout]) -> tuple[Transport, ...]:
    """Of each engine: through handles where its owner is one of the actor's ranks, by broadcast where it is not, unless
    rollout.sync.transport says otherwise."""
    chosen = config.rollout.sync.transport
    rollout, actor = layouts["rollout"], set(layouts["actor"].ranks)
    here = [rollout.output_rank(engine) in actor for engine in range(rollout.data)]
    if chosen == "auto":
        return tuple("ipc" if is_here else "broadcast" for is_here in here)
    return (chosen,) * rollout.data


def sending_rank(config: Config, layouts: Mapping[str, Layout]) -> int:
    """The rank that broadcasts, or writes to the disk, the weights: the actor's first that is not on a GPU of an engine
    which takes them by broadcast. NCCL cannot have a GPU twice."""
    rollout, actor = layouts["rollout"], layouts["actor"].ranks
    fed = [engine for engine, way in enumerate(transports(config, layouts)) if way == "broadcast"]
    taken = {rank for engine in fed for rank in rollout.block(0, engine)}
    return next((rank for rank in actor if rank not in taken), actor[0])


def describe_transports(config: Config, layouts: Mapping[str, Layout]) -> str:
    """The engines of each transport, in a line."""
    chosen = transports(config, layouts)
    sender = f"from rank {sending_rank(config, layouts)} "
    parts = []
    for transport in dict.fromkeys(chosen):
        engines = format_ranks(engine for engine, its in enumerate(chosen) if its == transport)
        parts.append(f"{transport} {'' if transport == 'ipc' else sender}to engine {engines}")
    return "weights: " + "; ".join(parts)


def shares_gpus(layouts: Mapping[str, Layout], engine: int) -> bool:
    """Whether a model is on an engine's GPUs too, so that the engine must give their memory up while it is trained."""
    models = {rank for name, layout in layouts.items() if name != "rollout" for rank in layout.ranks}
    return any(rank in models for rank in layouts["rollout"].block(0, engine))

"""Which ranks are on which node: torchrun numbers them node by node, and starts as many on each. Without torch."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from megappo.config.values import LARGEST_PORT
from megappo.placement.layout import Layout
from megappo.placement.ranks import TENSOR_OF_ENGINES, format_ranks


def by_node(ranks: Sequence[int], ranks_per_node: int) -> tuple[tuple[int, ...], ...]:
    """Ascending ranks, those of each node together."""
    return tuple(tuple(part) for _, part in groupby(ranks, key=lambda rank: rank // ranks_per_node))


def uneven_engines(rollout: Layout, ranks_per_node: int) -> Iterator[str]:
    """SGLang wants as many ranks of an engine on each of its nodes."""
    for engine in range(rollout.data):
        ranks = rollout.block(0, engine)
        sizes = [len(part) for part in by_node(ranks, ranks_per_node)]
        if len(set(sizes)) > 1:
            yield (
                f"placement.rollout: engine {engine} of {TENSOR_OF_ENGINES} {rollout.tensor} would get ranks "
                f"{format_ranks(ranks)}, {' and '.join(map(str, sizes))} on its nodes of {ranks_per_node} ranks: make "
                f"{TENSOR_OF_ENGINES} a divisor or a multiple of {ranks_per_node}, and start placement.rollout on a "
                "multiple of that"
            )


def port_errors(port: int, rollout: Layout, ranks_per_node: int) -> Iterator[str]:
    """Check rollout.port: the engines of a node take one port after the other."""
    most = -(-max(map(len, by_node(rollout.ranks, ranks_per_node))) // rollout.tensor)
    if port + most - 1 > LARGEST_PORT:
        yield (
            f"rollout.port {port} is too high for the {most} engines of a node, which take as many ports: lower it to "
            f"{LARGEST_PORT + 1 - most} or less"
        )

"""Read lists of ranks, and arrange the ranks of one component: the arithmetic of its kinds of parallelism. Without
torch."""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import NamedTuple

from megappo.config.config_error import counted, nearest_divisors, shorten

RANGE = re.compile(r"\s*(\d{1,5})\s*(?:-\s*(\d{1,5})\s*)?", re.ASCII)
"""A rank, or the first and last of several, below `MOST_RANKS`."""
START_TOKENS = {"cpu": (40, 6e6), "cuda": (240, 5.5e9)}
"""Fixed cost of a micro-batch, by device, in tokens that a layer could compute meanwhile: of moving the layer's weights
and gradients; and, to be divided by the square of the hidden size, of starting its operations. Estimates:
12 GB/s and 165 GFLOPS of a core, 2 ms a layer; 3.35 TB/s and 400 TFLOPS of an H100, 1 ms a layer."""


Ranks = tuple[int, ...]
"""Global ranks."""


class Coordinates(NamedTuple):
    """Place of a rank in a component: data-parallel shard, ranks in the context- and tensor-parallel groups, stage."""

    data: int
    context: int
    tensor: int
    stage: int


@dataclass(frozen=True)
class Layout:
    """A component's global ranks in Megatron's order: tensor fastest, then context, then data, pipeline slowest.

    Each expert of a layer is cut over a run of `expert_tensor` ranks of a stage, and the experts are shared out over
    `expert` such runs that follow each other. They may reach over tensor-parallel groups and data-parallel shards.

    With `virtual_pipeline` each stage holds that many chunks of the model: its layers go over the stages several times.

    Raises:
        ValueError: there are no ranks, or they do not divide into tensor x context x pipeline, or a stage's into runs
            of `expert` x `expert_tensor`.
    Source: Megatron-core's default rank order "tp-cp-ep-dp-pp", and the same with other sizes for experts.
    """

    ranks: Ranks
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual_pipeline: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        count = len(self.ranks)
        size = self.tensor * self.context * self.pipeline
        if not count or count % size:
            raise ValueError(
                f"tensor {self.tensor} x context {self.context} x pipeline {self.pipeline} = {size} does not divide "
                f"{count}, the number of ranks {format_ranks(self.ranks)}: name a multiple of {size} ranks, or make "
                f"tensor x context x pipeline {nearest_divisors(count, size)}"
            )
        stage = count // self.pipeline
        experts = self.expert_run
        if stage % experts:
            raise ValueError(
                f"expert {self.expert} x expert_tensor {self.expert_tensor} = {experts} does not divide {stage}, the "
                f"ranks of a stage (tensor {self.tensor} x context {self.context} x data {self.data}): make "
                f"expert x expert_tensor {nearest_divisors(stage, experts)}"
            )

    @property
    def data(self) -> int:
        """Number of data-parallel shards."""
        return len(self.ranks) // (self.tensor * self.context * self.pipeline)

    @property
    def expert_run(self) -> int:
        """Ranks of a stage that hold all experts of a layer together."""
        return self.expert * self.expert_tensor

    @property
    def expert_replicas(self) -> int:
        """Runs of ranks in a stage that hold the same experts."""
        return len(self.ranks) // (self.pipeline * self.expert_run)

    @property
    def micro_batch_group(self) -> int:
        """Divisor of the number of micro-batches: the interleaved schedule runs them in groups."""
        return self.pipeline if self.virtual_pipeline > 1 else 1

    def filling(self, num_tokens: int, hidden_size: int, device: str) -> int:
        """Return the number of micro-batches of a shard's tokens with which its pipeline stages wait least for each
        other, in whole groups; 1 without stages.

        With p stages of v chunks, m micro-batches take as long as m + (p - 1) / v on one stage, each w / m for its
        share of the work and c to start it. That is least for m = (w / c * (p - 1) / v) ** 0.5.

        Args:
            device: "cpu" or "cuda".
        Source: Narayanan et al. 2021, section 2.2: the stages' idle slots.
        """
        to_move, to_start = START_TOKENS[device]
        start = to_move + to_start * self.tensor / hidden_size**2
        best = math.sqrt(num_tokens / start * (self.pipeline - 1) / self.virtual_pipeline)
        return max(1, round(best / self.micro_batch_group)) * self.micro_batch_group

    def coordinates(self, rank: int) -> Coordinates | None:
        """Return the place of a global rank in the component; None if the component is not on it."""
        if rank not in self.ranks:
            return None
        rest, tensor = divmod(self.ranks.index(rank), self.tensor)
        rest, context = divmod(rest, self.context)
        stage, data = divmod(rest, self.data)
        return Coordinates(data=data, context=context, tensor=tensor, stage=stage)

    @property
    def stages(self) -> tuple[Ranks, ...]:
        """Global ranks of each pipeline stage."""
        size = len(self.ranks) // self.pipeline
        return tuple(self.ranks[start : start + size] for start in range(0, len(self.ranks), size))

    def block(self, stage: int, shard: int) -> Ranks:
        """Return the global ranks of one pipeline stage of one data-parallel shard."""
        size = self.tensor * self.context
        start = (stage * self.data + shard) * size
        return self.ranks[start : start + size]

    def shard_of(self, rank: int) -> int | None:
        """Return the data-parallel shard of a global rank; None if the component is not on it."""
        coordinates = self.coordinates(rank)
        return None if coordinates is None else coordinates.data

    def shard_ranks(self, shard: int) -> Ranks:
        """Return the global ranks that hold the rows of one data-parallel shard."""
        return tuple(rank for stage in range(self.pipeline) for rank in self.block(stage, shard))

    def output_rank(self, shard: int) -> int:
        """Return the rank with a shard's results: tensor and context rank 0 of the last pipeline stage."""
        return self.block(self.pipeline - 1, shard)[0]

    def sharing(self, ranks: Collection[int], ways: int) -> frozenset[int]:
        """Return all ranks that share a run of `ways` ranks, over which tensors or experts are sharded, with these."""
        runs = {place // ways for place, rank in enumerate(self.ranks) if rank in ranks}
        return frozenset(rank for place, rank in enumerate(self.ranks) if place // ways in runs)

    def pipelines_of(self, ranks: Collection[int]) -> frozenset[int]:
        """Return all ranks in a pipeline with one of these ranks."""
        stage = len(self.ranks) // self.pipeline
        pipelines = {place % stage for place, rank in enumerate(self.ranks) if rank in ranks}
        return frozenset(rank for place, rank in enumerate(self.ranks) if place % stage in pipelines)

    def gathering(self, full_tensor_ranks: Collection[int], *, by_stage: bool = False) -> frozenset[int]:
        """Return the ranks that take part when some ranks gather the full model, or with `by_stage` their full stage.

        These are the ranks that gather it, and all that share a group with a participant. The others are data-parallel
        replicas.
        """
        found = frozenset[int]()
        joining = frozenset(full_tensor_ranks)
        while found != joining:
            found = joining
            joining = self.sharing(found, self.tensor)
            joining = joining if by_stage else self.pipelines_of(joining)
            joining = self.sharing(joining, self.expert_run)
        return found


Layouts = Mapping[str, Layout]
"""Layouts by the name of their model, or `rollout` for the engines."""


def parse_ranks(text: str, world_size: int) -> Ranks:
    """Read ranks written as `all`, `5`, `0-7` (inclusive) or `0-3,6`, in ascending order.

    Raises:
        ValueError: the text is not of this form, a range runs backwards, a rank is named twice or not below world_size.
    """
    if is_everywhere(text):
        return tuple(range(world_size))
    ranges = sorted(rank_ranges(text))
    most = max(last for _, last in ranges)
    if most >= world_size:
        raise ValueError(
            f"{shorten(repr(text))} names rank {most}, but this run has {counted(world_size, 'rank')}, numbered from "
            f"0: start {most + 1} processes or more (megappo train --nproc {most + 1}, or torchrun --nproc-per-node "
            f"{most + 1}), or name lower ranks"
        )
    ranks = [rank for first, last in ranges for rank in range(first, last + 1)]
    if len(set(ranks)) < len(ranks):
        raise ValueError(f"{shorten(repr(text))} names a rank twice: name it once")
    return tuple(ranks)


def is_everywhere(text: str) -> bool:
    """Return whether a text names all ranks of a run of any size."""
    return text.strip() == "all"


def rank_ranges(text: str) -> list[tuple[int, int]]:
    """Return the first and last rank of each part of a text, which is not `all`.

    Raises:
        ValueError: the text is not a list of ranks.
    """
    ranges = []
    for part in text.split(","):
        match = RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"{shorten(repr(text))} is not a list of ranks: write 'all', '0-7', '0,2' or '0-3,6'")
        first = int(match[1])
        last = int(match[2] or match[1])
        if first > last:
            raise ValueError(f"{shorten(repr(text))}: the range {part.strip()} runs backwards: write {last}-{first}")
        ranges.append((first, last))
    return ranges


def format_ranks(ranks: Iterable[int]) -> str:
    """Write ascending ranks as `parse_ranks` reads them: `0-3,6`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    return ",".join("-".join(map(str, run)) for run in runs)


def by_node(ranks: Sequence[int], ranks_per_node: int) -> tuple[Ranks, ...]:
    """Group ascending ranks by node: torchrun numbers them node by node, and starts as many on each."""
    return tuple(tuple(part) for _, part in groupby(ranks, key=lambda rank: rank // ranks_per_node))


GROUPS = {
    "tp": "tp",
    "pp": "pp",
    "cp": "cp",
    "dp": "dp",
    "mp": "tp-pp",
    "tp_cp": "tp-cp",
    "dp_cp": "dp-cp",
    "intra_dp_cp": "dp-cp",
    "tp_dp_cp": "tp-dp-cp",
    "intra_dist_opt": "tp-cp-dp-pp",
}
"""Field of Megatron's collection of groups -> dimensions that its ranks span, outside the experts."""
EXPERT_GROUPS = {
    "ep": "ep",
    "expt_tp": "tp",
    "expt_dp": "dp",
    "intra_expt_dp": "dp",
    "tp_ep": "tp-ep",
    "tp_ep_pp": "tp-ep-pp",
}
"""The same for experts, which have a tensor and a data parallelism of their own, and no context parallelism."""


def rank_groups(layout: Layout) -> Iterator[tuple[str, Ranks]]:
    """Yield the groups of a component: field of the collection, and global ranks."""
    replicas = layout.tensor * layout.context * layout.data // (layout.expert * layout.expert_tensor)
    sizes = {"pp": layout.pipeline, "dp": layout.data, "cp": layout.context, "tp": layout.tensor}
    of_experts = {"pp": layout.pipeline, "dp": replicas, "ep": layout.expert, "tp": layout.expert_tensor}
    for own, table in ((sizes, GROUPS), (of_experts, EXPERT_GROUPS)):
        for name, dimensions in table.items():
            for ranks in _spanning(layout.ranks, own, dimensions.split("-")):
                yield name, ranks
                if name == "pp":
                    yield from embedding_groups(ranks).items()


def embedding_groups(pipeline: Ranks) -> dict[str, Ranks]:
    """Return the groups of a pipeline's stages that hold word embeddings and position embeddings, by their fields."""
    return {"embd": tuple(dict.fromkeys((pipeline[0], pipeline[-1]))), "pos_embd": pipeline[:1]}


def num_groups(layouts: Iterable[Layout], world_size: int) -> int:
    """Return the number of process groups that components' ranks make: one for each set of ranks except for all."""
    found = {ranks for layout in layouts for _, ranks in rank_groups(layout)}
    return len(found - {tuple(range(world_size))})


def _spanning(ranks: Ranks, sizes: Mapping[str, int], dimensions: Sequence[str]) -> Iterator[Ranks]:
    """Return the groups over some dimensions of ranks that lie in a grid of these sizes, the slowest first.

    As megatron-core's RankGenerator, which loops over all ranks for each group.
    """
    groups = defaultdict[tuple[int, ...], list[int]](list)
    for rank, place in zip(ranks, product(*map(range, sizes.values())), strict=True):
        others = []  # the rank's place in the other dimensions, which its group shares
        for dimension, at in zip(sizes, place, strict=True):
            if dimension not in dimensions:
                others.append(at)
        groups[tuple(others)].append(rank)
    return map(tuple, groups.values())

"""Arrange the ranks of one component: the arithmetic of its kinds of parallelism. Without torch."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

START_TOKENS = {"cpu": (40, 6e6), "cuda": (240, 5.5e9)}
"""Fixed cost of a micro-batch, by device, in tokens that a layer could compute meanwhile: of moving the layer's weights
and gradients; and, to be divided by the square of the hidden size, of starting its operations. Estimates:
12 GB/s and 165 GFLOPS of a core, 2 ms a layer; 3.35 TB/s and 400 TFLOPS of an H100, 1 ms a layer."""


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
        ValueError: there are no ranks, one is there twice, or they do not divide into tensor x context x pipeline, or
            a stage's into runs of `expert` x `expert_tensor`.
    Source: Megatron-core's default rank order "tp-cp-ep-dp-pp", and the same with other sizes for experts.
    """

    ranks: tuple[int, ...]
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual_pipeline: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        if len(set(self.ranks)) < len(self.ranks):
            raise ValueError(f"a rank is there twice in {self.ranks}")
        if not self.ranks or len(self.ranks) % (self.tensor * self.context * self.pipeline):
            raise ValueError(
                f"{len(self.ranks)} ranks do not divide into replicas of "
                f"tensor {self.tensor} x context {self.context} x pipeline {self.pipeline}"
            )
        stage = self.tensor * self.context * self.data
        if stage % (self.expert * self.expert_tensor):
            raise ValueError(
                f"the {stage} ranks of a stage (tensor {self.tensor} x context {self.context} x data {self.data}) do "
                f"not divide by expert {self.expert} x expert_tensor {self.expert_tensor}"
            )

    @property
    def data(self) -> int:
        """Number of data-parallel shards."""
        return len(self.ranks) // (self.tensor * self.context * self.pipeline)

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
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Global ranks of each pipeline stage."""
        size = len(self.ranks) // self.pipeline
        return tuple(self.ranks[start : start + size] for start in range(0, len(self.ranks), size))

    def block(self, stage: int, shard: int) -> tuple[int, ...]:
        """Return the global ranks of one pipeline stage of one data-parallel shard."""
        size = self.tensor * self.context
        start = (stage * self.data + shard) * size
        return self.ranks[start : start + size]

    def shard_of(self, rank: int) -> int | None:
        """Return the data-parallel shard of a global rank; None if the component is not on it."""
        coordinates = self.coordinates(rank)
        return None if coordinates is None else coordinates.data

    def shard_ranks(self, shard: int) -> tuple[int, ...]:
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

    def gathering(self, needing: Collection[int], *, by_stage: bool = False) -> frozenset[int]:
        """Return the ranks that must join for some ranks to get the whole model, or `by_stage` their whole stage: those
        ranks, and all that share a group with one that joins. The others are data-parallel replicas.
        """
        found, joining = frozenset[int](), frozenset(needing)
        while found != joining:
            found = joining
            joining = self.sharing(found, self.tensor)
            joining = joining if by_stage else self.pipelines_of(joining)
            joining = self.sharing(joining, self.expert * self.expert_tensor)
        return found

"""Bytes that one model of a run takes on its ranks, and on their hosts."""

from collections import defaultdict
from dataclasses import dataclass

from megappo.architecture.dtypes import DTYPES
from megappo.config.schema import Parallel, Trained
from megappo.config.values import TensorKind
from megappo.estimate.model_memory import activation_bytes, head_bytes, micro_batches_in_flight, state_bytes
from megappo.estimate.shapes import Shape
from megappo.placement.batch_split import BatchSplit
from megappo.placement.components import ComponentSpec
from megappo.placement.layout import Layout

STATE_BYTES_PER_PARAMETER = 12
"""Main parameter and moments in fp32, which a save copies to the hosts of the ranks that share them."""


@dataclass(frozen=True)
class PlacedModel:
    """A model on its ranks. `stage` is the number of a pipeline stage.

    Attributes:
        dtype: of the weights.
    """

    spec: ComponentSpec
    layout: Layout
    shape: Shape
    split: BatchSplit
    dtype: str

    @property
    def parallel(self) -> Parallel:
        """The layout as the config has it."""
        return self.spec.parallel.value

    @property
    def section(self) -> Trained | None:
        """The config's section of a trained model."""
        return self.spec.training.section if self.spec.training else None

    @property
    def nbytes(self) -> int:
        """Bytes of a weight."""
        return DTYPES[self.dtype].nbytes

    def states(self, stage: int) -> dict[TensorKind, float]:
        """Return the bytes that a rank keeps from step to step."""
        size = self.shape.stages(self.parallel)[stage]
        trained = self.shape.stages(self.parallel, trained=True)[stage]
        return state_bytes(size, trained, self.layout, self.dtype, self.section.optim if self.section else None)

    def copied(self, stage: int) -> dict[TensorKind, float]:
        """Return the part of the states that is offloaded to pinned host memory; gradients are freed instead."""
        kinds = set(self.spec.offload.value) - {"gradients"}
        return {kind: size for kind, size in self.states(stage).items() if kind in kinds}

    def activations(self, stage: int, *, trains: bool) -> float:
        """Return the bytes of a pass through a stage's layers."""
        in_flight = micro_batches_in_flight(self.layout, stage, self.split.micro_batches[1]) if trains else 0
        return activation_bytes(
            self.shape.architecture,
            self.parallel,
            self.nbytes,
            self.shape.layers(self.parallel, stage),
            tokens=self.spec.max_tokens.value / self.parallel.context,
            in_flight=in_flight,
            recompute=self.section.recompute if self.section else "none",
        )

    def head(self, response_share: float, *, trains: bool) -> float:
        """Return the bytes of a pass through a policy's head.

        Args:
            response_share: share of a row's tokens that predict a response.
        """
        tokens = self.spec.max_tokens.value / self.parallel.context
        makes_grad = trains and self.spec.lora is None and self.layout.data * self.parallel.context > 1
        counts = tokens, tokens * response_share
        architecture, parallel = self.shape.architecture, self.parallel
        return head_bytes(architecture, parallel, self.nbytes, counts, training=trains, makes_grad=makes_grad)

    def saved(self, gpus_per_node: int) -> dict[int, float]:
        """Return node -> bytes that a save copies there; none of a model that is not trained."""
        nodes: dict[int, float] = defaultdict(float)
        if self.section is None:
            return nodes
        for ranks, size in zip(self.layout.stages, self.shape.stages(self.parallel, trained=True), strict=True):
            numbers = size.dense * self.layout.tensor + size.experts * self.layout.expert * self.layout.expert_tensor
            each = (STATE_BYTES_PER_PARAMETER + self.nbytes) * numbers / len(ranks)
            for rank in ranks:
                nodes[rank // gpus_per_node] += each
        return nodes

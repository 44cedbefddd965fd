"""What goes between pipeline stages."""

from collections.abc import Iterable, Iterator
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

Shape = tuple[int, ...]


class KnownShapes(P2PCommunicator):
    """Megatron's messages between stages, whose shapes every stage knows beforehand, of all micro-batches.

    Megatron has each message preceded by one with its shape, for which the GPU waits twice. Without virtual stages each
    stage takes micro-batches from the one before, and gradients from the one after, in their order.
    """

    _from_previous: Iterator[Shape]
    _from_next: Iterator[Shape]

    def expect(self, shapes: Iterable[Shape]) -> None:
        """Before each pass: the shapes of its micro-batches, in order."""
        shapes = list(shapes)
        self._from_previous, self._from_next = iter(shapes), iter(shapes)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape | None, Shape | None]:
        return next(self._from_previous) if recv_prev else None, next(self._from_next) if recv_next else None

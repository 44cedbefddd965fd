"""Handing a bucket to an SGLang engine: what a rank does for it, by the way the weights take."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from megappo.weights.buckets import Bucket


class Receiver(Protocol):
    """The part of an engine's client that weight updates need."""

    def begin_weight_update(self) -> None: ...

    def update_weights(self, payloads: Sequence[str], load_format: str | None) -> None: ...

    def update_weights_from_group(self, group: str, bucket: Bucket) -> None: ...

    def update_weights_from_disk(self, folder: Path) -> None: ...

    def end_weight_update(self) -> None: ...

    def flush_cache(self) -> None: ...


class HandOver:
    """One rank's part in handing weights over: `open`, `send` for each bucket, `close`; then, with all ranks, `settle`.

    `open` and every `send` run on a thread of their own, one after the other, while the next bucket is gathered. Where
    tensors are read in place, `share` comes before all of them, and `send_in_place` before the first bucket.

    Attributes:
        needs_weights: `send` needs the bucket's memory; others only learn what is in it.
        reads_in_place: tensors that the model has whole need not be gathered: `share` and `send_in_place` take them.
    """

    needs_weights = True
    reads_in_place = False

    def open(self) -> None:
        """Before the first bucket."""

    def buffer(self, size: int) -> torch.Tensor | None:
        """Memory to gather a bucket of so many bytes into, uint8; None = any. At most two are in use at a time."""
        return None

    def send(self, bucket: Bucket, flat: torch.Tensor | None) -> None:
        """Hand a bucket over, and return when its memory may be used again; `flat` may be None if it is not needed."""
        raise NotImplementedError

    def share(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Make tensors in the model's own memory readable by the engine, while nothing else uses them."""

    def send_in_place(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """As `send`, of tensors in the model's own memory."""
        raise NotImplementedError

    def close(self) -> None:
        """After the last bucket."""

    def settle(self) -> None:
        """When all ranks have closed."""

    def abort(self) -> None:
        """Instead of `close`, when a bucket could not be handed over."""


class Update(HandOver):
    """An update of one engine, which its owner opens and closes."""

    def __init__(self, receiver: Receiver):
        self.receiver = receiver

    def open(self) -> None:
        self.receiver.begin_weight_update()

    def close(self) -> None:
        self.receiver.end_weight_update()
        self.receiver.flush_cache()

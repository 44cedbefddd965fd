"""Weights for an engine that come from no Megatron model: any named tensors, in buckets as given."""

from collections.abc import Mapping, Sequence

import torch

from megappo.sync.handover import Receiver
from megappo.sync.ipc import HandleSender
from megappo.sync.sync import SyncStats, WeightSync
from megappo.weights.buckets import Bucket, TensorSpec, num_bytes

Weights = Sequence[tuple[str, torch.Tensor]]


class Given:
    """Tensors that are there already, whole."""

    def __init__(self, weights: Weights):
        self.weights = dict(weights)

    def takes_part(self, needs: bool) -> bool:
        return needs

    def in_place(self, tensor: TensorSpec) -> None:
        return None

    def gather(self, bucket: Bucket, flat: torch.Tensor | None = None) -> torch.Tensor:
        flat = torch.empty(num_bytes(bucket), dtype=torch.uint8) if flat is None else flat
        parts = [self.weights[tensor.name].detach().flatten().view(torch.uint8) for tensor in bucket]
        return flat.copy_(torch.cat(parts))


def specs(weights: Weights) -> list[TensorSpec]:
    return [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in weights]


def push(
    receiver: Receiver,
    weights: Weights,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    tensor_parallel: int = 1,
    bucket_bytes: int = 2**20,
) -> SyncStats:
    """Send them to an engine of this process."""
    sync = WeightSync(
        specs(weights),
        Given(weights),
        [HandleSender(receiver, tensor_parallel)],
        shapes,
        bucket_bytes=bucket_bytes,
        barrier=lambda: None,
        engines_keep=False,
    )
    return sync()

"""Buckets: whole Hugging Face tensors of one dtype, one after the other in one piece of memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import torch


@dataclass(frozen=True)
class TensorSpec:
    """A tensor as an engine knows it.

    Attributes:
        is_frozen: training does not change it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_frozen: bool = False

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


Bucket = Sequence[TensorSpec]
_Spec = TypeVar("_Spec", bound=TensorSpec)


def into_buckets(tensors: Sequence[_Spec], bucket_bytes: int) -> list[list[_Spec]]:
    """Consecutive tensors of one dtype, as many as fit; a single larger tensor is a bucket of its own."""
    buckets: list[list[_Spec]] = []
    room = 0
    for tensor in tensors:
        if not buckets or tensor.nbytes > room or tensor.dtype != buckets[-1][0].dtype:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(tensor)
        room -= tensor.nbytes
    return buckets


def num_bytes(bucket: Bucket) -> int:
    """Bytes of a bucket."""
    return sum(tensor.nbytes for tensor in bucket)


def views(bucket: Bucket, flat: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The bucket's tensors by name, as views of `flat`, uint8 [its bytes], in which they lie."""
    parts = flat.view(bucket[0].dtype).split([prod(tensor.shape) for tensor in bucket])
    return [(tensor.name, part.view(tensor.shape)) for tensor, part in zip(bucket, parts, strict=True)]

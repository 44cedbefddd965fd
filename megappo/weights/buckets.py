"""Buckets: whole Hugging Face tensors of one dtype, one after the other in memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from typing import TypeVar

import torch


@dataclass(frozen=True)
class TensorSpec:
    """A tensor as an engine knows it.

    Attributes:
        is_frozen: training does not change it.
        with_next: an engine needs it in one bucket with the tensor after it.
        sender_index: index in `SyncRoute.senders` of the rank that sends it; 0 if one rank sends all.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_frozen: bool = False
    with_next: bool = False
    sender_index: int = 0

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


Bucket = Sequence[TensorSpec]
NamedTensors = Sequence[tuple[str, torch.Tensor]]
_Spec = TypeVar("_Spec", bound=TensorSpec)


def into_buckets(tensors: Sequence[_Spec], bucket_bytes: int) -> list[list[_Spec]]:
    """Cut the tensors into buckets: runs of one dtype, as many as fit. A larger tensor, or a run of tensors that are
    needed together, is a bucket by itself."""
    runs: list[list[_Spec]] = []
    joins_last = False
    for tensor in tensors:
        if not joins_last:
            runs.append([])
        runs[-1].append(tensor)
        joins_last = tensor.with_next
    buckets: list[list[_Spec]] = []
    room = 0
    for run in runs:
        if num_bytes(run) > room or run[0].dtype != buckets[-1][0].dtype:
            buckets.append([])
            room = bucket_bytes
        buckets[-1] += run
        room -= num_bytes(run)
    return buckets


def in_turns(tensors: Sequence[_Spec], bucket_bytes: int) -> list[list[_Spec]]:
    """Cut into buckets for several senders, which take turns: each gathers its own while the others send theirs."""
    numbers = sorted({tensor.sender_index for tensor in tensors})
    each = [into_buckets([one for one in tensors if one.sender_index == number], bucket_bytes) for number in numbers]
    return [bucket for turn in zip_longest(*each, fillvalue=[]) for bucket in turn if bucket]


def num_bytes(bucket: Bucket) -> int:
    """Return the bytes of a bucket."""
    return sum(tensor.nbytes for tensor in bucket)


def views(bucket: Bucket, flat: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the bucket's tensors by name, as views of its memory `flat`, uint8 [its bytes]."""
    parts = flat.view(bucket[0].dtype).split([prod(tensor.shape) for tensor in bucket])
    return [(tensor.name, part.view(tensor.shape)) for tensor, part in zip(bucket, parts, strict=True)]


def all_finite(values: torch.Tensor) -> bool:
    """Return whether all values are finite."""
    # A sum takes one pass and no memory. If it overflows although all values are finite, the second test passes.
    return bool(values.sum(dtype=torch.float32).isfinite()) or bool(values.isfinite().all())

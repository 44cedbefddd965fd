"""Exporting a Megatron model's weights under their Hugging Face names, whole tensors, a bounded bucket at a time."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from megappo.models.hf_config import HeadKind
from megappo.placement.groups import ComponentGroups
from megappo.weights.families import SECOND_HEAD, Piece, compositions, pieces_of
from megappo.weights.shards import check_parameters, decompose, global_parameters

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NOBODY = 2**31


@dataclass(frozen=True)
class _Export:
    """One tensor to export: the pipeline stage it comes from, and its dtype."""

    piece: Piece
    owner: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.piece.shape) * self.dtype.itemsize


@torch.no_grad()
def iter_hf_buckets(
    model: GPTModel,
    hf_config: dict[str, Any],
    groups: ComponentGroups,
    bucket_bytes: int,
    *,
    head: HeadKind = "policy",
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The whole model on every rank of the component, bucket by bucket: [(Hugging Face name, full tensor)].

    Every rank must run the iteration to its end. Each data-parallel replica works for itself. A bucket's tensors are
    contiguous, on the model's device, in the parameters' dtype, and copies: up to about two buckets of extra memory.
    Tied embeddings come once, as the embedding; padding of the vocabulary is left out.

    Args:
        model: unwrapped, with the current weights.
        bucket_bytes: largest sum of a bucket's tensors; a single larger tensor is a bucket of its own.
        head: "policy" is the language model, without the value head that a shared backbone has besides; "value" a
            critic; "policy_value" the whole of a shared backbone. A value head is exported as `score.weight`, and
            `score.bias` if it has one.
    Raises:
        ValueError: a parameter without Hugging Face name, or a tensor that no stage holds; each named.
    """
    table = compositions(
        hf_config,
        tensor=groups.collection.tp.size(),
        padded_vocab_size=model.vocab_size,
        head=head,
    )
    parameters = global_parameters(model)
    if head == "policy":
        parameters = {name: value for name, value in parameters.items() if not name.startswith(f"{SECOND_HEAD}.")}
    check_parameters(parameters, table)
    held = {piece.name: name for name in parameters for piece in table[name].pieces}
    exports = _plan(list(pieces_of(table).values()), held, parameters, groups.collection.pp)
    for bucket in _buckets(exports, bucket_bytes):
        names = {export.piece.name: held[export.piece.name] for export in bucket if export.piece.name in held}
        shards = {piece: decompose(parameters[name], table[name])[piece] for piece, name in names.items()}
        yield _gather(bucket, shards, next(model.parameters()).device, groups)


def _plan(
    pieces: list[Piece],
    held: Mapping[str, str],
    parameters: Mapping[str, torch.nn.Parameter],
    pipeline: dist.ProcessGroup,
) -> list[_Export]:
    """Owner and dtype of every tensor, agreed on by the stages: of two that hold a tensor, the first."""
    mine = [
        [pipeline.rank(), _DTYPES.index(parameters[held[piece.name]].dtype)] if piece.name in held else [_NOBODY] * 2
        for piece in pieces
    ]
    agreed = torch.tensor(mine, device=next(iter(parameters.values())).device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=pipeline)
    missing = [piece.name for piece, (owner, _) in zip(pieces, agreed.tolist(), strict=True) if owner == _NOBODY]
    if missing:
        raise ValueError(
            f"no pipeline stage of the model holds {', '.join(missing)}; build the model from this config.json"
        )
    return [
        _Export(piece, owner, _DTYPES[dtype]) for piece, (owner, dtype) in zip(pieces, agreed.tolist(), strict=True)
    ]


def _buckets(exports: Iterable[_Export], bucket_bytes: int) -> Iterator[list[_Export]]:
    """Consecutive tensors of one dtype, as many as fit."""
    bucket: list[_Export] = []
    for export in exports:
        full = sum(kept.nbytes for kept in bucket) + export.nbytes > bucket_bytes
        if bucket and (full or export.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(export)
    yield bucket


def _gather(
    bucket: list[_Export], shards: Mapping[str, torch.Tensor], device: torch.device, groups: ComponentGroups
) -> list[tuple[str, torch.Tensor]]:
    """Whole tensors: shards go over the pipeline in one message per owner, then over tensor parallelism in one."""
    tensor, pipeline = groups.collection.tp, groups.collection.pp
    sizes = [prod(export.piece.shard_shape) for export in bucket]
    flat = torch.empty(sum(sizes), dtype=bucket[0].dtype, device=device)
    places = flat.split(sizes)
    for export, place in zip(bucket, places, strict=True):
        if export.owner == pipeline.rank():
            shard = shards[export.piece.name]
            place.view(shard.shape).copy_(shard)
    start = 0
    for owner, exports in groupby(bucket, key=lambda export: export.owner):
        length = sum(prod(export.piece.shard_shape) for export in exports)
        dist.broadcast(flat[start : start + length], dist.get_global_rank(pipeline, owner), group=pipeline)
        start += length
    gathered = flat.new_empty(tensor.size() * len(flat))
    dist.all_gather_into_tensor(gathered, flat, group=tensor)
    columns = gathered.view(tensor.size(), -1).split(sizes, dim=1)
    return [(export.piece.name, _join(export.piece, part)) for export, part in zip(bucket, columns, strict=True)]


def _join(piece: Piece, shards: torch.Tensor) -> torch.Tensor:
    """The whole tensor from every tensor-parallel rank's flattened shard, [tp, elements]."""
    shards = shards.unflatten(1, piece.shard_shape)
    if piece.shard_dim is None:
        return shards[0].clone()
    whole = shards.movedim(0, piece.shard_dim).flatten(piece.shard_dim, piece.shard_dim + 1)
    return whole.narrow(piece.shard_dim, 0, piece.shape[piece.shard_dim]).contiguous()

"""Exporting a Megatron model's weights under their Hugging Face names, whole tensors, a bounded bucket at a time."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from megappo.models.build import ModelChunks
from megappo.models.hf_config import HeadKind
from megappo.placement.groups import ComponentGroups
from megappo.weights.families import SECOND_HEAD, Piece, compositions, pieces_of
from megappo.weights.shards import check_parameters, decompose, global_parameters

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NOBODY = 2**31


@dataclass(frozen=True)
class _Export:
    """One tensor to export: the pipeline stage it comes from, and its dtype.

    Of an expert's, `expert_owner` is the expert-parallel rank that has it; all have the others.
    """

    piece: Piece
    owner: int
    dtype: torch.dtype
    expert_owner: int | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.piece.shape) * self.dtype.itemsize


@torch.no_grad()
def iter_hf_buckets(
    chunks: ModelChunks,
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
        chunks: unwrapped, with the current weights.
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
        padded_vocab_size=chunks[0].vocab_size,
        head=head,
    )
    parameters = global_parameters(chunks)
    if head == "policy":
        parameters = {name: value for name, value in parameters.items() if not name.startswith(f"{SECOND_HEAD}.")}
    check_parameters(parameters, table)
    held = {piece.name: name for name in parameters for piece in table[name].pieces}
    exports = _plan(list(pieces_of(table).values()), held, parameters, groups)
    for bucket in _buckets(exports, bucket_bytes):
        names = {export.piece.name: held[export.piece.name] for export in bucket if export.piece.name in held}
        shards = {piece: decompose(parameters[name], table[name])[piece] for piece, name in names.items()}
        yield _gather(bucket, shards, next(chunks[0].parameters()).device, groups)


def _plan(
    pieces: list[Piece],
    held: Mapping[str, str],
    parameters: Mapping[str, torch.nn.Parameter],
    groups: ComponentGroups,
) -> list[_Export]:
    """Owner and dtype of every tensor, agreed on by the stages: of two that hold a tensor, the first."""
    pipeline, expert = groups.collection.pp, groups.collection.ep
    mine = [
        [pipeline.rank(), _DTYPES.index(parameters[held[piece.name]].dtype)] if piece.name in held else [_NOBODY] * 2
        for piece in pieces
    ]
    agreed = torch.tensor(mine, device=next(iter(parameters.values())).device)
    for group in (pipeline, expert):
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
    missing = [piece.name for piece, (owner, _) in zip(pieces, agreed.tolist(), strict=True) if owner == _NOBODY]
    if missing:
        raise ValueError(
            f"no pipeline stage of the model holds {', '.join(missing)}; build the model from this config.json"
        )
    of_experts = [piece.expert for piece in pieces if piece.expert is not None]
    per_rank = (max(of_experts) + 1) // expert.size() if of_experts else 1
    return [
        _Export(piece, owner, _DTYPES[dtype], None if piece.expert is None else piece.expert // per_rank)
        for piece, (owner, dtype) in zip(pieces, agreed.tolist(), strict=True)
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
    """Whole tensors, in the bucket's order, in few messages: shards go from their owners over expert parallelism and
    then the pipeline, and those of cut tensors over tensor parallelism."""
    cut = [export for export in bucket if export.piece.shard_dim is not None]
    whole = [export for export in bucket if export.piece.shard_dim is None]
    ordered = cut + whole
    sizes = [prod(export.piece.shard_shape) for export in ordered]
    flat = torch.empty(sum(sizes), dtype=bucket[0].dtype, device=device)
    places = flat.split(sizes)
    for export, place in zip(ordered, places, strict=True):
        if export.piece.name in shards and export.owner == groups.collection.pp.rank():
            shard = shards[export.piece.name]
            place.view(shard.shape).copy_(shard)
    _broadcast(ordered, sizes, flat, groups)
    end = sum(sizes[: len(cut)])
    found = _gather_cut(cut, flat[:end], sizes[: len(cut)], groups.collection.tp)
    pieces = zip(whole, places[len(cut) :], strict=True)
    found |= {export.piece.name: place.view(export.piece.shape).clone() for export, place in pieces}
    return [(export.piece.name, found[export.piece.name]) for export in bucket]


def _broadcast(exports: list[_Export], sizes: list[int], flat: torch.Tensor, groups: ComponentGroups) -> None:
    """Fill in the shards of `flat` that other ranks own, a message for each run of one owner's."""
    pipeline, expert = groups.collection.pp, groups.collection.ep
    for (owner, expert_owner), part in _runs(exports, sizes, flat, lambda export: (export.owner, export.expert_owner)):
        if expert_owner is not None and owner == pipeline.rank():
            dist.broadcast(part, dist.get_global_rank(expert, expert_owner), group=expert)
    for owner, part in _runs(exports, sizes, flat, lambda export: export.owner):
        dist.broadcast(part, dist.get_global_rank(pipeline, owner), group=pipeline)


def _runs(
    exports: list[_Export], sizes: list[int], flat: torch.Tensor, key: Callable[[_Export], Any]
) -> Iterator[tuple[Any, torch.Tensor]]:
    """The part of `flat` of each run of consecutive exports with the same key."""
    start = 0
    for value, run in groupby(zip(exports, sizes, strict=True), key=lambda pair: key(pair[0])):
        length = sum(size for _, size in run)
        yield value, flat[start : start + length]
        start += length


def _gather_cut(
    exports: list[_Export], flat: torch.Tensor, sizes: list[int], tensor: dist.ProcessGroup
) -> dict[str, torch.Tensor]:
    """Whole tensors by name, from every tensor-parallel rank's shards."""
    gathered = flat.new_empty(tensor.size() * len(flat))
    dist.all_gather_into_tensor(gathered, flat, group=tensor)
    columns = gathered.view(tensor.size(), -1).split(sizes, dim=1)
    return {export.piece.name: _join(export.piece, part) for export, part in zip(exports, columns, strict=True)}


def _join(piece: Piece, shards: torch.Tensor) -> torch.Tensor:
    """The whole tensor from every tensor-parallel rank's flattened shard, [tp, elements]."""
    shards = shards.unflatten(1, piece.shard_shape)
    whole = shards.movedim(0, piece.shard_dim).flatten(piece.shard_dim, piece.shard_dim + 1)
    return whole.narrow(piece.shard_dim, 0, piece.shape[piece.shard_dim]).contiguous()

"""Exporting a Megatron model's weights under their Hugging Face names, whole tensors, a bounded bucket at a time."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from megappo.architecture.architecture import Architecture
from megappo.architecture.parameters import LORA_A, LORA_B, SECOND_HEAD, Parameter, Piece, is_adapter, pieces_of
from megappo.models.build import ModelChunks
from megappo.models.dtypes import TORCH_DTYPES
from megappo.placement.groups import ComponentGroups
from megappo.runtime.heartbeat import LIFE
from megappo.weights.buckets import TensorSpec, into_buckets, num_bytes, views
from megappo.weights.shards import check_parameters, cut_over, decompose, global_parameters, table_of

PORTION_BYTES = 32 * 2**20  # of a bucket, gathered from tensor-parallel ranks at a time
_DTYPES = tuple(TORCH_DTYPES.values())  # numbered, for ranks to agree on one
_NOBODY = 2**31


@dataclass(frozen=True, kw_only=True)
class ExportedTensor(TensorSpec):
    """One tensor of an export, and the pipeline stage it comes from.

    Of an expert's, `expert_owner` is the expert-parallel rank that has it; all have the others.
    """

    piece: Piece
    owner: int
    expert_owner: int | None

    @property
    def cut(self) -> tuple[bool, bool]:
        """Equal where the same ranks have parts: whether all have the whole of it, and whether it is an expert's."""
        return self.piece.shard_dim is None, self.piece.expert is not None


class Export:
    """A model's weights as whole Hugging Face tensors, on this rank of the component.

    Every rank of the component makes it together. The parameters are read when buckets are gathered, so that one export
    serves as long as the model.

    Args:
        chunks: unwrapped.
        architecture: under the head that is exported: "policy" is the language model, without the value head that a
            shared backbone has besides; "value" a critic; "policy_value" the whole of a shared backbone. A value head
            is exported as `score.weight`, and `score.bias` if it has one.
        needing: the ranks that need the tensors, the same everywhere; None = all of the component's.
        by_stage: they need those alone that their own pipeline stage gives: nothing goes from stage to stage. A bucket
            then is of one stage, `sender`, and gathered by its ranks.
        adapters: these alone are exported; else they are merged into the weights beside which they stand.
    Attributes:
        tensors: in the order in which they are gathered. Tied embeddings come once, as the embedding.
        joins: whether this rank must join in `gather`, for itself or for others. The rest may go their ways.
        sender: the `sender` of the tensors that this rank gathers.
    Raises:
        ValueError: a parameter without Hugging Face name, or a tensor that no stage holds; each named.
    """

    def __init__(
        self,
        chunks: ModelChunks,
        architecture: Architecture,
        groups: ComponentGroups,
        *,
        needing: Collection[int] | None = None,
        by_stage: bool = False,
        adapters: bool = False,
    ):
        self.groups, layout = groups, groups.layout
        table, parameters = table_of(architecture, groups), global_parameters(chunks)
        self._merged = {} if adapters else _pairs(table, parameters)
        self._scale = architecture.lora.scale if architecture.lora else 0.0
        self._table = {name: one for name, one in table.items() if is_adapter(name) == adapters}
        parameters = {name: value for name, value in parameters.items() if is_adapter(name) == adapters}
        if architecture.head == "policy":
            parameters = {name: value for name, value in parameters.items() if not name.startswith(f"{SECOND_HEAD}.")}
        check_parameters(parameters, self._table)
        self._parameters = parameters
        self._held = {piece.name: name for name in parameters for piece in self._table[name].pieces}
        self._device = next(chunks[0].parameters()).device
        tensors = _plan(list(pieces_of(self._table.values()).values()), self._held, parameters, groups)
        if by_stage:
            tensors = [replace(tensor, sender=tensor.owner) for tensor in tensors]
        self.sender = groups.collection.pp.rank() if by_stage else 0
        # Like ones together: fewer messages, and fewer buckets, each of one dtype.
        self.tensors = sorted(tensors, key=lambda tensor: (tensor.cut, str(tensor.dtype)))
        # Who takes what is passed on over the ranks that a tensor is cut over, over the pipeline, over the experts.
        self._whole = frozenset(layout.ranks if needing is None else needing)
        self._shards = layout.sharing(self._whole, layout.tensor) | layout.sharing(self._whole, layout.expert_tensor)
        self._stages = frozenset() if by_stage else self._shards
        self._experts = self._shards if by_stage else layout.pipelines_of(self._shards)
        self.joins = dist.get_rank() in layout.gathering(self._whole, by_stage=by_stage)

    def buckets(self, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Everything, [(Hugging Face name, full tensor)] after another; all ranks that take part run it to its end."""
        for bucket in into_buckets(self.tensors, bucket_bytes):
            yield views(bucket, self.gather(bucket))

    @torch.no_grad()
    def gather(self, bucket: Sequence[ExportedTensor], flat: torch.Tensor | None = None) -> torch.Tensor:
        """A bucket of `tensors`; all ranks that take part call it together, for the same buckets.

        Args:
            flat: where to put them, uint8 [their bytes] on the model's device; None = newly allocated.
        Returns:
            `flat`, of copies in the parameters' dtype, padding of the vocabulary left out; see `views`. On a rank
            that is not among those `needing` them its values mean nothing.
        """
        LIFE.sign()
        if flat is None:
            flat = torch.empty(num_bytes(bucket), dtype=torch.uint8, device=self._device)
        elements = flat.view(bucket[0].dtype)
        start = 0
        for tensors in _portions(bucket, self._is_gathered):
            length = sum(prod(tensor.shape) for tensor in tensors)
            self._gather(tensors, elements[start : start + length])
            start += length
        return flat

    def _gather(self, tensors: Sequence[ExportedTensor], target: torch.Tensor) -> None:
        """Fill `target` with whole tensors: shards go from their owners over expert parallelism and the pipeline, and
        then, unless there is but one of each, over the ranks that the tensors are cut over."""
        if not self._is_gathered(tensors[0]):
            self._own_shards(tensors, target)
            return
        tensor = cut_over(tensors[0].piece, self.groups)
        sizes = [prod(one.piece.shard_shape) for one in tensors]
        if len(tensors) == 1 and tensors[0].piece.shard_dim == 0 and len(target) == tensor.size() * sizes[0]:
            rows = target.view(tensor.size(), -1)
            self._own_shards(tensors, rows[tensor.rank()])
            _fill_rows(rows, tensor, self._whole)
            return
        rows = target.new_empty(tensor.size(), sum(sizes))
        self._own_shards(tensors, rows[tensor.rank()])
        _fill_rows(rows, tensor, self._whole)
        if dist.get_rank() not in self._whole:
            return
        columns = rows.split(sizes, dim=1)
        places = target.split([prod(one.shape) for one in tensors])
        for one, column, place in zip(tensors, columns, places, strict=True):
            _join(one.piece, column, place.view(one.shape))

    def _is_gathered(self, tensor: ExportedTensor) -> bool:
        """Whether several ranks have parts of it."""
        return tensor.piece.shard_dim is not None and cut_over(tensor.piece, self.groups).size() > 1

    def _shard_of(self, tensor: ExportedTensor) -> torch.Tensor:
        """This rank's shard of a tensor that it has, as `decompose` gives it. It has what that needs of an adapter, in
        whichever dimension the matrix is cut."""
        name = self._held[tensor.name]
        shard = decompose(self._parameters[name], self._table[name])[tensor.name]
        if tensor.name not in self._merged:
            return shard
        a, b = (matrix.detach().float() for matrix in self._merged[tensor.name])
        return (shard.float() + self._scale * (b @ a).view_as(shard)).to(shard.dtype)

    def _own_shards(self, tensors: Sequence[ExportedTensor], flat: torch.Tensor) -> None:
        """Fill `flat` with the shards that this rank gives to `_gather`, from their owners: a message for each run of
        one's."""
        pipeline, expert = self.groups.collection.pp, self.groups.collection.ep
        sizes = [prod(tensor.piece.shard_shape) for tensor in tensors]
        for tensor, place in zip(tensors, flat.split(sizes), strict=True):
            if tensor.name in self._held and tensor.owner == pipeline.rank():
                shard = self._shard_of(tensor)
                place.view(shard.shape).copy_(shard)
        for (owner, expert_owner), part in _runs(tensors, sizes, flat, lambda one: (one.owner, one.expert_owner)):
            if expert_owner is not None and owner == pipeline.rank():
                _pass_on(part, expert_owner, expert, self._experts)
        for owner, part in _runs(tensors, sizes, flat, lambda one: one.owner):
            _pass_on(part, owner, pipeline, self._stages)


def _pairs(
    table: Mapping[str, Parameter], parameters: Mapping[str, torch.Tensor]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A rank's adapters, a and b, by the Hugging Face matrix beside which they stand."""
    found = {table[name].pieces[0].name: value for name, value in parameters.items() if is_adapter(name)}
    matrices = [name.removesuffix(LORA_A) for name in found if name.endswith(LORA_A)]
    return {f"{matrix}.weight": (found[matrix + LORA_A], found[matrix + LORA_B]) for matrix in matrices}


def _plan(
    pieces: list[Piece],
    held: Mapping[str, str],
    parameters: Mapping[str, torch.Tensor],
    groups: ComponentGroups,
) -> list[ExportedTensor]:
    """What is known of every tensor, agreed on by the stages: of two that hold a tensor, the first is the owner."""
    pipeline, expert = groups.collection.pp, groups.collection.ep

    def known(piece: Piece) -> list[int]:
        if piece.name not in held:
            return [_NOBODY] * 3
        parameter = parameters[held[piece.name]]
        return [pipeline.rank(), _DTYPES.index(parameter.dtype), int(parameter.requires_grad)]

    agreed = torch.tensor([known(piece) for piece in pieces], device=next(iter(parameters.values())).device)
    for group in (pipeline, expert):
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
    found = list(zip(pieces, agreed.tolist(), strict=True))
    missing = [piece.name for piece, (owner, _, _) in found if owner == _NOBODY]
    if missing:
        raise ValueError(
            f"no pipeline stage of the model holds {', '.join(missing)}; build the model from this config.json"
        )
    of_experts = [piece.expert for piece in pieces if piece.expert is not None]
    per_rank = (max(of_experts) + 1) // expert.size() if of_experts else 1
    return [
        ExportedTensor(
            name=piece.name,
            shape=piece.shape,
            dtype=_DTYPES[dtype],
            is_frozen=not is_trained,
            with_next=piece.with_next,
            piece=piece,
            owner=owner,
            expert_owner=None if piece.expert is None else piece.expert // per_rank,
        )
        for piece, (owner, dtype, is_trained) in found
    ]


def _portions(
    bucket: Sequence[ExportedTensor], is_gathered: Callable[[ExportedTensor], bool]
) -> Iterator[list[ExportedTensor]]:
    """The bucket in runs that are gathered at once: of cut tensors, so many that the memory beside them stays small."""
    for (is_cut, _), run in groupby(bucket, key=lambda tensor: (is_gathered(tensor), tensor.cut)):
        if not is_cut:
            yield list(run)
            continue
        portion: list[ExportedTensor] = []
        for tensor in run:
            if portion and sum(kept.nbytes for kept in portion) + tensor.nbytes > PORTION_BYTES:
                yield portion
                portion = []
            portion.append(tensor)
        yield portion


def _runs(
    tensors: Iterable[ExportedTensor], sizes: list[int], flat: torch.Tensor, key: Callable[[ExportedTensor], Any]
) -> Iterator[tuple[Any, torch.Tensor]]:
    """The part of `flat` of each run of consecutive tensors with the same key."""
    start = 0
    for value, run in groupby(zip(tensors, sizes, strict=True), key=lambda pair: key(pair[0])):
        length = sum(size for _, size in run)
        yield value, flat[start : start + length]
        start += length


def _pass_on(part: torch.Tensor, source: int, group: dist.ProcessGroup, takers: Collection[int]) -> None:
    """Give memory of one rank of a group, by its number there, to those of the group that take it."""
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank()
    owner = ranks[source]
    others = [other for other in ranks if other in takers and other != owner]
    if len(others) > 1:
        dist.broadcast(part, owner, group=group)
    elif others and rank == owner:
        dist.send(part, others[0], group=group)
    elif others and rank == others[0]:
        dist.recv(part, owner, group=group)


def _fill_rows(rows: torch.Tensor, group: dist.ProcessGroup, takers: Collection[int]) -> None:
    """Fill `rows` [ranks of the group, elements], of which each rank has its own, on those that take them."""
    if rows.is_cuda and all(rank in takers for rank in dist.get_process_group_ranks(group)):
        dist.all_gather_into_tensor(rows, rows[group.rank()], group=group)
        return
    for number, row in enumerate(rows):  # gloo's all_gather takes longer, and keeps a copy of them all
        _pass_on(row, number, group, takers)


def _join(piece: Piece, shards: torch.Tensor, whole: torch.Tensor) -> None:
    """Fill a tensor in from every tensor-parallel rank's flattened shard, [tp, elements]."""
    shards = shards.unflatten(1, piece.shard_shape)
    if len(shards) * piece.shard_shape[piece.shard_dim] == piece.shape[piece.shard_dim]:
        whole.unflatten(piece.shard_dim, (len(shards), -1)).copy_(shards.movedim(0, piece.shard_dim))
    else:  # the last rows are padding
        whole.copy_(shards.flatten(0, 1)[: len(whole)])

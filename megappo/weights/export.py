"""Exporting a Megatron model's weights under their Hugging Face names, whole tensors, a bounded bucket at a time."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from megappo.architecture.architecture import Architecture
from megappo.architecture.parameters import LORA_A, LORA_B, SECOND_HEAD, HFTensor, Parameter, hf_tensors_of, is_adapter
from megappo.models.gpt import ModelChunks
from megappo.models.megatron_config import TORCH_DTYPES
from megappo.placement.groups import ComponentGroups
from megappo.runtime.heartbeat import heartbeat
from megappo.weights.buckets import NamedTensors, TensorSpec, into_buckets, num_bytes, views
from megappo.weights.shards import check_parameters, cut_over, decompose, global_parameters, table_of

PORTION_BYTES = 32 * 2**20  # of a bucket, gathered from tensor-parallel ranks at a time
_DTYPES = tuple(TORCH_DTYPES.values())  # numbered, for ranks to agree on one
_NOBODY = 2**31


@dataclass(frozen=True, kw_only=True)
class ExportedTensor(TensorSpec):
    """One tensor of an export.

    Attributes:
        hf: its shards.
        stage: the pipeline stage that it comes from.
        expert_rank: the expert-parallel rank that has an expert's tensor; None for the others, which all ranks have.
    """

    hf: HFTensor
    stage: int
    expert_rank: int | None

    @property
    def cut(self) -> tuple[bool, bool]:
        """Whole on all ranks, and an expert's: tensors for which both are equal have their shards on the same ranks."""
        return self.hf.shard_dim is None, self.hf.expert is not None


class Export:
    """A model's weights as whole Hugging Face tensors, on this rank of the component.

    Every rank of the component makes it together. The parameters are read when buckets are gathered, so one export
    serves as long as the model.

    Args:
        chunks: unwrapped.
        architecture: under the head that is exported: "policy" is the language model, without the value head that a
            shared backbone has besides; "value" a critic; "policy_value" the whole of a shared backbone. A value head
            is exported as `score.weight`, and `score.bias` if it has one.
        needing: the ranks that need the tensors, the same everywhere; None = all of the component's.
        by_stage: each needs only the tensors of its own pipeline stage: nothing goes from stage to stage. A bucket then
            is of one stage, `sender`, and gathered by its ranks.
        adapters: only these are exported; otherwise they are merged into the weights that they adapt.
    Attributes:
        tensors: in the order in which they are gathered. Tied embeddings come once, as the embedding.
        joins: this rank must join in `gather`, for itself or for others.
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
        self._merged = {} if adapters else _adapter_pairs(table, parameters)
        self._scale = architecture.lora.scale if architecture.lora else 0.0
        left_out = (f"{SECOND_HEAD}.",) if architecture.head == "policy" else ()
        self._table = {name: entry for name, entry in table.items() if is_adapter(name) == adapters}
        self._parameters = {
            name: parameter
            for name, parameter in parameters.items()
            if is_adapter(name) == adapters and not name.startswith(left_out)
        }
        check_parameters(self._parameters, self._table)
        self._held = {hf.name: name for name in self._parameters for hf in self._table[name].hf_tensors}
        self._device = next(chunks[0].parameters()).device
        tensors = _plan(list(hf_tensors_of(self._table.values()).values()), self._held, self._parameters, groups)
        if by_stage:
            tensors = [replace(tensor, sender=tensor.stage) for tensor in tensors]
        self.sender = groups.collection.pp.rank() if by_stage else 0
        # Like ones together: fewer messages, and fewer buckets, each of one dtype.
        self.tensors = sorted(tensors, key=lambda tensor: (tensor.cut, str(tensor.dtype)))
        # The ranks that receive whole tensors, and shards of them from other ranks, stages and experts.
        self._whole = frozenset(layout.ranks if needing is None else needing)
        self._shards = layout.sharing(self._whole, layout.tensor) | layout.sharing(self._whole, layout.expert_tensor)
        self._stages = frozenset() if by_stage else self._shards
        self._experts = self._shards if by_stage else layout.pipelines_of(self._shards)
        self.joins = dist.get_rank() in layout.gathering(self._whole, by_stage=by_stage)

    def buckets(self, bucket_bytes: int) -> Iterator[NamedTensors]:
        """Everything, [(Hugging Face name, full tensor)] after another; all ranks that take part run it to its end."""
        for bucket in into_buckets(self.tensors, bucket_bytes):
            yield views(bucket, self.gather(bucket))

    @torch.no_grad()
    def gather(self, bucket: Sequence[ExportedTensor], flat: torch.Tensor | None = None) -> torch.Tensor:
        """Gather a bucket of `tensors`; all ranks that take part call it together, for the same buckets.

        Args:
            flat: where to put them, uint8 [their bytes] on the model's device; None = newly allocated.
        Returns:
            `flat`, of copies in the parameters' dtype, padding of the vocabulary left out; see `views`. On a rank
            that is not among those `needing` them its values mean nothing.
        """
        heartbeat.beat()
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
        then, where several ranks have shards, over these."""
        if not self._is_gathered(tensors[0]):
            self._own_shards(tensors, target)
            return
        group = cut_over(tensors[0].hf, self.groups)
        sizes = [prod(tensor.hf.shard_shape) for tensor in tensors]
        # A single tensor that is cut into rows, without padding, needs no memory besides.
        is_in_place = len(tensors) == 1 and tensors[0].hf.shard_dim == 0 and len(target) == group.size() * sizes[0]
        rows = target.view(group.size(), -1) if is_in_place else target.new_empty(group.size(), sum(sizes))
        self._own_shards(tensors, rows[group.rank()])
        _fill_rows(rows, group, self._whole)
        if is_in_place or dist.get_rank() not in self._whole:
            return
        places = target.split([prod(tensor.shape) for tensor in tensors])
        for tensor, shards, place in zip(tensors, rows.split(sizes, dim=1), places, strict=True):
            _join(tensor.hf, shards, place.view(tensor.shape))

    def _is_gathered(self, tensor: ExportedTensor) -> bool:
        """Several ranks have shards of it."""
        return tensor.hf.shard_dim is not None and cut_over(tensor.hf, self.groups).size() > 1

    def _shard_of(self, tensor: ExportedTensor) -> torch.Tensor:
        """This rank's shard of a tensor that it has, as `decompose` gives it, with its adapter merged into it: a rank
        has the shards of the adapter that it needs for that."""
        name = self._held[tensor.name]
        shard = decompose(self._parameters[name], self._table[name])[tensor.name]
        if tensor.name not in self._merged:
            return shard
        a, b = (matrix.detach().float() for matrix in self._merged[tensor.name])
        return (shard.float() + self._scale * (b @ a).view_as(shard)).to(shard.dtype)

    def _own_shards(self, tensors: Sequence[ExportedTensor], flat: torch.Tensor) -> None:
        """Fill `flat` with the shards that this rank gives to `_gather`, from their owners: a message for each run of
        tensors with one owner."""
        pipeline, expert = self.groups.collection.pp, self.groups.collection.ep
        sizes = [prod(tensor.hf.shard_shape) for tensor in tensors]
        for tensor, place in zip(tensors, flat.split(sizes), strict=True):
            if tensor.name in self._held and tensor.stage == pipeline.rank():
                shard = self._shard_of(tensor)
                place.view(shard.shape).copy_(shard)
        for (stage, expert_rank), part in _runs(tensors, sizes, flat, lambda one: (one.stage, one.expert_rank)):
            if expert_rank is not None and stage == pipeline.rank():
                _pass_on(part, expert_rank, expert, self._experts)
        for stage, part in _runs(tensors, sizes, flat, lambda one: one.stage):
            _pass_on(part, stage, pipeline, self._stages)


def _adapter_pairs(
    table: Mapping[str, Parameter], parameters: Mapping[str, torch.Tensor]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A rank's adapters, a and b, by the Hugging Face matrix that they adapt."""
    found = {table[name].hf_tensors[0].name: value for name, value in parameters.items() if is_adapter(name)}
    matrices = [name.removesuffix(LORA_A) for name in found if name.endswith(LORA_A)]
    return {f"{matrix}.weight": (found[matrix + LORA_A], found[matrix + LORA_B]) for matrix in matrices}


def _plan(
    hf_tensors: list[HFTensor],
    held: Mapping[str, str],
    parameters: Mapping[str, torch.Tensor],
    groups: ComponentGroups,
) -> list[ExportedTensor]:
    """Agree on stage, dtype and training of every tensor: where two stages hold a tensor, the first gives it."""
    pipeline, expert = groups.collection.pp, groups.collection.ep
    known = []
    for hf in hf_tensors:
        parameter = parameters[held[hf.name]] if hf.name in held else None
        if parameter is None:
            known.append([_NOBODY] * 3)
        else:
            known.append([pipeline.rank(), _DTYPES.index(parameter.dtype), int(parameter.requires_grad)])
    agreed = torch.tensor(known, device=next(iter(parameters.values())).device)
    for group in (pipeline, expert):
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
    found = list(zip(hf_tensors, agreed.tolist(), strict=True))
    missing = [hf.name for hf, (stage, _, _) in found if stage == _NOBODY]
    if missing:
        raise ValueError(
            f"no pipeline stage of the model holds {', '.join(missing)}; build the model from this config.json"
        )
    num_experts = max((hf.expert + 1 for hf in hf_tensors if hf.expert is not None), default=0)
    return [
        ExportedTensor(
            name=hf.name,
            shape=hf.shape,
            dtype=_DTYPES[dtype],
            is_frozen=not is_trained,
            with_next=hf.with_next,
            hf=hf,
            stage=stage,
            expert_rank=None if hf.expert is None else hf.expert * expert.size() // num_experts,
        )
        for hf, (stage, dtype, is_trained) in found
    ]


def _portions(
    bucket: Sequence[ExportedTensor], is_gathered: Callable[[ExportedTensor], bool]
) -> Iterator[list[ExportedTensor]]:
    """Cut the bucket into runs that are gathered at once, small enough to bound the memory besides."""
    for (is_cut, _), run in groupby(bucket, key=lambda tensor: (is_gathered(tensor), tensor.cut)):
        portion: list[ExportedTensor] = []
        for tensor in run:
            if is_cut and portion and num_bytes(portion) + tensor.nbytes > PORTION_BYTES:
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


def _pass_on(part: torch.Tensor, source: int, group: dist.ProcessGroup, receivers: Collection[int]) -> None:
    """Send memory of one rank of a group, by its number there, to the receivers in the group."""
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank()
    owner = ranks[source]
    others = [other for other in ranks if other in receivers and other != owner]
    if len(others) > 1:
        dist.broadcast(part, owner, group=group)
    elif others and rank == owner:
        dist.send(part, others[0], group=group)
    elif others and rank == others[0]:
        dist.recv(part, owner, group=group)


def _fill_rows(rows: torch.Tensor, group: dist.ProcessGroup, receivers: Collection[int]) -> None:
    """Fill `rows` [ranks of the group, elements], of which each rank has its own, on the receivers."""
    if rows.is_cuda and all(rank in receivers for rank in dist.get_process_group_ranks(group)):
        dist.all_gather_into_tensor(rows, rows[group.rank()], group=group)
        return
    for number, row in enumerate(rows):  # gloo's all_gather takes longer, and keeps a copy of them all
        _pass_on(row, number, group, receivers)


def _join(hf: HFTensor, shards: torch.Tensor, whole: torch.Tensor) -> None:
    """Fill a tensor from every tensor-parallel rank's flattened shard, [tp, elements]."""
    shards = shards.unflatten(1, hf.shard_shape)
    if len(shards) * hf.shard_shape[hf.shard_dim] == hf.shape[hf.shard_dim]:
        whole.unflatten(hf.shard_dim, (len(shards), -1)).copy_(shards.movedim(0, hf.shard_dim))
    else:  # the last rows are padding
        whole.copy_(shards.flatten(0, 1)[: len(whole)])

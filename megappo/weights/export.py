"""Export a Megatron model's weights as full tensors under their Hugging Face names, one bucket at a time.

A tensor's shards lie on the ranks of one tensor-parallel group, on one pipeline stage and, if it is an expert's, on one
expert-parallel rank. They are broadcast over the expert-parallel group and the pipeline, and joined last.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.distributed as dist

from megappo.architecture.architecture import Architecture
from megappo.architecture.parameters import (
    LORA_A,
    LORA_B,
    SECOND_HEAD,
    HFTensor,
    Parameter,
    expert_stacks,
    hf_tensors_of,
    is_adapter,
    is_beside_base,
    linear_stacks,
)
from megappo.models.gpt import ModelChunks
from megappo.placement.groups import ComponentGroups
from megappo.placement.layout import Layout
from megappo.runtime.heartbeat import heartbeat
from megappo.weights.buckets import NamedTensors, TensorSpec, into_buckets, num_bytes, views
from megappo.weights.shards import check_parameters, decompose, global_parameters, shard_group, table_of

PORTION_BYTES = 32 * 2**20
"""Size of a portion: the slice of a bucket that one collective gathers."""


@dataclass(frozen=True, kw_only=True)
class ExportedTensor(TensorSpec):
    """One tensor of an export.

    Attributes:
        hf: its shards.
        stage: the pipeline stage that holds it.
        expert_rank: the expert-parallel rank that holds it; None = not an expert's, and held by all of them.
        parts: parts of a stack, each gathered by itself; `hf` and `expert_rank` are the first part's.
    """

    hf: HFTensor
    stage: int
    expert_rank: int | None
    parts: tuple["ExportedTensor", ...] = ()

    @property
    def is_cut(self) -> bool:
        """True if tensor-parallel ranks have shards of it."""
        return self.hf.shard_dim is not None


class Export:
    """A model's weights as full Hugging Face tensors, on this rank of the component.

    Every rank of the component makes it together. The parameters are read when buckets are gathered, so one export
    serves as long as the model.

    Args:
        chunks: unwrapped.
        architecture: with the head to export: "policy" exports the language model without a shared backbone's value
            head, "value" a critic, "policy_value" all of a shared backbone. A value head is exported as `score.weight`,
            and `score.bias` if it has one.
        full_tensor_ranks: the ranks that need full tensors, the same on every rank; None = all of the component's.
        by_stage: each of them needs only the tensors of its own pipeline stage, so that nothing is broadcast from stage
            to stage. Each bucket then holds tensors of one stage, `sender_index`, whose ranks gather it.
        adapters: export adapters and a value head alone; otherwise they are merged into the weights that they adapt.
        with_stacks: export stacks of experts, and of linear attention, as files and engines of the family have them
            (`expert_stacks`, `linear_stacks`).
    Attributes:
        tensors: tensors in the order in which they are gathered. Tied embeddings come once, as the embedding.
        participates: this rank must call `gather`, for itself or for others.
        sender_index: `sender_index` of the tensors that this rank gathers: its pipeline stage with `by_stage`, else 0.
    Raises:
        ValueError: a parameter without Hugging Face name, or a tensor that no stage holds; each named.
    """

    def __init__(
        self,
        chunks: ModelChunks,
        architecture: Architecture,
        groups: ComponentGroups,
        *,
        full_tensor_ranks: Collection[int] | None = None,
        by_stage: bool = False,
        adapters: bool = False,
        with_stacks: bool = True,
    ):
        self.groups = groups
        table = table_of(architecture, groups)
        all_parameters = global_parameters(chunks)
        self._adapters: dict[str, torch.Tensor] = {}  # to merge, by Hugging Face name
        self._scale = architecture.lora.scale if architecture.lora else 0.0

        def selects(name: str) -> bool:
            return is_beside_base(name, architecture) if adapters else not is_adapter(name)

        left_out = (f"{SECOND_HEAD}.",) if architecture.head == "policy" else ()
        parameters: dict[str, torch.Tensor] = {}
        for name, parameter in all_parameters.items():
            if selects(name) and not name.startswith(left_out):
                parameters[name] = parameter
            elif is_adapter(name):
                self._adapters[table[name].hf_tensors[0].name] = parameter
        check_parameters(parameters, table)
        # Hugging Face name -> (the parameter that holds the tensor on this rank, its entry in the table)
        self._held = {hf.name: (parameters[name], table[name]) for name in parameters for hf in table[name].hf_tensors}
        self._device = next(chunks[0].parameters()).device
        changing = {name.replace(LORA_A, ".weight") for name, one in self._adapters.items() if one.requires_grad}
        found = _all_gather_specs(self._held, changing, groups, by_stage)
        names = hf_tensors_of(entry for name, entry in table.items() if selects(name))
        if missing := [name for name in names if name not in found]:
            raise ValueError(
                f"no pipeline stage of the model holds {', '.join(missing)}; build the model from this config.json"
            )
        tensors = {name: found[name] for name in names}
        if with_stacks and not adapters:
            _stack(tensors, architecture)
        # Like ones together: fewer messages, and fewer buckets, each of one dtype.
        self.tensors = sorted(
            tensors.values(),
            key=lambda tensor: (tensor.is_cut, tensor.expert_rank is not None, str(tensor.dtype)),
        )
        self.sender_index = groups.collection.pp.rank() if by_stage else 0
        layout = groups.layout
        self._full_ranks = frozenset(layout.ranks if full_tensor_ranks is None else full_tensor_ranks)
        self._pp_receivers, self._ep_receivers = _shard_receivers(layout, self._full_ranks, by_stage=by_stage)
        self.participates = dist.get_rank() in layout.gathering(self._full_ranks, by_stage=by_stage)

    def buckets(self, bucket_bytes: int) -> Iterator[NamedTensors]:
        """Yield all tensors, a bucket at a time, as [(Hugging Face name, full tensor)].

        All ranks that take part must exhaust it together.
        """
        for bucket in into_buckets(self.tensors, bucket_bytes):
            yield views(bucket, self.gather(bucket))

    @torch.no_grad()
    def gather(self, bucket: Sequence[ExportedTensor], flat: torch.Tensor | None = None) -> torch.Tensor:
        """Gather a bucket of `tensors`; all ranks that take part call it together, for the same buckets.

        Args:
            flat: memory for them, uint8 [their bytes] on the model's device; None = newly allocated.
        Returns:
            `flat`, of copies in the parameters' dtype, without the vocabulary's padding; see `views`. Only ranks among
            `full_tensor_ranks` may read it.
        """
        heartbeat.beat()
        if flat is None:
            flat = torch.empty(num_bytes(bucket), dtype=torch.uint8, device=self._device)
        portions = _portions([part for tensor in bucket for part in tensor.parts or (tensor,)])
        targets = flat.split([num_bytes(portion) for portion in portions])
        for portion, target in zip(portions, targets, strict=True):
            self._gather(portion, target.view(portion[0].dtype))
        if dist.get_rank() in self._full_ranks:
            for tensor, (_, whole) in zip(bucket, views(bucket, flat), strict=True):
                if tensor.parts and tensor.hf.expert is not None:
                    _interleave(tensor.parts, whole)
        return flat

    def _gather(self, tensors: Sequence[ExportedTensor], target: torch.Tensor) -> None:
        """Fill `target` with full tensors that come from the same ranks.

        For a dense model without pipeline stages: copy local shards, gather them over tensor-parallel ranks, join them.
        """
        first = tensors[0]
        group = shard_group(first.hf, self.groups)
        tp_size, tp_rank = (group.size(), group.rank()) if first.is_cut else (1, 0)
        row_size = sum(prod(tensor.hf.shard_shape) for tensor in tensors)
        # A single tensor that is cut into rows, without padding, is joined already when it is gathered.
        is_single = len(tensors) == 1 and first.hf.shard_dim == 0 and target.numel() == tp_size * row_size
        is_in_place = tp_size == 1 or is_single
        rows = target.view(tp_size, -1) if is_in_place else target.new_empty(tp_size, row_size)  # [tp, row_size]
        self._load_row(tensors, rows[tp_rank])
        if tp_size > 1:
            self._gather_rows(rows, group)
        if not is_in_place and dist.get_rank() in self._full_ranks:
            _join_rows(tensors, rows, target)

    def _load_row(self, tensors: Sequence[ExportedTensor], row: torch.Tensor) -> None:
        """Fill this rank's row, [row_size], with its shards: its own, or the shards of another expert or stage."""
        first = tensors[0]
        collection = self.groups.collection
        slots = row.split([prod(tensor.hf.shard_shape) for tensor in tensors])
        for tensor, slot in zip(tensors, slots, strict=True):
            if tensor.name in self._held and tensor.stage == collection.pp.rank():
                shard = self._shard_of(tensor.name)
                slot.view(shard.shape).copy_(shard)
        if first.expert_rank is not None and first.stage == collection.pp.rank():
            _broadcast_if_needed(row, first.expert_rank, collection.ep, self._ep_receivers)
        _broadcast_if_needed(row, first.stage, collection.pp, self._pp_receivers)

    def _gather_rows(self, rows: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Fill `rows`, [tp, row_size], with the row of each tensor-parallel rank."""
        if rows.is_cuda and self._full_ranks.issuperset(dist.get_process_group_ranks(group)):
            dist.all_gather_into_tensor(rows, rows[group.rank()], group=group)
            return
        for number, row in enumerate(rows):  # gloo's all_gather takes longer, and keeps a copy of them all
            _broadcast_if_needed(row, number, group, self._full_ranks)

    def _shard_of(self, name: str) -> torch.Tensor:
        """Return this rank's shard of a tensor, [groups, rows per group, ...] (see `decompose`), adapter merged.

        A rank that holds a shard of a matrix holds the shards of the adapter that this takes.
        """
        shard = decompose(*self._held[name])[name]
        matrix = name.removesuffix(".weight")
        if matrix + LORA_A not in self._adapters:
            return shard
        a = self._adapters[matrix + LORA_A].detach().float()
        b = self._adapters[matrix + LORA_B].detach().float()
        product = (b @ a).view_as(shard)
        merged = shard.float() + self._scale * product
        return merged.to(shard.dtype)


def _shard_receivers(
    layout: Layout, full_ranks: Collection[int], *, by_stage: bool
) -> tuple[frozenset[int], frozenset[int]]:
    """Return the ranks that receive shards from other pipeline stages, and the ranks that receive shards of experts.

    A full tensor needs the shards of all ranks in its rank's tensor-parallel group, so each of these ranks must get the
    shards of tensors that other stages or expert-parallel ranks hold. Experts are broadcast first, in the stage that
    holds them, and then to other stages: all stages of a pipeline take part unless `by_stage`.

    Example: TP2 PP1 on ranks 0-3 with full tensors on rank 0 gives {0, 1} twice: rank 0 joins its shards with the
    shards of rank 1, and ranks 2 and 3, which are data-parallel replicas, take no part. With TP2 PP2 on the same ranks
    (stages 0-1 and 2-3) it gives {0, 1} and {0, 1, 2, 3}: ranks 2 and 3 send the shards of their stage to ranks 0 and
    1.
    """
    receivers = layout.sharing(full_ranks, layout.tensor) | layout.sharing(full_ranks, layout.expert_tensor)
    if by_stage:
        return frozenset(), receivers
    return receivers, layout.pipelines_of(receivers)


def _all_gather_specs(
    held: Mapping[str, tuple[torch.Tensor, Parameter]],
    changing: Collection[str],
    groups: ComponentGroups,
    by_stage: bool,
) -> dict[str, ExportedTensor]:
    """Return the tensors that all stages and experts hold, by name; the first of two stages that hold one sends it.

    Args:
        changing: frozen tensors that are not sent as they are, but with trained adapters merged.
    """
    pipeline = groups.collection.pp
    expert = groups.collection.ep
    found: dict[str, ExportedTensor] = {}
    for tensor, entry in held.values():
        changes = tensor.requires_grad or entry.is_buffer  # `ModelRouting` may update it
        for hf in entry.hf_tensors:
            found[hf.name] = ExportedTensor(
                name=hf.name,
                shape=hf.shape,
                dtype=tensor.dtype,
                is_frozen=not changes and hf.name not in changing,
                with_next=hf.with_next,
                sender_index=pipeline.rank() if by_stage else 0,
                hf=hf,
                stage=pipeline.rank(),
                expert_rank=None if hf.expert is None else expert.rank(),
            )
    for group in (pipeline, expert):
        parts: list[dict[str, ExportedTensor]] = [{}] * group.size()
        dist.all_gather_object(parts, found, group=group)
        found = {name: spec for part in reversed(parts) for name, spec in part.items()}
    return found


def _stack(tensors: dict[str, ExportedTensor], architecture: Architecture) -> None:
    """Replace the tensors that are parts of stacks by these."""
    for name, names in linear_stacks(architecture).items():
        parts = tuple(tensors.pop(part) for part in names)
        shape = sum(part.shape[0] for part in parts), *parts[0].shape[1:]
        tensors[name] = replace(
            parts[0],
            name=name,
            shape=shape,
            parts=parts,
            with_next=False,
        )
    for name, stack in expert_stacks(architecture).items():
        parts = tuple(tensors.pop(part) for part in stack.parts)
        tensors[name] = replace(parts[0], name=name, shape=stack.shape, parts=parts)


def _interleave(parts: Sequence[ExportedTensor], whole: torch.Tensor) -> None:
    """Put the numbers of a stack in its order; its memory has the parts one after the other.

    A copy of the whole stack would take as much memory as the bucket: GPT-OSS-120B has stacks of 4 GB.
    """
    for expert in whole.view(len(whole), -1, *parts[0].shape):  # [n, out, in], of biases [n, out]
        numbers = expert.clone().permute(*reversed(range(expert.ndim)))
        expert.view(numbers.shape).copy_(numbers)


def _portions(bucket: Sequence[ExportedTensor]) -> list[list[ExportedTensor]]:
    """Cut the bucket into portions: runs of tensors that come from the same ranks, of PORTION_BYTES if these are cut.

    A larger tensor is a portion by itself.
    """
    portions: list[list[ExportedTensor]] = []
    room = 0
    last = None
    for tensor in bucket:
        source = tensor.stage, tensor.expert_rank, tensor.is_cut
        if source != last or (tensor.is_cut and tensor.nbytes > room):
            portions.append([])
            room = PORTION_BYTES
            last = source
        portions[-1].append(tensor)
        room -= tensor.nbytes
    return portions


def _broadcast_if_needed(
    part: torch.Tensor,
    source: int,
    group: dist.ProcessGroup,
    receivers: Collection[int],
) -> None:
    """Broadcast from the rank of this number in the group, unless none of the group's other ranks is a receiver."""
    ranks = dist.get_process_group_ranks(group)
    if any(rank in receivers for rank in ranks if rank != ranks[source]):
        dist.broadcast(part, group=group, group_src=source)


def _join_rows(tensors: Sequence[ExportedTensor], rows: torch.Tensor, target: torch.Tensor) -> None:
    """Fill `target` with full tensors, one after the other, from all tensor-parallel ranks' rows, [tp, row_size]."""
    sizes = [prod(tensor.hf.shard_shape) for tensor in tensors]
    all_shards = rows.split(sizes, dim=1)
    for tensor, flat, (_, full) in zip(tensors, all_shards, views(tensors, target), strict=True):
        shards = flat.unflatten(1, tensor.hf.shard_shape)  # [tp, *shard_shape]
        dim = tensor.hf.shard_dim
        if len(shards) * shards.shape[1 + dim] == full.shape[dim]:
            full.unflatten(dim, (len(shards), -1)).copy_(shards.movedim(0, dim))
        else:  # the last rows are padding
            full.copy_(shards.flatten(0, 1)[: len(full)])

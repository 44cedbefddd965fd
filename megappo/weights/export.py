"""Exporting a Megatron model's weights under their Hugging Face names, whole tensors, a bounded bucket at a time.

A tensor's shards lie on the ranks of one tensor-parallel group, on one pipeline stage and, if it is an expert's, on one
expert-parallel rank. They go from there over the expert-parallel group and the pipeline, and are joined last.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist

from megappo.architecture.architecture import Architecture
from megappo.architecture.parameters import LORA_A, LORA_B, SECOND_HEAD, HFTensor, Parameter, hf_tensors_of, is_adapter
from megappo.models.gpt import ModelChunks
from megappo.placement.groups import ComponentGroups
from megappo.runtime.heartbeat import heartbeat
from megappo.weights.buckets import NamedTensors, TensorSpec, into_buckets, num_bytes, views
from megappo.weights.shards import check_parameters, cut_over, decompose, global_parameters, table_of

PORTION_BYTES = 32 * 2**20  # of a bucket, gathered from tensor-parallel ranks at a time


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
    def is_cut(self) -> bool:
        """True if tensor-parallel ranks have shards of it."""
        return self.hf.shard_dim is not None


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
        every_entry, every_parameter = table_of(architecture, groups), global_parameters(chunks)
        self._adapters: dict[str, torch.Tensor] = {}  # to merge, by Hugging Face name
        for name, parameter in every_parameter.items():
            if is_adapter(name) and not adapters:
                self._adapters[every_entry[name].hf_tensors[0].name] = parameter
        self._scale = architecture.lora.scale if architecture.lora else 0.0
        left_out = (f"{SECOND_HEAD}.",) if architecture.head == "policy" else ()
        table = {name: entry for name, entry in every_entry.items() if is_adapter(name) == adapters}
        parameters = {
            name: parameter
            for name, parameter in every_parameter.items()
            if is_adapter(name) == adapters and not name.startswith(left_out)
        }
        check_parameters(parameters, table)
        self._held = {hf.name: (parameters[name], table[name]) for name in parameters for hf in table[name].hf_tensors}
        self._device = next(chunks[0].parameters()).device
        found = _agreed(self._held, groups, by_stage)
        names = hf_tensors_of(table.values())
        if missing := [name for name in names if name not in found]:
            raise ValueError(
                f"no pipeline stage of the model holds {', '.join(missing)}; build the model from this config.json"
            )
        # Like ones together: fewer messages, and fewer buckets, each of one dtype.
        self.tensors = sorted(
            (found[name] for name in names),
            key=lambda tensor: (tensor.is_cut, tensor.expert_rank is not None, str(tensor.dtype)),
        )
        self.sender = groups.collection.pp.rank() if by_stage else 0
        # The ranks that receive whole tensors, and shards of them from other ranks, stages and experts.
        self._whole = frozenset(layout.ranks if needing is None else needing)
        shards = layout.sharing(self._whole, layout.tensor) | layout.sharing(self._whole, layout.expert_tensor)
        self._stages = frozenset() if by_stage else shards
        self._experts = shards if by_stage else layout.pipelines_of(shards)
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
        portions = _portions(bucket)
        targets = flat.split([num_bytes(portion) for portion in portions])
        for portion, target in zip(portions, targets, strict=True):
            self._gather(portion, target.view(portion[0].dtype))
        return flat

    def _gather(self, tensors: Sequence[ExportedTensor], target: torch.Tensor) -> None:
        """Fill `target` with whole tensors that come from the same ranks."""
        first, collection = tensors[0], self.groups.collection
        group = cut_over(first.hf, self.groups)
        ways, way = (group.size(), group.rank()) if first.is_cut else (1, 0)
        sizes = [prod(tensor.hf.shard_shape) for tensor in tensors]
        # A single tensor that is cut into rows, without padding, needs no memory besides.
        is_single = len(tensors) == 1 and first.hf.shard_dim == 0 and target.numel() == ways * sizes[0]
        is_in_place = ways == 1 or is_single
        rows = target.view(ways, -1) if is_in_place else target.new_empty(ways, sum(sizes))
        for tensor, place in zip(tensors, rows[way].split(sizes), strict=True):
            if tensor.name in self._held and tensor.stage == collection.pp.rank():
                shard = self._shard_of(tensor.name)
                place.view(shard.shape).copy_(shard)
        if first.expert_rank is not None and first.stage == collection.pp.rank():
            _pass_on(rows[way], first.expert_rank, collection.ep, self._experts)
        _pass_on(rows[way], first.stage, collection.pp, self._stages)
        if ways > 1 and rows.is_cuda and self._whole.issuperset(dist.get_process_group_ranks(group)):
            dist.all_gather_into_tensor(rows, rows[way], group=group)
        elif ways > 1:
            for number, row in enumerate(rows):  # gloo's all_gather takes longer, and keeps a copy of them all
                _pass_on(row, number, group, self._whole)
        if not is_in_place and dist.get_rank() in self._whole:
            places = target.split([prod(tensor.shape) for tensor in tensors])
            for tensor, shards, place in zip(tensors, rows.split(sizes, dim=1), places, strict=True):
                _join(tensor.hf, shards, place.view(tensor.shape))

    def _shard_of(self, name: str) -> torch.Tensor:
        """This rank's shard of a tensor that it has, as `decompose` gives it, with its adapter merged into it: a rank
        has the shards of the adapter that it needs for that."""
        shard = decompose(*self._held[name])[name]
        matrix = name.removesuffix(".weight")
        if matrix + LORA_A not in self._adapters:
            return shard
        a, b = (self._adapters[matrix + kind].detach().float() for kind in (LORA_A, LORA_B))
        return (shard.float() + self._scale * (b @ a).view_as(shard)).to(shard.dtype)


def _agreed(
    held: Mapping[str, tuple[torch.Tensor, Parameter]], groups: ComponentGroups, by_stage: bool
) -> dict[str, ExportedTensor]:
    """The tensors that all stages and experts hold, by name: where two stages hold one, the first gives it."""
    pipeline, expert = groups.collection.pp, groups.collection.ep
    found: dict[str, ExportedTensor] = {}
    for parameter, entry in held.values():
        for hf in entry.hf_tensors:
            found[hf.name] = ExportedTensor(
                name=hf.name,
                shape=hf.shape,
                dtype=parameter.dtype,
                is_frozen=not parameter.requires_grad,
                with_next=hf.with_next,
                sender=pipeline.rank() if by_stage else 0,
                hf=hf,
                stage=pipeline.rank(),
                expert_rank=None if hf.expert is None else expert.rank(),
            )
    for group in (pipeline, expert):
        parts: list[dict[str, ExportedTensor]] = [{}] * group.size()
        dist.all_gather_object(parts, found, group=group)
        found = {name: tensor for part in reversed(parts) for name, tensor in part.items()}
    return found


def _portions(bucket: Sequence[ExportedTensor]) -> list[list[ExportedTensor]]:
    """Cut the bucket into runs that come from the same ranks, small enough to bound the memory in which they are
    joined."""
    portions: list[list[ExportedTensor]] = []
    room, last = 0, None
    for tensor in bucket:
        source = tensor.stage, tensor.expert_rank, tensor.is_cut
        if source != last or (tensor.is_cut and tensor.nbytes > room):
            portions.append([])
            room, last = PORTION_BYTES, source
        portions[-1].append(tensor)
        room -= tensor.nbytes
    return portions


def _pass_on(part: torch.Tensor, source: int, group: dist.ProcessGroup, receivers: Collection[int]) -> None:
    """Send memory of one rank of a group, by its number there, to the group if others there receive it."""
    ranks = dist.get_process_group_ranks(group)
    if any(rank in receivers for rank in ranks if rank != ranks[source]):
        dist.broadcast(part, group=group, group_src=source)


def _join(hf: HFTensor, shards: torch.Tensor, whole: torch.Tensor) -> None:
    """Fill a tensor from every tensor-parallel rank's flattened shard, [tp, elements]."""
    shards = shards.unflatten(1, hf.shard_shape)
    if len(shards) * hf.shard_shape[hf.shard_dim] == hf.shape[hf.shard_dim]:
        whole.unflatten(hf.shard_dim, (len(shards), -1)).copy_(shards.movedim(0, hf.shard_dim))
    else:  # the last rows are padding
        whole.copy_(shards.flatten(0, 1)[: len(whole)])

"""A rank's shards: the weights a model has here, and the Hugging Face tensors that each is made of."""

import re

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from megappo.architecture.architecture import Architecture
from megappo.architecture.parameters import ROUTER_BIAS, HFTensor, Parameter, by_name, list_parameters
from megappo.models.gpt import ModelChunks
from megappo.models.vision_tower import towers
from megappo.placement.groups import ComponentGroups

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(
    r"(?<=\.mlp\.experts\.local_experts\.)\d+|(?<=\.mlp\.experts\.linear_fc[12]\.weight)\d+$"
    r"|(?<=\.mlp\.experts\.linear_fc[12]_adapter\.local_experts\.)\d+"
)


def global_parameters(chunks: ModelChunks) -> dict[str, torch.Tensor]:
    """Return this rank's parameters, a vision tower's too, and routers' biases, which are buffers, by their names in
    the whole model.

    Layers and experts are numbered over the whole model instead of this rank's part.
    """
    found: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        biases = [(name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(ROUTER_BIAS)]
        for name, tensor in (*chunk.named_parameters(), *biases):
            found[_global_name(chunk, name)] = tensor
    for tower in towers(chunks):
        found |= tower.named_parameters()
    return found


def _global_name(model: GPTModel, name: str) -> str:
    match = _LAYER.match(name)
    if not match:
        return name
    layer = model.decoder.layers[int(match[1])]
    name = _EXPERT.sub(lambda expert: str(layer.mlp.local_expert_indices[int(expert[0])]), name)
    return _LAYER.sub(f"decoder.layers.{layer.layer_number - 1}.", name)


def table_of(architecture: Architecture, groups: ComponentGroups) -> dict[str, Parameter]:
    """Return the table's entry of every parameter of a model in this layout, by its names."""
    layout = groups.layout
    return by_name(list_parameters(architecture, tensor=layout.tensor, expert_tensor=layout.expert_tensor))


def shard_group(hf: HFTensor, groups: ComponentGroups) -> dist.ProcessGroup:
    """Return the group whose ranks each hold one shard of a tensor with a `shard_dim`."""
    return groups.collection.tp if hf.expert is None else groups.collection.expt_tp


def check_parameters(parameters: dict[str, torch.Tensor], table: dict[str, Parameter]) -> None:
    """Check that every parameter is in the table, with its shape.

    Raises:
        ValueError: names the parameters that have none, or another shape.
    """
    unknown = sorted(parameters.keys() - table.keys())
    if unknown:
        raise ValueError(f"no Hugging Face tensors are known for the model's parameters {', '.join(unknown)}")
    for name, parameter in parameters.items():
        expected = table[name].shard_shape
        if tuple(parameter.shape) != expected:
            raise ValueError(
                f"parameter {name} has shape {[*parameter.shape]} on this rank, its config.json gives {[*expected]}; "
                "build the model and load it with the same config"
            )


def decompose(tensor: torch.Tensor, entry: Parameter) -> dict[str, torch.Tensor]:
    """Return views of a parameter by Hugging Face name, each [groups, rows per group, ...].

    With its first two dimensions flattened, each view is this rank's tensor-parallel shard.
    """
    rows = [hf.shard_shape[0] // entry.groups for hf in entry.hf_tensors]
    grouped = tensor.detach().unflatten(0, (entry.groups, -1)).split(rows, dim=1)
    return {hf.name: part for hf, part in zip(entry.hf_tensors, grouped, strict=True)}

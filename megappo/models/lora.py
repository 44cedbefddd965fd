"""Low-rank adapters beside the linear layers of a model, which are trained instead of these (LoRA).

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1: W x + alpha / r * B A x. One
pair for each Hugging Face matrix, as PEFT and SGLang have them, also where Megatron stacks several in one layer.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megappo.architecture.parameters import ADAPTER, Parameter, is_adapter
from megappo.config.model_sections import Lora
from megappo.models.cut_parameters import CutParameters


class LowRank(CutParameters):
    """The adapter of one Hugging Face matrix [out, in]: `a` [rank, in] and `b` [out, rank], this rank's part of them.

    Args:
        sizes: (in, out) of this rank. Tensor-parallel ranks cut `b` where they cut the layer's outputs, and `a` where
            they cut its inputs.
        cuts_input: they cut the inputs.
        is_expert: the matrix is an expert's, which no two of `group` share, and gets its tokens from the dispatcher.
    """

    def __init__(
        self,
        config: TransformerConfig,
        rank: int,
        sizes: tuple[int, int],
        cuts_input: bool,
        group: dist.ProcessGroup,
        is_expert: bool,
    ):
        super().__init__()
        self.tp_group = group
        self.cut = {"a": 1} if cuts_input else {"b": 0}
        self.a = torch.nn.Parameter(torch.empty(rank, sizes[0], dtype=config.params_dtype))
        self.b = torch.nn.Parameter(torch.empty(sizes[1], rank, dtype=config.params_dtype))
        cut, whole = (self.a, self.b) if cuts_input else (self.b, self.a)
        set_tensor_model_parallel_attributes(
            cut,
            is_parallel=True,
            dim=int(cuts_input),
            stride=1,
        )
        if is_expert:  # else the gradient norm would leave it out on all tensor-parallel ranks except the first
            set_tensor_model_parallel_attributes(
                whole,
                is_parallel=True,
                dim=int(not cuts_input),
                stride=1,
            )
        else:
            # Under sequence parallelism each rank sees its own tokens there: Megatron then sums the gradient over them.
            whole.sequence_parallel = config.sequence_parallel


class Adapter(MegatronModule):
    """The adapters of a linear layer, whose outputs are added to its own.

    Args:
        weight: the layer's, which is cut over the inputs or the outputs.
        names: last names of the matrices that have an adapter.
    """

    def __init__(
        self,
        config: TransformerConfig,
        lora: Lora,
        weight: Parameter,
        names: Collection[str],
        groups: ProcessGroupCollection,
    ):
        super().__init__(config)
        self.is_expert = weight.hf_tensors[0].expert is not None
        self.scale = lora.scale
        self.tp_group = groups.expt_tp if self.is_expert else groups.tp
        self.rows = {hf.name.split(".")[-2]: hf.shard_shape[0] for hf in weight.hf_tensors}
        self.num_groups = weight.groups
        self.cuts_input = weight.hf_tensors[0].shard_dim == 1
        width = weight.shard_shape[1]
        for name in self.rows:
            if name in names:
                sizes = width, self.rows[name]
                one = LowRank(config, lora.rank, sizes, self.cuts_input, self.tp_group, self.is_expert)
                self.add_module(name, one)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the adapters' outputs for the layer's input: [..., in] -> [..., out], cut like its output.

        In between, tensor-parallel ranks exchange `rank` numbers a token, in one message for all matrices of the layer.
        """
        adapters: Mapping[str, Any] = dict(self.named_children())
        low = self._across(F.linear(x, torch.cat([adapter.a for adapter in adapters.values()])))
        parts = dict(zip(adapters, low.chunk(len(adapters), dim=-1), strict=True))
        outputs = []
        for name, rows in self.rows.items():
            if name in adapters:
                output = F.linear(parts[name], adapters[name].b)
            else:
                output = low.new_zeros(*low.shape[:-1], rows)
            outputs.append(output.unflatten(-1, (self.num_groups, -1)))
        return self.scale * torch.cat(outputs, dim=-1).flatten(-2)

    def _across(self, low: Tensor) -> Tensor:
        """Exchange the low-rank numbers as the layer does its own: sum them over ranks that cut the input; otherwise
        gather all tokens, and sum their gradient. The dispatcher does so for experts."""
        if self.is_expert:
            return low
        if self.config.sequence_parallel:
            exchange = (
                reduce_scatter_to_sequence_parallel_region if self.cuts_input else gather_from_sequence_parallel_region
            )
        else:
            exchange = (
                reduce_from_tensor_model_parallel_region if self.cuts_input else copy_to_tensor_model_parallel_region
            )
        return exchange(low, group=self.tp_group)

    def add(self, linear: torch.nn.Module, inputs: tuple[Tensor, ...], output: tuple) -> tuple:
        """Add the adapters' outputs, as a forward hook of the layer, which returns (output, bias)."""
        return output[0] + self(_normalised(linear, inputs[0])), output[1]


class GroupedAdapter(MegatronModule):
    """The adapters of TransformerEngine's layer of several experts: an `Adapter` for each."""

    def __init__(
        self,
        config: TransformerConfig,
        adapters: Sequence[Adapter],
        groups: ProcessGroupCollection,
    ):
        super().__init__(config)
        self.local_experts = torch.nn.ModuleList(adapters)
        self.groups = groups

    def add(
        self,
        linear: torch.nn.Module,
        inputs: tuple[Tensor, list[int]],
        output: tuple,
    ) -> tuple:
        """Add the adapters' outputs, as a forward hook of the layer, which takes (tokens, their number per expert)."""
        parts = zip(self.local_experts, inputs[0].split(inputs[1]), strict=True)
        return output[0] + torch.cat([adapter(tokens) for adapter, tokens in parts]), output[1]

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Return the state as Megatron's SequentialMLP does, so that checkpoints of either load into the other."""
        found: ShardedStateDict = {}
        count = len(self.local_experts)
        rank = self.groups.ep.rank()
        for index, adapter in enumerate(self.local_experts):
            offset = len(sharded_offsets), rank * count + index, self.groups.ep.size() * count
            own = f"{prefix}local_experts.{index}."
            state = adapter.sharded_state_dict(own, (*sharded_offsets, offset), metadata)
            replace_prefix_for_sharding(state, own, prefix)
            for tensor in state.values():
                tensor.replica_id = (*tensor.replica_id[:2], self.groups.expt_dp.rank())
            found |= state
        return found


def _normalised(linear: torch.nn.Module, x: Tensor) -> Tensor:
    """Return the input of a layer's matrix. TransformerEngine's LayerNormLinear applies an RMSNorm first. It could
    return the result, too, but Megatron's wrapper would then return a pair as its output (megatron-core 0.16.1,
    extensions/transformer_engine.py)."""
    weight = getattr(linear, "layer_norm_weight", None)
    if weight is None:
        return x
    return F.rms_norm(x, weight.shape, weight + 1 if linear.zero_centered_gamma else weight, linear.eps)


def add_adapters(gpt: GPTModel, lora: Lora, table: Mapping[str, Parameter]) -> None:
    """Give a chunk's linear layers adapters, each as a module beside the layer, named after it.

    Args:
        table: parameters of the model in this layout, by name.
    """
    adapted: dict[str, set[str]] = defaultdict(set)  # layer -> last names of its adapted matrices
    for name in filter(is_adapter, table):
        path, _, own = name.partition(f"{ADAPTER}.")
        adapted[path].add(own.split(".")[-2])
    groups = gpt.pg_collection
    for layer in gpt.decoder.layers:
        prefix = f"decoder.layers.{layer.layer_number - 1}."
        for path, linear in list(layer.named_modules()):
            if names := adapted.get(prefix + path):
                num_experts = getattr(linear, "num_gemms", None)
                ends = [""] if num_experts is None else range(num_experts)
                weights = [table[f"{prefix}{path}.weight{end}"] for end in ends]
                adapters = [Adapter(gpt.config, lora, weight, names, groups) for weight in weights]
                adapter = adapters[0] if num_experts is None else GroupedAdapter(gpt.config, adapters, groups)
                parent, _, name = path.rpartition(".")
                layer.get_submodule(parent).add_module(name + ADAPTER, adapter)
                linear.register_forward_hook(adapter.add)

"""A model as dist_checkpointing takes it, whatever layout it is in."""

from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ChainedOptimizer

from megappo.models.build import ModelChunks
from megappo.placement.groups import ComponentGroups


def sharding_metadata(groups: ComponentGroups) -> dict[str, Any]:
    """How checkpoints are cut so that they load into any other layout: the `metadata` of `sharded_state_dict`."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": groups.collection.dp_cp,
    }


def sharded_chunks(chunks: ModelChunks, groups: ComponentGroups) -> dict[str, dict[str, Any]]:
    """The model as dist_checkpointing takes it, which numbers layers over the whole model in whatever chunks they are.

    Of the unwrapped modules: the wrappers' own methods disagree about the prefix "module.". Of a model with adapters,
    what is trained: the rest is its folder's.
    """
    metadata = sharding_metadata(groups)
    with groups.active():
        found = {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(chunks)}
    for state, chunk in zip(found.values(), chunks, strict=True):
        for name in _base(chunk):
            del state[name]
    return found


def _base(chunk: GPTModel) -> list[str]:
    """The parameters of a chunk that adapters are trained instead of."""
    return [name for name, parameter in chunk.named_parameters() if parameter.is_base]


def sharded_optimizer(
    optimizer: ChainedOptimizer, model: dict[str, dict[str, Any]], groups: ComponentGroups, is_loading: bool
) -> dict[str, Any]:
    """The optimizer of `sharded_chunks` as dist_checkpointing takes it. The component's groups are active."""
    state = optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=sharding_metadata(groups))
    for part in [state] if len(optimizer.chained_optimizers) == 1 else state.values():
        if not part.get("param_state", True):  # all on other ranks, or of no parameters: Megatron would warn
            del part["param_state"]
    return state

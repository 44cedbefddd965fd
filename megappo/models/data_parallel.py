"""Megatron's data parallelism around a chunk: buffers of gradients, and their reduction over the ranks."""

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig

from megappo.architecture.switches import REDUCTION
from megappo.config.schema import Optim
from megappo.placement.groups import ComponentGroups


def data_parallel(
    runner: torch.nn.Module, config: TransformerConfig, optim: Optim, groups: ComponentGroups
) -> DistributedDataParallel:
    """What the schedule runs of a chunk that is trained. The component's groups are active and its world the default.

    Args:
        runner: what it would run of one that is not.
    """
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=optim.distributed,
        grad_reduce_in_fp32=True,
        **{switch.name: switch.name in config.switches for switch in REDUCTION},
    )
    wrapped = DistributedDataParallel(config, settings, runner, pg_collection=groups.collection)
    for parameter in wrapped.parameters():
        parameter.is_reduced_early = settings.overlap_grad_reduce
    _count_padding(wrapped)
    return wrapped


def _count_padding(runner: DistributedDataParallel) -> None:
    """Let the padding between a buffer's buckets count as their content. Megatron leaves it out when it gathers the
    optimizer's states for a checkpoint, and then cuts parameters of later buckets out of the wrong places: a shared
    embedding has a bucket of its own."""
    for buffer in runner.buffers + runner.expert_parallel_buffers:
        for bucket in buffer.buckets[:-1]:
            bucket.numel_unpadded = bucket.grad_data.numel()
        buffer.numel_unpadded = sum(bucket.numel_unpadded for bucket in buffer.buckets)

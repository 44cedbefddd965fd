"""Megatron's gradient buffers, optimizer and learning-rate schedule, as a component's optim section sets them."""

import math

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

from megappo.architecture.architecture import DTYPES
from megappo.architecture.switches import REDUCTION
from megappo.config.model_sections import Optim
from megappo.models.compact_adam import CompactAdam
from megappo.models.sharding import sharded_states
from megappo.placement.groups import ComponentGroups
from megappo.runtime.megatron_patches import count_padding, leave_main_params_to_adam, save_optimizer_states_by


def data_parallel(
    runner: torch.nn.Module,
    transformer_config: TransformerConfig,
    optim: Optim,
    groups: ComponentGroups,
) -> DistributedDataParallel:
    """Wrap a trained chunk in Megatron's DistributedDataParallel, which holds and reduces its gradients.

    Preconditions: the component's groups are active, and its world is the default one.
    """
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=optim.distributed,
        grad_reduce_in_fp32=True,
        **{name: name in transformer_config.switches for name in REDUCTION},
    )
    wrapped = DistributedDataParallel(transformer_config, settings, runner, pg_collection=groups.collection)
    for parameter in wrapped.parameters():
        parameter.is_reduced_early = settings.overlap_grad_reduce
    count_padding(wrapped)
    return wrapped


def build_optimizer(
    wrapped_chunks: list[DistributedDataParallel],
    transformer_config: TransformerConfig,
    optim: Optim,
    groups: ComponentGroups,
) -> ChainedOptimizer:
    """Build decoupled Adam with fp32 master weights, ready to be saved. Same preconditions as `data_parallel`."""
    settings = OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,  # becomes the groups' max_lr, which get_lr of the scheduler prefers to its own max_lr
        min_lr=optim.min_lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_eps=optim.eps,
        clip_grad=optim.clip_grad,
        bf16=transformer_config.bf16,
        params_dtype=transformer_config.params_dtype,
        use_distributed_optimizer=optim.distributed,
    )
    if optim.is_compact:
        leave_main_params_to_adam(settings)
    optimizer = get_megatron_optimizer(
        settings, wrapped_chunks, use_gloo_process_groups=False, pg_collection=groups.collection
    )
    init_optimizer_state(optimizer, optim)
    return optimizer


def init_optimizer_state(optimizer: ChainedOptimizer, optim: Optim) -> None:
    """Make the moments now, so that a checkpoint can be saved before the first step."""
    for part in optimizer.chained_optimizers:
        if optim.is_compact and not part.is_stub_optimizer:
            dtype = getattr(torch, DTYPES[optim.moments_dtype].torch)
            part.optimizer = CompactAdam(part.optimizer, dtype, optim.offload_fraction)
        elif part.init_state_fn is not None:
            part.init_state_fn(part.optimizer, part.config)
        if isinstance(part, DistributedOptimizer) and not part.is_stub_optimizer:
            save_optimizer_states_by(part, sharded_states)


def clipped_step(optimizer: ChainedOptimizer) -> float:
    """Make one step and return the norm of the gradients before clipping. Where that is not finite, change nothing.

    `ChainedOptimizer.step` of megatron-core would make all weights NaN then. All ranks of the component together, its
    groups active.
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if math.isfinite(norm):
        for part in optimizer.chained_optimizers:
            parameters = [] if part.is_stub_optimizer else part.get_parameters()
            if parameters and part.config.clip_grad > 0:
                is_decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, norm, is_decoupled)
        optimizer.step_with_ready_grads()
    return norm


def lr_scheduler(optimizer: object, optim: Optim, total_optimizer_steps: int) -> OptimizerParamScheduler:
    """Return a schedule: linear warm-up from 0, then the configured decay. It applies the groups' wd_mult (0 for biases
    and norms)."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0 if optim.lr_warmup_steps else optim.lr,
        max_lr=optim.lr,
        min_lr=optim.min_lr,
        lr_warmup_steps=optim.lr_warmup_steps,
        lr_decay_steps=max(total_optimizer_steps, optim.lr_warmup_steps + 1),  # Megatron asserts warm-up < decay
        lr_decay_style=optim.lr_decay_style,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )

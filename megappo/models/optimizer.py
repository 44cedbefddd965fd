"""Megatron's optimizer and learning-rate schedule, as a component's optim section sets them."""

import math
from functools import partial
from typing import Any

from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

from megappo.config.schema import Optim
from megappo.models.optimizer_states import sharded_states


def optimizer_config(optim: Optim, model: TransformerConfig) -> OptimizerConfig:
    """Megatron's optimizer settings: decoupled Adam, fp32 moments and master weights."""
    return OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        min_lr=optim.min_lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_eps=optim.eps,
        clip_grad=optim.clip_grad,
        bf16=model.bf16,
        params_dtype=model.params_dtype,
        use_distributed_optimizer=optim.distributed,
    )


def make_saveable(optimizer: ChainedOptimizer) -> None:
    """Let a checkpoint be saved at any time, by all ranks."""
    for part in optimizer.chained_optimizers:
        if part.init_state_fn is not None:  # else there are no moments before the first step
            part.init_state_fn(part.optimizer, part.config)
        if isinstance(part, DistributedOptimizer) and not part.is_stub_optimizer:
            part.sharded_param_state_fully_reshardable = partial(sharded_states, part)
            part.load_parameter_state_from_fully_reshardable = _in_place


def _in_place(states: dict[int, Any]) -> None:
    """Nothing is left to do: `sharded_states` has had them loaded where they belong."""


def clipped_step(optimizer: ChainedOptimizer) -> float:
    """One step; the norm of the gradients before clipping. Where that is not finite, nothing is changed.

    It is `ChainedOptimizer.step` of megatron-core, which would spoil all weights then. All ranks of the component
    together, its groups active.
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if math.isfinite(norm):
        for part in optimizer.chained_optimizers:
            parameters = [] if part.is_stub_optimizer else part.get_parameters()
            if parameters and part.config.clip_grad > 0:
                clip_grad_by_total_norm_fp32(parameters, max_norm=part.config.clip_grad, total_norm=norm)
        optimizer.step_with_ready_grads()
    return norm


def lr_scheduler(optimizer: object, optim: Optim, total_optimizer_steps: int) -> OptimizerParamScheduler:
    """Linear warm-up from 0, then the configured decay; it also exempts biases and norms from weight decay."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0 if optim.lr_warmup_steps else optim.lr,
        max_lr=optim.lr,
        min_lr=optim.min_lr,
        lr_warmup_steps=optim.lr_warmup_steps,
        lr_decay_steps=max(total_optimizer_steps, optim.lr_warmup_steps + 1),
        lr_decay_style=optim.lr_decay_style,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )

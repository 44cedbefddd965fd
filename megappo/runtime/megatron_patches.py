"""Everything that is replaced in megatron-core 0.16.1, and in torch so that megatron-core runs without CUDA.

Each function replaces one thing. Its docstring gives the reason, and the public way that was tried first. Functions
import megatron.core themselves: `megatron_setup.install` must run before anything else imports it.

Nothing is replaced elsewhere. `placement/groups.py` sets parallel_state's globals and torch's default group while a
component computes, as megatron-core still reads them where it takes no group.
"""

import contextlib
import functools
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils import _device

from megappo.runtime import platform

# Replaced in torch, without CUDA.


def run_cuda_calls_on_cpu() -> None:
    """Let the calls of torch.cuda that megatron-core makes unconditionally act on the CPU.

    megatron-core has no argument for the device: it calls `torch.cuda.current_device()` and passes device="cuda".
    """
    cpu = torch.device("cpu")
    for name, function in {
        "current_device": lambda: cpu,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed) and None,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
    }.items():
        setattr(torch.cuda, name, function)
    # `with torch.device(...)` knows the factories by identity: let it register them before they are wrapped.
    _device._device_constructors()
    for name in ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like", "ones_like"):
        setattr(torch, name, _factory_on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, device=None: self


def _factory_on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Read device="cuda" as the CPU, and leave memory pageable: pinning needs CUDA."""

    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        wanted = kwargs.get("device")
        if wanted is not None and str(wanted).startswith("cuda"):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return create


def import_without_compiling() -> None:
    """Import megatron.core with `jit_fuser` a no-op: torch.compile would need a C++ compiler on each rank.

    `jit_fuser` is chosen when the module is imported, and no setting turns it off.
    """
    compile_ = torch.compile
    torch.compile = lambda function: function
    try:
        import megatron.core.jit  # noqa: F401
    finally:
        torch.compile = compile_


# Replaced in megatron.core, without CUDA.


def use_cpu_random_state() -> None:
    """Read and set the CPU's generator as the stream of random numbers of "CUDA".

    The functions index `torch.cuda.default_generators`, which is empty. Each fork of the stream then changes the CPU's
    state, so the warning about that has no meaning.
    """
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def read_token_counts_without_stream() -> None:
    """Read the numbers of tokens for each expert without a CUDA stream.

    The "allgather" dispatcher needs no stream, but megatron-core refuses it with `variable_seq_lengths`.
    """
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    def read_splits(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
        if point == dispatcher.cuda_dtoh_point and dispatcher.input_splits is not None:
            dispatcher.input_splits = dispatcher.input_splits.tolist()
            dispatcher.output_splits = dispatcher.output_splits.tolist()
        return tokens_per_expert

    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "none"
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = read_splits


def gather_uneven_parts() -> None:
    """Gather and sum parts of different lengths, as experts have them: gloo's collectives take equal ones only."""
    from megatron.core.tensor_parallel import mappings

    gather = mappings._gather_along_first_dim
    reduce_scatter = mappings._reduce_scatter_along_first_dim

    def gather_any(input_: torch.Tensor, group: Any, output_split_sizes: Any = None, *args: Any, **kwargs: Any) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, *args, **kwargs)
        parts = [input_.new_empty(size, *input_.shape[1:]) for size in output_split_sizes]
        parts[group.rank()] = input_.contiguous()
        for rank, part in enumerate(parts):
            torch.distributed.broadcast(part, group=group, group_src=rank)
        return torch.cat(parts)

    def scatter_any(input_: torch.Tensor, group: Any, input_split_sizes: Any = None, *args: Any, **kwargs: Any) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(input_, group, input_split_sizes, *args, **kwargs)
        total = input_.clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split(input_split_sizes)[group.rank()].clone()

    mappings._gather_along_first_dim = gather_any
    mappings._reduce_scatter_along_first_dim = scatter_any


def skip_collectives_of_one_rank() -> None:
    """Leave the distributed optimizer's buffers alone where one rank holds them whole.

    gloo would copy each onto itself, which takes 21 % of an update of 110M parameters. No setting skips them.
    """
    from megatron.core.distributed import param_and_grad_buffer

    def unless_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(output: torch.Tensor, input_: torch.Tensor, *args: Any, group: Any, **kwargs: Any) -> Any:
            if group.size() == 1 and output.data_ptr() == input_.data_ptr():
                return None
            return collective(output, input_, *args, group=group, **kwargs)

        return call

    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        setattr(param_and_grad_buffer, name, unless_alone(getattr(param_and_grad_buffer, name)))


def name_cpu_tensors_as_cuda() -> None:
    """Let `Tensor.type()` name CPU tensors as if they were on a GPU, in the optimizers alone.

    They compare it with names such as 'torch.cuda.FloatTensor', and raise for any other.
    """
    from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer

    for owner, name in (
        (clip_grads, "clip_grad_by_total_norm_fp32"),
        (optimizer, "clip_grad_by_total_norm_fp32"),
        (optimizer.Float16OptimizerWithFloat16Params, "__init__"),
        (distrib_optimizer.DistributedOptimizer, "__init__"),
    ):
        setattr(owner, name, _cuda_type_names()(getattr(owner, name)))


@contextlib.contextmanager
def _cuda_type_names() -> Iterator[None]:
    type_ = torch.Tensor.type

    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = type_(self, *args, **kwargs)
        if isinstance(name, str) and "cuda" not in name:
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    torch.Tensor.type = named
    try:
        yield
    finally:
        torch.Tensor.type = type_


# Replaced in megatron.core where TransformerEngine and Apex are missing, with or without CUDA.


def define_missing_names() -> None:
    """Define two names that megatron-core defines only with TransformerEngine, but reads without it, too: the router's
    product, and latent attention's HAVE_TE, which guards an isinstance check against a class that is None then."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = transformer_engine.HAVE_TE


def import_deep_ep() -> None:
    """Let megatron-core's token dispatchers use the package deep_ep, which `megatron_setup.install` leaves out.

    megatron-core imports deep_ep for every model and catches ImportError only. sgl-deep-ep 0.1.2.post1, which SGLang
    pins, raises AssertionError without CUDA's compiler or with two NCCLs, and has `EventOverlap` in `deep_ep` itself.

    Raises:
        Exception: the package is not installed, or cannot be used here.
    """
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    if fused_a2a.HAVE_DEEP_EP:
        return
    sys.modules.pop("deep_ep", None)
    if nvcc := platform.nvcc():
        os.environ.setdefault("CUDA_HOME", str(Path(nvcc).parents[1]))
    import deep_ep.utils

    deep_ep.utils.EventOverlap = deep_ep.EventOverlap
    importlib.reload(fused_a2a)
    for name in ("fused_dispatch", "fused_combine", "set_deepep_num_sms"):
        setattr(token_dispatcher, name, getattr(fused_a2a, name))


def cache_uncut_yarn_tables() -> None:
    """Cache YaRN's tables as packed rows take them: whole.

    megatron-core 0.16.1 (yarn_rotary_pos_embedding.py, `YarnRotaryEmbedding.__init__`) cuts them over the
    context-parallel ranks while it builds latent attention, which fails where twice the ranks do not divide
    `original_max_position_embeddings`. No argument reaches this call. A constructor that passes `packed_seq` on, or
    leaves the tables to the first pass, would make this unnecessary.

    Raises:
        RuntimeError: the function has other defaults than `packed_seq`.
    """
    from megatron.core.models.common.embeddings import YarnRotaryEmbedding

    fill = YarnRotaryEmbedding._set_cos_sin_cache
    defaults = [name for name, one in inspect.signature(fill).parameters.items() if one.default is not one.empty]
    if defaults != ["packed_seq"]:
        raise RuntimeError(
            f"megatron-core's YarnRotaryEmbedding._set_cos_sin_cache has defaults of {defaults}, not of packed_seq "
            "alone: install megatron-core 0.16.1"
        )
    fill.__defaults__ = (True,)


def save_and_resume_torch_adamw() -> None:
    """Let torch's AdamW take its step in one pass, and be saved and resumed by megatron-core, whose optimizers expect
    the states of Apex's.

    Without this, DistributedOptimizer.state_dict() asserts before the first step; a fully reshardable load ends in
    KeyError 'step'; after a load all parameters share one step tensor, which then advances once per parameter; a load
    of state saved before the first step leaves no step at all; a rank that has no parameters for an optimizer (the
    experts' optimizer, where a stage has dense layers only) has no step, and asserts. OptimizerConfig has no setting
    for it.
    """
    import megatron.core.optimizer as package
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if not package.USING_PYTORCH_OPTIMIZER:
        return
    build = package._get_megatron_optimizer_based_on_param_groups
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    def build_with_state(*args: Any, **kwargs: Any) -> Any:
        optimizer = build(*args, **kwargs)
        if isinstance(optimizer.optimizer, torch.optim.AdamW):
            _init_adamw_state(optimizer.optimizer)
            if isinstance(optimizer, DistributedOptimizer) and not optimizer.optimizer.state:
                _count_steps(optimizer.optimizer)
            optimizer.optimizer.register_load_state_dict_pre_hook(_with_own_steps)
        return optimizer

    def set_states_but_step(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        step = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]["step"]
        set_states(self, model_param, {**tensors, "step": step})

    package._get_megatron_optimizer_based_on_param_groups = build_with_state
    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_but_step


def _init_adamw_state(optimizer: torch.optim.AdamW) -> None:
    """Allocate moments and step counters now, as AdamW would on its first step."""
    for group in optimizer.param_groups:
        group["fused"] = True
        for param in group["params"]:
            optimizer.state[param] = {
                "step": torch.zeros((), dtype=torch.float32, device=param.device),
                "exp_avg": torch.zeros_like(param.data),
                "exp_avg_sq": torch.zeros_like(param.data),
            }


def _count_steps(optimizer: torch.optim.AdamW) -> None:
    """Let an optimizer without parameters keep a step counter, as the state of no parameter."""
    optimizer.state[None] = {"step": torch.zeros((), dtype=torch.float32)}
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: optimizer.state[None]["step"].add_(1))


def _with_own_steps(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return `state_dict` with a step counter for each parameter, 0 where megatron-core left it out."""
    zero = torch.zeros((), dtype=torch.float32)
    state = {key: {**own, "step": own.get("step", zero).detach().clone()} for key, own in state_dict["state"].items()}
    groups = [{**group, "fused": True} for group in state_dict["param_groups"]]  # whichever way they were saved
    return {**state_dict, "state": state, "param_groups": groups}


# Replaced in one object of megatron.core.


def count_padding(wrapped: Any) -> None:
    """Count the padding between the buckets of a DistributedDataParallel's buffers as their content.

    megatron-core leaves it out when it gathers the optimizer's states for a checkpoint, and then cuts parameters of
    later buckets out of the wrong places: a shared embedding has a bucket of its own. No setting turns padding off.
    """
    for buffer in wrapped.buffers + wrapped.expert_parallel_buffers:
        for bucket in buffer.buckets[:-1]:
            bucket.numel_unpadded = bucket.grad_data.numel()
        buffer.numel_unpadded = sum(bucket.numel_unpadded for bucket in buffer.buckets)


def leave_main_params_to_adam(config: Any) -> None:
    """Let the DistributedOptimizers of an OptimizerConfig leave main parameters to their Adam, and pass it gradients as
    `decoupled_grad`.

    The public setting, `use_precision_aware_optimizer`, takes no Adam but TransformerEngine's. An argument for the
    optimizer's class would make this unnecessary.
    """
    config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True


def save_optimizer_states_by(optimizer: Any, sharded_states: Callable[..., dict[int, Any]]) -> None:
    """Let a DistributedOptimizer give its states to checkpoints by another function, which loads them in place.

    Two formats of megatron-core do not suffice: "fully_reshardable" gathers all states in the memory of one rank, which
    alone writes them, and every rank loads all of them; "dp_reshardable" loads in the same model-parallel layout only.
    """
    optimizer.sharded_param_state_fully_reshardable = functools.partial(sharded_states, optimizer)
    optimizer.load_parameter_state_from_fully_reshardable = lambda states: None  # they are in their places


def expect_shapes(communicator: Any, shapes: Iterable[tuple[int, ...]]) -> None:
    """Give a P2PCommunicator the shapes of all tensors of a pass, in the order of micro-batches.

    With `variable_seq_lengths` megatron-core sends the shape before each tensor, for which the GPU waits twice. Without
    virtual stages each stage takes micro-batches from the one before, and gradients from the one after, in their order.
    """
    shapes = list(shapes)
    from_previous = iter(shapes)
    from_next = iter(shapes)

    def next_shapes(
        tensor_send_next: Any,
        tensor_send_prev: Any,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple:
        return next(from_previous) if recv_prev else None, next(from_next) if recv_next else None

    communicator._communicate_shapes = next_shapes

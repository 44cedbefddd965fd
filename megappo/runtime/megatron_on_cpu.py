"""What lets stock megatron-core run without CUDA. It changes torch for the whole process."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _device

FACTORIES = ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like", "ones_like")


def redirect_cuda() -> None:
    """Let the CUDA calls megatron-core makes unconditionally act on the CPU."""
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
    # `with torch.device(...)` knows the factories by identity: let it note them before they are wrapped.
    _device._device_constructors()
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, device=None: self


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`factory` with device="cuda" read as the CPU, and without pinned memory (which needs CUDA)."""

    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        wanted = kwargs.get("device")
        if wanted is not None and str(wanted).startswith("cuda"):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return create


def import_uncompiled() -> None:
    """Import megatron.core with `jit_fuser` a no-op: torch.compile would call for a C++ compiler on each rank."""
    compile_ = torch.compile
    torch.compile = lambda function: function
    try:
        import megatron.core.jit  # noqa: F401
    finally:
        torch.compile = compile_


def mend() -> None:
    """Replace what in megatron-core itself takes a GPU for granted."""
    from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    # On a CPU the "CUDA" stream is the CPU generator, read and set whole.
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    # For the same reason every fork "changes the CPU state": that warning means nothing here.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())

    # Numbers of tokens are counted on the device and copied to the host on a stream of their own.
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "none"
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _read_splits
    _mend_uneven_collectives()
    _mend_collectives_of_one()
    _mend_gradient_accumulation()

    for owner, name in (
        (clip_grads, "clip_grad_by_total_norm_fp32"),
        (optimizer, "clip_grad_by_total_norm_fp32"),
        (optimizer.Float16OptimizerWithFloat16Params, "__init__"),
        (distrib_optimizer.DistributedOptimizer, "__init__"),
    ):
        _call_with_cuda_type_names(owner, name)


def _read_splits(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """Read off how many tokens go to, and come from, each expert-parallel rank; they are on the CPU already."""
    if point == dispatcher.cuda_dtoh_point and dispatcher.input_splits is not None:
        dispatcher.input_splits = dispatcher.input_splits.tolist()
        dispatcher.output_splits = dispatcher.output_splits.tolist()
    return tokens_per_expert


def _mend_uneven_collectives() -> None:
    """Gather, and sum, parts of different lengths: gloo takes equal ones only."""
    from megatron.core.tensor_parallel import mappings

    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    @functools.wraps(gather)
    def gather_any(input_: torch.Tensor, group: Any, output_split_sizes: Any = None, *args: Any, **kwargs: Any) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, *args, **kwargs)
        parts = [input_.new_empty(size, *input_.shape[1:]) for size in output_split_sizes]
        parts[group.rank()] = input_.contiguous()
        for rank, part in enumerate(parts):
            torch.distributed.broadcast(part, group=group, group_src=rank)
        return torch.cat(parts)

    @functools.wraps(reduce_scatter)
    def scatter_any(input_: torch.Tensor, group: Any, input_split_sizes: Any = None, *args: Any, **kwargs: Any) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(input_, group, input_split_sizes, *args, **kwargs)
        total = input_.clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split(input_split_sizes)[group.rank()].clone()

    mappings._gather_along_first_dim = gather_any
    mappings._reduce_scatter_along_first_dim = scatter_any


def _mend_collectives_of_one() -> None:
    """Leave the buffers of the distributed optimizer alone where one rank has them whole: gloo copies them onto
    themselves."""
    from megatron.core.distributed import param_and_grad_buffer

    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        setattr(param_and_grad_buffer, name, _unless_alone(getattr(param_and_grad_buffer, name)))


def _unless_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(output: torch.Tensor, input_: torch.Tensor, *args: Any, group: Any, **kwargs: Any) -> Any:
        if group.size() == 1 and output.data_ptr() == input_.data_ptr():
            return None
        return collective(output, input_, *args, group=group, **kwargs)

    return call


def _mend_gradient_accumulation() -> None:
    """Add the gradient of a linear layer's weight to its main gradient at once, wherever there is one; Megatron does so
    with a kernel of Apex's. And that of an embedding's: torch makes one of the whole vocabulary for the words of a
    micro-batch."""
    from megatron.core.tensor_parallel import layers

    class Linear(layers.LinearWithGradAccumulationAndAsyncCommunication):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, fusion: bool, *rest: Any) -> Any:
            output = super(Linear, Linear).forward(ctx, x, weight, None, hasattr(weight, "main_grad"), *rest)
            ctx.use_bias = bias is not None
            return output if bias is None else output.add_(bias)  # Megatron makes another tensor of the sum

    layers.LinearWithGradAccumulationAndAsyncCommunication = Linear
    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=_add_weight_gradient)
    layers.F = SimpleNamespace(embedding=_embedding)  # of which Megatron's module uses nothing else


def _add_weight_gradient(inputs: torch.Tensor, grad_outputs: torch.Tensor, main_grad: torch.Tensor) -> None:
    """main_grad [outputs, inputs] float32 += grad_outputs [T, outputs]^T inputs [T, inputs]."""
    if inputs.dtype == main_grad.dtype:
        main_grad.addmm_(grad_outputs.t(), inputs)
    else:
        main_grad.add_(grad_outputs.t() @ inputs)


def _embedding(words: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """torch's, [words, H]."""
    # What is reduced as soon as autograd has it must come from autograd.
    if hasattr(weight, "main_grad") and not getattr(weight, "is_reduced_early", False):
        return _Embedding.apply(words, weight)
    return torch.nn.functional.embedding(words, weight)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, words: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(words)
        ctx.main_grad = weight.main_grad
        return torch.nn.functional.embedding(words, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        (words,) = ctx.saved_tensors
        ctx.main_grad.index_add_(0, words.flatten(), grad.flatten(0, -2).to(ctx.main_grad.dtype))
        return None, None


def _call_with_cuda_type_names(owner: Any, name: str) -> None:
    """Wrap `owner.name`, which compares Tensor.type() with names such as 'torch.cuda.FloatTensor'."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _cuda_type_names():
            return function(*args, **kwargs)

    setattr(owner, name, call)


@contextlib.contextmanager
def _cuda_type_names() -> Iterator[None]:
    """Let Tensor.type() name CPU tensors as if they were on a GPU."""
    type_ = torch.Tensor.type

    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = type_(self, *args, **kwargs)
        if isinstance(answer, str) and "cuda" not in answer:
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    torch.Tensor.type = named
    try:
        yield
    finally:
        torch.Tensor.type = type_

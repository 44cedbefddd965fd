"""The machine under the program: devices, backends, what is installed, and what lets stock megatron-core run on a CPU.

`install()` is what makes megatron-core run on a CPU. It changes torch for the whole process, so it must never run in a
process that serves SGLang.
"""

import contextlib
import functools
import importlib.metadata
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _device

PACKAGES = ("torch", "megatron-core", "transformer-engine", "apex", "sglang", "flash-attn")
# What megatron-core warns of on every run, by its own doing.
HARMLESS_WARNINGS = (
    ".*Apex (is|are) not installed",
    "full scope is deprecated. Use empty cuda_graph_scope",
    "`torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated",
    "`load_state_dict` is deprecated and will be removed in future versions",
    "Please use DTensor instead and we are deprecating ShardedTensor",
    "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed",
    "torch.distributed is disabled, unavailable or uninitialized, assuming the intent is to load in a single process",
    "`sequence_parallel` is set to `True`, but tensor model parallel size is 1",  # as it is for experts
)
HARMLESS_WARNINGS_ON_CPU = ("When using .* it is recommended to set .*CUDA_DEVICE_MAX_CONNECTIONS",)
FACTORIES = ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like", "ones_like")


def has_cuda() -> bool:
    """Whether torch sees a CUDA device."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """Device of this process: the GPU of its LOCAL_RANK, else the CPU."""
    if has_cuda():
        index = int(os.environ.get("LOCAL_RANK", "0"))
        if index >= torch.cuda.device_count():
            raise RuntimeError(
                f"local rank {index} has no GPU: this node has {torch.cuda.device_count()}; start as many processes "
                "(NPROC) and place everything on as many ranks"
            )
        return torch.device("cuda", index)
    return torch.device("cpu")


def empty_cache() -> None:
    """Give unused GPU memory of torch's allocator back to the GPU; nothing to do on a CPU."""
    if has_cuda():
        torch.cuda.empty_cache()


def backend() -> str:
    """torch.distributed backend: gloo for CPU tensors everywhere, NCCL for CUDA tensors."""
    return "cpu:gloo,cuda:nccl" if has_cuda() else "gloo"


def has_transformer_engine() -> bool:
    """Whether TransformerEngine is installed and has a GPU to run on."""
    return has_cuda() and _version("transformer-engine") is not None


def capabilities() -> dict[str, str]:
    """What was found and which path is taken, for the table printed at start.

    Returns:
        package -> version or "not installed", then device, backend, layer_spec and optimizer.
    """
    found = {package: _version(package) or "not installed" for package in PACKAGES}
    found["device"] = torch.cuda.get_device_name(device()) if has_cuda() else "cpu"
    found["backend"] = backend()
    found["layer_spec"] = "transformer_engine" if has_transformer_engine() else "torch"
    found["optimizer"] = _adam_source()
    return found


def install() -> None:
    """Make stock megatron-core usable here; call once per process, before anything imports megatron.core.

    With CUDA only torch's AdamW is mended, and only where megatron-core falls back to it (without TransformerEngine and
    Apex).

    Raises:
        RuntimeError: megatron.core was imported before the first call.
    """
    if getattr(install, "done", False):
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("megatron.core was imported before megappo.platform.install(): call install() first")
    for message in HARMLESS_WARNINGS if has_cuda() else HARMLESS_WARNINGS + HARMLESS_WARNINGS_ON_CPU:
        warnings.filterwarnings("ignore", message=message)
    if has_cuda():
        torch.cuda.set_device(device())
    else:
        _redirect_cuda_to_cpu()
        _import_megatron_uncompiled()
        _mend_megatron_on_cpu()
    _mend_missing_transformer_engine()
    _mend_torch_adamw()
    install.done = True


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _adam_source() -> str:
    """Where megatron-core takes its Adam from: it prefers TransformerEngine, then Apex, then torch."""
    if _version("transformer-engine"):
        return "TransformerEngine FusedAdam"
    return "Apex FusedAdam" if _version("apex") else "torch AdamW"


# --- torch without CUDA ---


def _redirect_cuda_to_cpu() -> None:
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


def _import_megatron_uncompiled() -> None:
    """Import megatron.core with `jit_fuser` a no-op: torch.compile would call for a C++ compiler on each rank."""
    compile_ = torch.compile
    torch.compile = lambda function: function
    try:
        import megatron.core.jit  # noqa: F401
    finally:
        torch.compile = compile_


# --- megatron-core on a CPU ---


def _mend_megatron_on_cpu() -> None:
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


def _mend_missing_transformer_engine() -> None:
    """Define a name that the router looks up with or without TransformerEngine, which alone defines it; and let latent
    attention know that it is missing, or it would ask whether a module is of a class that is none."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = transformer_engine.HAVE_TE


# --- torch's AdamW under megatron-core's optimizers ---


def _mend_torch_adamw() -> None:
    """Let torch's AdamW be saved and resumed by megatron-core, whose optimizers expect the state layout of Apex.

    Mended: DistributedOptimizer.state_dict() asserts before the first step; a fully reshardable load ends in
    KeyError 'step'; after a load all parameters share ONE step tensor, which then advances once per parameter; a load
    of state saved before the first step leaves no step at all; a rank that has no parameters for an optimizer (those of
    experts, where a stage has dense layers only) knows no step, and asserts.
    """
    import megatron.core.optimizer as package
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if not package.USING_PYTORCH_OPTIMIZER:
        return
    build = package._get_megatron_optimizer_based_on_param_groups
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    @functools.wraps(build)
    def build_with_state(*args: Any, **kwargs: Any) -> Any:
        optimizer = build(*args, **kwargs)
        if isinstance(optimizer.optimizer, torch.optim.AdamW):
            _give_state(optimizer.optimizer)
            if isinstance(optimizer, DistributedOptimizer) and not optimizer.optimizer.state:
                _count_steps(optimizer.optimizer)
            optimizer.optimizer.register_load_state_dict_pre_hook(_with_own_steps)
        return optimizer

    @functools.wraps(set_states)
    def set_states_but_step(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        step = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]["step"]
        set_states(self, model_param, {**tensors, "step": step})

    package._get_megatron_optimizer_based_on_param_groups = build_with_state
    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_but_step


def _give_state(optimizer: torch.optim.AdamW) -> None:
    """Allocate moments and step counters now, as AdamW would on its first step."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(param.data),
                "exp_avg_sq": torch.zeros_like(param.data),
            }


def _count_steps(optimizer: torch.optim.AdamW) -> None:
    """Let an optimizer without parameters keep a step counter all the same, as state of none of them."""
    optimizer.state[None] = {"step": torch.zeros((), dtype=torch.float32)}
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: optimizer.state[None]["step"].add_(1))


def _with_own_steps(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """`state_dict` with a step counter for each parameter, 0 where megatron-core left it out."""
    zero = torch.zeros((), dtype=torch.float32)
    state = {key: {**own, "step": own.get("step", zero).detach().clone()} for key, own in state_dict["state"].items()}
    return {**state_dict, "state": state}

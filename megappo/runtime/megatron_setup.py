"""What stock megatron-core needs before it is first imported: `install()`.

It changes torch for the whole process, so it must never run in a process that serves SGLang. What is mended here is
missing without TransformerEngine and Apex, with or without CUDA; `megatron_on_cpu` stands in for CUDA.
"""

import functools
import sys
import warnings
from typing import Any

import torch

from megappo.runtime import megatron_on_cpu, platform

# What megatron-core warns of on every run, by its own doing.
HARMLESS_WARNINGS = (
    ".*Apex (is|are) not installed",
    "`torch.jit.script` is deprecated",  # TransformerEngine 2.11 and torch 2.14
    "`torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated",
    "`load_state_dict` is deprecated and will be removed in future versions",
    "Please use DTensor instead and we are deprecating ShardedTensor",
    "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed",
    "torch.distributed is disabled, unavailable or uninitialized, assuming the intent is to load in a single process",
    "`sequence_parallel` is set to `True`, but tensor model parallel size is 1",  # as it is for experts
)
HARMLESS_WARNINGS_ON_CPU = ("When using .* it is recommended to set .*CUDA_DEVICE_MAX_CONNECTIONS",)


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
        raise RuntimeError(
            "megatron.core was imported before megappo.runtime.megatron_setup.install(): call install() first"
        )
    for message in HARMLESS_WARNINGS if platform.has_cuda() else HARMLESS_WARNINGS + HARMLESS_WARNINGS_ON_CPU:
        warnings.filterwarnings("ignore", message=message)
    if platform.has_cuda():
        torch.cuda.set_device(platform.device())
    if platform.fault("transformer-engine"):
        # Of what a broken one raises, megatron-core takes only an ImportError for its absence.
        sys.modules["transformer_engine"] = None
    if not platform.has_cuda():
        megatron_on_cpu.redirect_cuda()
        megatron_on_cpu.import_uncompiled()
        megatron_on_cpu.mend()
    _mend_missing_transformer_engine()
    _mend_torch_adamw()
    install.done = True


def _mend_missing_transformer_engine() -> None:
    """Define a name that the router looks up with or without TransformerEngine, which alone defines it; let latent
    attention know that it is missing, or it would ask whether a module is of a class that is none; and clip gradients
    in place, where megatron-core's own stand-in scales a copy of each and copies that back."""
    from megatron.core import utils
    from megatron.core.extensions import transformer_engine
    from megatron.core.optimizer import clip_grads
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = transformer_engine.HAVE_TE
    if clip_grads.multi_tensor_scale_impl is utils.local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = _scale_in_place


def _scale_in_place(chunk_size: int, noop_flag: torch.Tensor, lists: list[list[torch.Tensor]], scale: float) -> None:
    """multi_tensor_scale, of gradients that are their own target."""
    torch._foreach_mul_(lists[0], scale)


def _mend_torch_adamw() -> None:
    """Let torch's AdamW take its step in one pass over a parameter, and be saved and resumed by megatron-core, whose
    optimizers expect the state layout of Apex.

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
            for group in optimizer.optimizer.param_groups:
                group["fused"] = True
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
                "step": torch.zeros((), dtype=torch.float32, device=param.device),
                "exp_avg": torch.zeros_like(param.data),
                "exp_avg_sq": torch.zeros_like(param.data),
            }


def _count_steps(optimizer: torch.optim.AdamW) -> None:
    """Let an optimizer without parameters keep a step counter all the same, as state of none of them."""
    optimizer.state[None] = {"step": torch.zeros((), dtype=torch.float32)}
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: optimizer.state[None]["step"].add_(1))


def _with_own_steps(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """`state_dict` with a step counter for each parameter, 0 where megatron-core left it out, for fused steps."""
    zero = torch.zeros((), dtype=torch.float32)
    state = {key: {**own, "step": own.get("step", zero).detach().clone()} for key, own in state_dict["state"].items()}
    groups = [{**group, "fused": True} for group in state_dict["param_groups"]]  # however they were saved
    return {**state_dict, "state": state, "param_groups": groups}

"""What stock SGLang needs on a machine without CUDA: `install()` before importing sglang, in each of its processes."""

import functools
import importlib.util
import os
import sys
import types
from typing import Any, NoReturn

import torch
from torch.multiprocessing import reductions
from torch.overrides import TorchFunctionMode

from megappo.runtime.torchvision_on_cpu import define_torchvision_operators

# Names that SGLang's CPU mode imports from sgl_kernel at module level. Without AMX instructions it never calls one.
_KERNEL_NAMES = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
)


def install() -> None:
    """Make `import sglang` work on a CPU; does nothing when CUDA is present or when called again."""
    if torch.cuda.is_available() or hasattr(reductions.rebuild_storage_filename, "__wrapped__"):
        return
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    if importlib.util.find_spec("sgl_kernel") is None:
        sys.modules["sgl_kernel"] = _kernel_names()
    define_torchvision_operators()
    _keep_shared_memory_mapped()


def pin_no_memory() -> None:
    """Leave out that memory is pinned, of what this thread does from now on, and what is forked from it: SGLang's LoRA
    asks for it in any case, and torch refuses it without CUDA. Does nothing when CUDA is present."""
    if not torch.cuda.is_available():
        _Unpinned().__enter__()


class _Unpinned(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.pin_memory:
            return args[0]
        return function(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def _keep_shared_memory_mapped() -> None:
    """Keep the shared memory mapped that this process has been handed.

    A trainer's weights come in the same memory in every sync: to map it anew takes longer than to read it.
    """
    rebuild, kept = reductions.rebuild_storage_filename, {}

    @functools.wraps(rebuild)
    def rebuild_and_keep(cls: Any, manager: Any, handle: Any, *arguments: Any) -> torch.UntypedStorage:
        kept[handle] = rebuild(cls, manager, handle, *arguments)
        return kept[handle]

    reductions.rebuild_storage_filename = rebuild_and_keep


def _kernel_names() -> types.ModuleType:
    module = types.ModuleType("sgl_kernel", "Names that SGLang's CPU mode imports; calling one is an error.")
    for name in _KERNEL_NAMES:
        setattr(module, name, _absent_kernel(name))
    return module


def _absent_kernel(name: str) -> object:
    def kernel(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} was called, but the package sgl_kernel is not installed here")

    return kernel

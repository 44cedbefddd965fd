"""Count the host reads of a computation: operations whose result, or its shape, the host must read.

On a GPU each of them waits until all earlier kernels are done, and the GPU then waits for the host. On a CPU device and
host are the same, so plain copies are recognized by the name of their call: `.cpu()`, `.tolist()`, `.numpy()`. Copies
by `.to(...)` or `copy_`, in either direction, are not: only a GPU shows them (`torch.cuda.set_sync_debug_mode`).
"""

import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

CALLS = ("cpu", "tolist", "numpy")
READING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
BY_MASK = (torch.bool, torch.uint8)


def host_reads(compute: Callable[[], torch.Tensor]) -> Counter[str]:
    """Count the host reads of a computation and its backward pass: "operation at file:line" -> number."""
    found: Counter[str] = Counter()
    with ExitStack() as stack:
        for name in CALLS:
            stack.enter_context(patch.object(torch.Tensor, name, _counted(name, found)))
        stack.enter_context(_Operations(found))
        compute().sum().backward()
    return found


def _counted(name: str, found: Counter[str]) -> Callable[..., Any]:
    call = getattr(torch.Tensor, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        found[_named(name)] += 1
        return call(*args, **kwargs)

    return counted


class _Operations(TorchDispatchMode):
    def __init__(self, found: Counter[str]):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if _reads(function, args):
            self.found[_named(str(function))] += 1
        return function(*args, **(kwargs or {}))


def _reads(function: Any, args: tuple) -> bool:
    name = function.overloadpacket._qualified_op_name
    if name == "aten::masked_scatter_backward":
        return True
    if name in ("aten::index", "aten::index_put", "aten::index_put_"):
        by_mask = any(index is not None and index.dtype in BY_MASK for index in args[1])
        is_fill = name != "aten::index" and args[2].numel() == 1  # CUDA fills by the mask
        return by_mask and not is_fill
    return any(tag in function.tags for tag in READING)


def _named(operation: str) -> str:
    """Return an operation's name with the line outside torch that called it, or that called the backward pass."""
    frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
    caller = next(frame for frame in reversed(frames) if frame.filename != __file__)
    return f"{operation} at {caller.filename}:{caller.lineno}"

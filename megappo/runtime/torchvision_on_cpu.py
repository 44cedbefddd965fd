"""Operators with which transformers and SGLang can import torchvision on a CPU. It imports torch only when called.

They import it with some models and tokenizers, Llama's among them. PyPI's is built for CUDA: beside a torch built for
the CPU its library of operators does not load, and its Python code cannot do without them.
"""

import functools
import importlib.util
import sys
from importlib.machinery import PathFinder
from typing import Any

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
"""Schemas of the operators that torchvision expects when it is imported."""
LIBRARIES = ("_C", "_C_stable")
"""Modules that have them: of torchvision up to 0.28, and from 0.29 on."""


@functools.cache
def define_torchvision_operators() -> Any:
    """Define operators in place of torchvision's own, where these do not load; calling one is an error.

    Returns:
        What they live as long as; None where there is nothing to do: torch (which the dry run hides) or torchvision is
        absent; torchvision was imported already, or is built for this torch, whose operators nobody else may define.
    """
    spec = importlib.util.find_spec("torch") and importlib.util.find_spec("torchvision")
    if spec is None or "torchvision" in sys.modules:
        return None
    import torch

    own = (PathFinder.find_spec(name, spec.submodule_search_locations) for name in LIBRARIES)
    if any(_loads(one.origin) for one in own if one is not None):
        return None
    library = torch.library.Library("torchvision", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    return library


def _loads(path: str | None) -> bool:
    """Load a library into this process, and return whether that succeeded."""
    import torch

    try:
        torch.ops.load_library(path)
    except OSError:
        return False
    return True

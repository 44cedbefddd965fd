"""Lets transformers and SGLang import a torchvision that is built for CUDA beside a torch that is built for a CPU.

launch/setup.sh copies this file into .venv, where Python calls it at every start (torchvision_on_cpu.pth). While
torchvision is imported, it describes operators of its library, and fails if the library did not load. Here these
operators are declared first; a call of one is an error. A torchvision whose library loads is left alone.
"""

import sys

OPERATORS = ("nms", "qnms")
"""Operators that torchvision 0.28 and 0.29 describe by `torch.library.register_fake`, which needs a declaration."""
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
declared = []
"""The library of the declarations, which end with it."""


def define_torchvision_operators() -> None:
    """Declare the operators as soon as torchvision is imported. In .venv this is done already."""
    sys.meta_path.insert(0, Declaring)


class Declaring:
    """Finder that finds no module, and declares the operators before torchvision describes them."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Declare the operators when torchvision's descriptions are imported, after its library has had its turn."""
        if name != "torchvision._meta_registrations":
            return
        import torch

        declared.append(torch.library.Library("torchvision", "FRAGMENT"))
        for operator in OPERATORS:
            if not hasattr(torch.ops.torchvision, operator):
                declared[-1].define(operator + SCHEMA)

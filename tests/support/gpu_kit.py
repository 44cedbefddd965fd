"""The GPU kit's folder, and its stages."""

import importlib.util
from types import ModuleType

from program import REPOSITORY

KIT = REPOSITORY / "tests" / "gpu" / "kit"


def kit_module(name: str) -> ModuleType:
    """Import one of the kit's scripts, which are not in a package."""
    spec = importlib.util.spec_from_file_location(name, KIT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


STAGES: dict[str, tuple[list[str], int]] = kit_module("run").STAGES

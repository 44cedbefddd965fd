"""The GPU kit's folder, and its stages."""

import importlib.util
import sys
from types import ModuleType

from program import REPOSITORY

KIT = REPOSITORY / "tests" / "gpu" / "kit"


def kit_module(name: str) -> ModuleType:
    """Import one of the kit's scripts, which are not in a package and import each other by their names."""
    spec = importlib.util.spec_from_file_location(name, KIT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(KIT))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(KIT))
    return module


Stages = dict[str, tuple[list[str], int]]
STAGES: Stages = kit_module("run").STAGES
NODE_STAGES: Stages = kit_module("node").NODE_STAGES

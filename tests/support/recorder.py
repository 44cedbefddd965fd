"""Access to tools/bench/same_numbers.py for tests: runs with real models on fixed rollouts."""

import importlib.util
from pathlib import Path
from types import ModuleType

import torch.distributed as dist

BENCH = Path(__file__).parents[2] / "tools" / "bench" / "same_numbers.py"


def recorder_in(folder: Path) -> ModuleType:
    """Return the recorder, with its model in the folder; all ranks call it together."""
    spec = importlib.util.spec_from_file_location("same_numbers", BENCH)
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    if dist.get_rank() == 0:
        bench.write_model(folder)
    dist.barrier()
    return bench

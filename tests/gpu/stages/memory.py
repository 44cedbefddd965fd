"""Memory that the plan assumes: on the GPU CUDA's context of a rank and what an engine keeps asleep, on the host an
engine's processes and, with adapters, the copy of its weights. Run it alone on its machine.

python tests/gpu/stages/memory.py
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from common import CUDA, DEVICE, GIB, OtherProcess, report
from engines import model_folder
from runs import engine_arguments
from safetensors.torch import load_file
from served import score, serving

from megappo.config.model_sections import Lora
from megappo.lab.estimate.gpu_memory import CONTEXT_BYTES, ENGINE_CONTEXT_BYTES, ENGINE_PROCESS_BYTES, PROCESS_BYTES

SETTLING_SECONDS = 2
ENGINES = {"plain": None, "adapters": Lora(rank=16)}


def free_bytes(call: None = None) -> int:
    """On the GPU; 0 on a CPU."""
    return torch.cuda.mem_get_info()[0] if CUDA else 0


def host_bytes() -> int:
    """In use on this machine, without the kernel's caches, and with what is pinned."""
    memory = psutil.virtual_memory()
    return memory.total - memory.available


def of_processes() -> dict[str, float]:
    """Return the GPU memory of each process, where the driver lists them; in a container it may list none."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines() if CUDA else []
    pairs = [line.split(", ") for line in lines]
    return {pid: float(mib) / 1024 for pid, mib in pairs if mib.replace(".", "").isdigit()}


def of_rank(watcher: OtherProcess) -> float:
    """Return the bytes that CUDA and cuBLAS take in a process, torch's allocator aside."""
    before = watcher.ask(None)
    matrix = torch.ones(256, 256, dtype=torch.bfloat16, device=DEVICE)
    (matrix @ matrix).sum().item()
    return before - watcher.ask(None) - (torch.cuda.memory_reserved() if CUDA else 0)


def of_engine(name: str, lora: Lora | None, folder: Path, watcher: OtherProcess) -> dict[str, float]:
    """Return an engine's memory awake, without weights and cache; asleep; and on the host."""
    free, host = watcher.ask(None), host_bytes()
    with serving(f"memory_{name}", folder, engine_arguments(), lora) as engine:
        client = engine.wait_ready()
        if lora is None:
            score(client)
        held = client.held_bytes() if CUDA else 0
        awake = free - watcher.ask(None)
        processes = of_processes()
        host_awake = host_bytes() - host
        client.sleep()
        time.sleep(SETTLING_SECONDS)
        asleep = free - watcher.ask(None)
        host_asleep = host_bytes() - host
    sizes = {"awake_besides_weights_and_cache": awake - held, "asleep": asleep}
    sizes |= {"host_awake": host_awake, "host_asleep": host_asleep}
    figures = {f"{name}_{key}_gib": size / GIB for key, size in sizes.items()}
    return figures | {f"{name}_process_{pid}_gib": size for pid, size in processes.items()}


def measure() -> dict:
    figures: dict = {"stage": "memory"} | ({} if CUDA else {"skipped": "memory of a GPU needs one"})
    watcher = OtherProcess(free_bytes)
    with tempfile.TemporaryDirectory() as root:
        watcher.ask(None)  # it has its own context then
        figures["rank_context_gib"] = of_rank(watcher) / GIB
        figures["rank_host_gib"] = psutil.Process().memory_info().rss / GIB
        folder = model_folder(Path(root))
        torch.cuda.empty_cache()
        for name, lora in ENGINES.items():
            figures |= of_engine(name, lora, folder, watcher)
        weights = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values()) / GIB
    watcher.end()
    planned = {"rank_context": CONTEXT_BYTES, "plain_asleep": ENGINE_CONTEXT_BYTES, "rank_host": PROCESS_BYTES}
    planned |= {"plain_host_awake": ENGINE_PROCESS_BYTES, "adapters_host_awake": ENGINE_PROCESS_BYTES + weights * GIB}
    figures |= {f"planned/{name}_gib": size / GIB for name, size in planned.items()}
    print(figures, file=sys.stderr)
    above = [name for name, size in planned.items() if figures[f"{name}_gib"] * GIB > size]
    assert not above or not CUDA, f"more memory than the plan assumes: {', '.join(above)}; {figures}"
    return figures


if __name__ == "__main__":
    report(measure)

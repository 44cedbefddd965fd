"""Whether this machine can run megappo, in about a minute: .venv/bin/python -m megappo.doctor [CHECK ...]

Prints a line per check, under a problem the remedy. Exits with 1 if there is a problem. Without a GPU, what the CPU
takes in its place is checked.
"""

import argparse
import os
import resource
import shutil
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.multiprocessing import spawn

from megappo.config.schema import Rollout
from megappo.engines.client import SamplingParams
from megappo.engines.process import Engine
from megappo.runtime import platform
from megappo.runtime.listening import LOOPBACK, listener, stay_on_this_node
from megappo.runtime.torchvision_on_cpu import define_torchvision_operators
from megappo.runtime.variables import faults, visible_devices

LEAST_OPEN_FILES = 4096
LEAST_SHARED_BYTES = 2**30
TIMEOUT = timedelta(seconds=60)


class Problem(Exception):
    """What was found, and is not as it must be."""


def packages() -> str:
    """Versions of what is installed; each package can be imported."""
    found = platform.capabilities()
    versions = ", ".join(f"{name} {found[name]}" for name in platform.PACKAGES)
    needed = ("torch", "megatron-core", "sglang")
    if any(found[name] == "not installed" for name in needed) or any(map(platform.fault, platform.TRIED)):
        raise Problem(versions)
    return versions


def gpus() -> str:
    """The GPUs that torch sees."""
    if unseen := platform.unseen_gpus():
        raise Problem(unseen)
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if not names and torch.version.cuda and visible_devices(os.environ) != []:
        raise Problem(f"torch for CUDA {torch.version.cuda} sees no GPU")
    found = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return found or f"none: the CPU runs everything (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')})"


def collectives() -> str:
    """Ranks of this machine, one for each GPU, else two, add up a tensor."""
    ranks = torch.cuda.device_count() or 2
    with tempfile.TemporaryDirectory() as folder:
        spawn(_add_up, (ranks, f"{folder}/store"), nprocs=ranks)
    return f"{platform.backend()} between {ranks} ranks"


def _add_up(rank: int, ranks: int, store: str) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    stay_on_this_node()
    if platform.has_cuda():
        torch.cuda.set_device(platform.device())
    rendezvous = dist.FileStore(store, ranks)
    dist.init_process_group(platform.backend(), store=rendezvous, rank=rank, world_size=ranks, timeout=TIMEOUT)
    total = torch.full((2**20,), float(rank), device=platform.device())
    dist.all_reduce(total)
    if not torch.all(total == ranks * (ranks - 1) / 2):
        raise Problem(f"rank {rank} has a wrong sum: {total[0].item()}")
    dist.destroy_process_group()


def attention() -> str:
    """TransformerEngine's attention over a pack of two sequences is torch's over each."""
    if not platform.has_transformer_engine():
        return "torch's: no TransformerEngine, or no GPU"
    from transformer_engine.pytorch import DotProductAttention

    lengths, heads, size = (300, 212), 4, 128
    pack = torch.randn(3, sum(lengths), heads, size, dtype=torch.bfloat16, device="cuda")
    bounds = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32, device="cuda")
    longest = {"max_seqlen_q": max(lengths), "max_seqlen_kv": max(lengths)}
    module = DotProductAttention(heads, size, qkv_format="thd", attn_mask_type="padding_causal")
    packed = module(*pack, cu_seqlens_q=bounds, cu_seqlens_kv=bounds, **longest)
    parts = [F.scaled_dot_product_attention(*part.transpose(1, 2), is_causal=True) for part in pack.split(lengths, 1)]
    difference = (packed.flatten(1) - torch.cat(parts, 1).transpose(0, 1).flatten(1)).abs().max().item()
    if not difference < 0.05:  # NaN too
        raise Problem(f"TransformerEngine's differs from torch's by {difference:.3g}")
    return f"TransformerEngine's, as torch's within {difference:.1g}"


def handles() -> str:
    """Another process reads a tensor of this one by its handle, as engines read weights."""
    tensor = torch.arange(2**20, device=platform.device())
    spawn(_read, (tensor,), nprocs=1)
    return f"a process read a tensor of another: {'CUDA IPC' if tensor.is_cuda else 'shared memory'}"


def _read(index: int, tensor: torch.Tensor) -> None:
    if not torch.equal(tensor.cpu(), torch.arange(len(tensor))):
        raise Problem("it read other numbers")


def engine() -> str:
    """SGLang serves a tiny random model."""
    # CUDA graphs take long to capture, and show nothing more.
    server_args = {"disable_cuda_graph": True}
    rollout = Rollout(max_running_requests=4, max_total_tokens=4096, mem_fraction_static=0.3, server_args=server_args)
    with tempfile.TemporaryDirectory() as folder:
        _write_model(Path(folder))
        started = Engine(
            folder,
            rollout,
            "bf16" if platform.has_cuda() else "fp32",
            index=0,
            gpu_ids=platform.gpu_ids([0]),
            log_path=Path(folder, "engine.log"),
            seed=0,
        )
        started.start()
        try:
            [answer] = started.wait_ready().generate([[1, 2, 3]], SamplingParams(4))
        finally:
            started.stop()
    return f"an engine wrote {len(answer.tokens)} tokens"


def _write_model(folder: Path) -> None:
    """A random Qwen2 whose heads are as large as SGLang's kernels for GPUs want them."""
    define_torchvision_operators()
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    sizes = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 256, "max_position_embeddings": 128}
    Qwen2ForCausalLM(Qwen2Config(**heads, **sizes)).save_pretrained(folder)


def variables() -> str:
    """Environment variables that name folders to write to."""
    if found := "; ".join(faults(os.environ)):
        raise Problem(found)
    return "the folders that they name can be written to"


def ports() -> str:
    """A free port of loopback, and a connection to it."""
    with listener(LOOPBACK, 0) as server, socket.create_connection(server.getsockname(), timeout=5):
        return f"loopback gives some, such as {server.getsockname()[1]}"


def shared_memory() -> str:
    """Free bytes of /dev/shm."""
    free = shutil.disk_usage("/dev/shm").free
    return _at_least(LEAST_SHARED_BYTES, free, f"{free / 2**30:.2f} GiB of /dev/shm are free")


def open_files() -> str:
    """How many files a process may open: the hard limit, to which ranks raise theirs."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _at_least(LEAST_OPEN_FILES, hard, f"{hard:,} files for a process")


def _at_least(least: int, number: int, found: str) -> str:
    if number < least:
        raise Problem(found)
    return found


def compiler() -> str:
    """What Triton compiles its launchers with."""
    return _on_gpus(map(shutil.which, [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]))


def nvcc() -> str:
    """What SGLang compiles kernels with."""
    return _on_gpus([platform.nvcc()])


def header() -> str:
    """What Triton's launchers include."""
    path = Path(sysconfig.get_path("include"), "Python.h")
    return _on_gpus([str(path) if path.exists() else None])


def _on_gpus(places: Iterable[str | None]) -> str:
    """The first place where it is."""
    if not platform.has_cuda():
        return "not needed on a CPU"
    found = next(filter(None, places), None)
    if found is None:
        raise Problem("found none")
    return found


CHECKS: dict[str, tuple[Callable[[], str], str]] = {
    "packages": (packages, "bash launch/setup.sh, on GPUs: bash launch/setup.sh gpu"),
    "gpus": (gpus, "look at nvidia-smi; in a container, docker run --gpus all"),
    "collectives": (collectives, "NCCL_DEBUG=INFO before the command says more; unset NCCL_* and GLOO_*; see /dev/shm"),
    "attention": (
        attention,
        "build TransformerEngine anew, see docs/clusters.md, or train with model.layer_spec=torch",
    ),
    "handles": (
        handles,
        "containers: --ipc=host; unset PYTORCH_CUDA_ALLOC_CONF; GPUs in exclusive mode: nvidia-smi -c 0",
    ),
    "engine": (
        engine,
        "what SGLang says stands above; not installed: bash launch/setup.sh; see docs/troubleshooting.md",
    ),
    "variables": (variables, "export another value in the shell or job script that starts the run"),
    "ports": (
        ports,
        "ip link set lo up; ip_local_port_range (sysctl) may be too narrow, or a firewall guards loopback",
    ),
    "shared_memory": (shared_memory, "mount -o remount,size=8g /dev/shm; containers: docker run --shm-size=8g"),
    "open_files": (open_files, "docker run --ulimit nofile=1048576, LimitNOFILE= of slurmd's unit, or limits.conf"),
    "compiler": (compiler, "apt-get install g++, or name one: CC=/path/to/gcc"),
    "nvcc": (nvcc, "export CUDA_HOME=/usr/local/cuda-13.0; or unset it: bash launch/setup.sh gpu brings one"),
    "header": (header, "apt-get install python3-dev, or another PYTHON for launch/setup.sh"),
}
"""What is checked, in this order: how, and the remedy."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 if there is a problem."""
    parser = argparse.ArgumentParser(
        ".venv/bin/python -m megappo.doctor", description="Check whether this machine can train."
    )
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"some of {', '.join(CHECKS)} (default: all)")
    names = parser.parse_args(arguments).checks or list(CHECKS)
    if unknown := sorted(set(names) - CHECKS.keys()):
        parser.error(f"no check {', '.join(unknown)}: expected some of {', '.join(CHECKS)}")
    well = [_is_well(name) for name in names]
    print("nothing is wrong" if all(well) else f"wrong: {well.count(False)} of {len(well)}", flush=True)
    return int(not all(well))


def _is_well(name: str) -> bool:
    check, remedy = CHECKS[name]
    try:
        found, well = check(), True
    except Exception as error:  # whatever it is, the others are checked too
        found, well = str(error) if isinstance(error, Problem) else f"{type(error).__name__}: {error}", False
    print(f"{name:<15}{'ok' if well else 'PROBLEM':<9}{found.strip()}", flush=True)
    if not well:
        print(f"{'':<15}{'remedy':<9}{remedy}", flush=True)
    return well


if __name__ == "__main__":
    sys.exit(main())

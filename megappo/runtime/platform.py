"""The machine under the program: its devices, and what is installed to use them."""

import functools
import gc
import importlib
import importlib.metadata
import inspect
import os
import resource
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megappo.runtime.machine import visible_devices

PACKAGES = ("torch", "megatron-core", "transformer-engine", "apex", "sglang", "flash-attn", "fla-core")
TRIED = {"transformer-engine": "transformer_engine.pytorch.fp8", "apex": "apex.optimizers"}
"""Packages that megatron-core does without where they cannot be imported, and the module it imports of each."""

NOT_INSTALLED = "not installed"
ENGINE_CORES = "MEGAPPO_ENGINE_CORES"
"""Environment variable: the cores of a node without GPUs, which its engines share while the trainer's ranks wait."""
NVIDIA_SMI_SECONDS = 60.0
DEVICES = Path("/dev")
KEPT_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**30)}
"""Settings of glibc: take no block of memory directly from the kernel, and keep up to this number of free bytes at the
end of the heap."""


def has_cuda() -> bool:
    """Return whether torch sees a CUDA device."""
    return torch.cuda.is_available()


def unseen_gpus() -> str:
    """Return why torch sees none of this machine's GPUs, and what to do; "" where it sees some, the machine shows none,
    or CUDA_VISIBLE_DEVICES hides all of them."""
    named = visible_devices(os.environ)
    if has_cuda() or named == []:
        return ""
    drivers = _installed_drivers()
    shown = len(drivers) or len(list(DEVICES.glob("nvidia[0-9]*")))
    if not shown:
        return ""
    driver = drivers[0] if drivers else "unknown: nvidia-smi does not answer"
    if cuda := torch.version.cuda:
        remedy = f"update the driver if it is too old for CUDA {cuda}; in a container, docker run --gpus all"
    else:
        remedy = "take .venv-gpu/bin/python (bash launch/setup.sh gpu makes it): this torch is built for a CPU"
    return (
        f"this machine shows GPUs ({shown}, driver {driver}), but torch {torch.__version__} sees none. To use them, "
        f"{remedy}. To use the CPU, hide them: CUDA_VISIBLE_DEVICES= before the command"
    )


def _installed_drivers() -> list[str]:
    """Return the driver's version for each GPU that nvidia-smi lists; none where it is missing or fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS)
    return [] if done.returncode else done.stdout.splitlines()


def device() -> torch.device:
    """Return the device of this process: the GPU of its LOCAL_RANK, else the CPU."""
    if has_cuda():
        index = int(os.environ.get("LOCAL_RANK", "0"))
        _check_has_gpu(index)
        return torch.device("cuda", index)
    return torch.device("cpu")


def _check_has_gpu(local_rank: int) -> None:
    if local_rank >= torch.cuda.device_count():
        raise RuntimeError(
            f"local rank {local_rank} has no GPU: this node has {torch.cuda.device_count()}; start as many processes "
            "(NPROC) and place everything on as many ranks"
        )


def share_cores(num_ranks: str) -> None:
    """Set the number of threads of the ranks that this process starts, unless OMP_NUM_THREADS is set: on a CPU they
    share the cores; on GPUs each has one thread, as torchrun would give it.

    Args:
        num_ranks: torchrun's --nproc-per-node.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    threads = 1
    if num_ranks.isdecimal() and not has_cuda():
        cores = num_cores()
        threads = max(1, cores // int(num_ranks))
        os.environ[ENGINE_CORES] = str(cores)
    os.environ["OMP_NUM_THREADS"] = str(threads)


def keep_freed_memory() -> None:
    """On a CPU, let the processes that this one starts reuse the memory that they free, unless the environment sets it
    otherwise.

    glibc returns blocks of 32 MiB and more to the kernel at once, which fills each page of the next one with
    zeros: an update of a 110M model on TP2 took 11.3 to 12.5 s, and 10.2 s without; all processes together had at most
    2 % more memory then."""
    if not has_cuda():
        for name, value in KEPT_MEMORY.items():
            os.environ.setdefault(name, value)


def num_cores() -> int:
    """Return the number of cores that this process may use, by its affinity and by a container's limit (cgroup v2)."""
    cores = len(os.sched_getaffinity(0))
    limit = Path("/sys/fs/cgroup/cpu.max")
    quota, period = limit.read_text().split() if limit.exists() else ("max", "")
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def engine_threads(num_sharing: int) -> int | None:
    """Return the threads of an engine's rank on a CPU, where `num_sharing` ranks share the node's cores;
    None = OMP_NUM_THREADS."""
    cores = os.environ.get(ENGINE_CORES)
    return max(1, int(cores) // num_sharing) if cores else None


def gpu_bytes() -> int | None:
    """Return the memory of this process's GPU; None on a CPU."""
    return torch.cuda.get_device_properties(device()).total_memory if has_cuda() else None


def compute_capability() -> int | None:
    """Return the compute capability of this process's GPU, times ten; None on a CPU."""
    if not has_cuda():
        return None
    major, minor = torch.cuda.get_device_capability(device())
    return 10 * major + minor


def pci_address() -> str:
    """Return the PCI address of this process's GPU, as sysfs names it; "" on a CPU."""
    if not has_cuda():
        return ""
    gpu = torch.cuda.get_device_properties(device())
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def free_gpu_share() -> float:
    """Return the free share of the memory of this process's GPU."""
    free, total = torch.cuda.mem_get_info(device())
    return free / total


def bytes_of_others() -> int:
    """Return the memory in use on this process's GPU, without the memory of torch's allocator here; 0 on a CPU."""
    if not has_cuda():
        return 0
    free, total = torch.cuda.mem_get_info(device())
    return total - free - torch.cuda.memory_reserved(device())


def gpu_ids(local_ranks: list[int]) -> list[str]:
    """Return the node's GPUs of some local ranks, as CUDA_VISIBLE_DEVICES names them; none on a CPU."""
    if not has_cuda():
        return []
    _check_has_gpu(max(local_ranks))
    names = visible_devices(os.environ) or [str(i) for i in range(max(local_ranks) + 1)]
    return [names[i] for i in local_ranks]


def nvcc() -> str | None:
    """Return the compiler of kernels at run time: CUDA_HOME's, else the one that SGLang would find, or pip's. It must
    have CUDA's headers beside it, which a wrapper in PATH may lack."""
    if own := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return shutil.which(f"{own}/bin/nvcc")
    compiler = shutil.which("nvcc")
    on_path = Path(compiler).resolve().parents[1] if compiler else None
    homes = filter(None, [on_path, Path("/usr/local/cuda"), _pip_toolkit()])
    toolkits = (home for home in homes if (home / "include" / "cuda_runtime.h").exists())
    return next(filter(None, (shutil.which(f"{home}/bin/nvcc") for home in toolkits)), None)


def cuda_libraries() -> str | None:
    """Return the folder of pip's CUDA libraries: torch finds it by itself; libraries loaded before torch do not."""
    folder = _pip_toolkit() / "lib"
    return str(folder) if folder.is_dir() else None


def _pip_toolkit() -> Path:
    return Path(sysconfig.get_path("purelib"), "nvidia", "cu13")


def empty_cache() -> None:
    """Give unused GPU memory of torch's allocator back to the GPU; nothing to do on a CPU."""
    if has_cuda():
        torch.cuda.empty_cache()


def backend(*, of_the_host: bool = True) -> str:
    """Return the torch.distributed backend: gloo for CPU tensors everywhere, NCCL for CUDA tensors.

    Args:
        of_the_host: CPU tensors and objects go over the group, too: on GPUs that takes a socket for each other rank.
    """
    if not has_cuda():
        return "gloo"
    return "cpu:gloo,cuda:nccl" if of_the_host else "nccl"


def has_transformer_engine() -> bool:
    """Return whether TransformerEngine is installed and has a GPU; `fault` checks that it can be imported."""
    return has_cuda() and _version("transformer-engine") is not None


def has_fla() -> bool:
    """Return whether the package of linear attention's kernels is installed and has a GPU."""
    return has_cuda() and _version("fla-core") is not None


def has_varlen_attn() -> bool:
    """Return whether torch's attention of packs, for GPUs, takes groups of heads; older versions do not."""
    if not has_cuda():
        return False
    from torch.nn.attention.varlen import varlen_attn  # imports torch's compiler, which takes seconds

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Import in the block without the garbage collector: it would take up to a quarter of the time, and find nothing.

    The collector ignores what was made in the block later, too: modules stay.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def raise_open_file_limit() -> None:
    """Let this process, and the processes it starts, open as many files as the hard limit allows.

    A rank of a large run holds a socket for every other rank of each of its gloo groups; the usual 1024 are too few.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def capabilities() -> dict[str, str]:
    """Return the versions that were found and the paths that are taken, for the table printed at start.

    Returns:
        package -> version or "not installed", then device, backend, layer_spec and optimizer.
    """
    values = {package: _version(package) or NOT_INSTALLED for package in PACKAGES}
    for package in TRIED:
        if why := fault(package):
            values[package] += f", which cannot be imported: {why}"
    values["device"] = torch.cuda.get_device_name(device()) if has_cuda() else "cpu"
    values["backend"] = backend()
    values["layer_spec"] = "transformer_engine" if has_transformer_engine() else "torch"
    values["optimizer"] = _adam_source()
    return values


@functools.cache
def fault(package: str) -> str | None:
    """Return why a package of TRIED, though installed, cannot be imported; None where it can, or is not installed."""
    if _version(package) is None:
        return None
    try:
        importlib.import_module(TRIED[package])
    except Exception as error:  # an ImportError, or whatever it raises where libraries are missing
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _adam_source() -> str:
    """Return the library of megatron-core's Adam: it prefers TransformerEngine, then Apex, then torch."""
    for package, adam in (("transformer-engine", "TransformerEngine FusedAdam"), ("apex", "Apex FusedAdam")):
        if _version(package) and not fault(package):
            return adam
    return "torch AdamW"

"""Checks of the doctor: whether this machine can run megappo. Without a GPU, the same checks try what a CPU uses."""

import os
import resource
import shutil
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.multiprocessing import get_context, spawn

from megappo.architecture.switches import CUDNN_PACKS
from megappo.config.schema import Rollout
from megappo.engines.client import SamplingParams
from megappo.engines.process import Engine
from megappo.lab.plan.run_checks import cache_errors
from megappo.runtime import megatron_patches, megatron_setup, platform
from megappo.runtime.listening import stay_on_this_node
from megappo.runtime.machine import visible_devices

LEAST_OPEN_FILES = 4096
LEAST_SHARED_GIB = 1
TIMEOUT = timedelta(seconds=60)


def packages() -> str:
    """Return the versions of the packages, each of which can be imported."""
    capabilities = platform.capabilities()
    versions = ", ".join(f"{name} {capabilities[name]}" for name in platform.PACKAGES)
    needed = [capabilities[name] for name in ("torch", "megatron-core", "sglang")]
    is_missing = platform.NOT_INSTALLED in needed
    if is_missing or any(map(platform.fault, platform.TRIED)):
        raise RuntimeError(versions)
    return versions


def megatron() -> str:
    """Import megatron-core as a rank does, in a process of its own; return if DeepEP is usable."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_import_megatron)


def _import_megatron() -> str:
    megatron_setup.install()
    try:
        megatron_patches.import_deep_ep()
    except Exception as error:
        return f"imported; parallel.dispatcher=deepep is not usable: {type(error).__name__} {error}".rstrip()
    return "imported; parallel.dispatcher=deepep is usable"


def gpus() -> str:
    """Return the GPUs that torch sees."""
    if unseen := platform.unseen_gpus():
        raise RuntimeError(unseen)
    if not platform.has_cuda() and torch.version.cuda and visible_devices(os.environ) != []:
        raise RuntimeError(f"torch for CUDA {torch.version.cuda} sees no GPU")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join(names) or "none: the CPU runs everything"


def collectives() -> str:
    """Sum a tensor over ranks of this machine: one for each GPU, else two."""
    ranks = torch.cuda.device_count() or 2
    with tempfile.TemporaryDirectory() as folder:
        spawn(_sum, (ranks, f"{folder}/store"), nprocs=ranks)
    return f"{platform.backend()} between {ranks} ranks"


def _sum(rank: int, ranks: int, store: str) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    stay_on_this_node()
    if platform.has_cuda():
        torch.cuda.set_device(platform.device())
    rendezvous = dist.FileStore(store, ranks)
    dist.init_process_group(platform.backend(), store=rendezvous, rank=rank, world_size=ranks, timeout=TIMEOUT)
    total = torch.full((2**20,), float(rank), device=platform.device())
    dist.all_reduce(total)
    if not torch.all(total == ranks * (ranks - 1) / 2):
        raise RuntimeError(f"rank {rank} has a wrong sum: {total[0].item()}")
    dist.destroy_process_group()


def attention() -> str:
    """Compare TransformerEngine's attention over two packed sequences with torch's over each."""
    if not platform.has_transformer_engine():
        return "torch's: no TransformerEngine, or no GPU"
    capability, (first, last) = platform.compute_capability(), CUDNN_PACKS
    if capability is not None and not first <= capability < last:
        return "torch's: TransformerEngine has no kernel for packed rows on this GPU"
    os.environ["NVTE_UNFUSED_ATTN"] = "0"  # which pads the sequences, as runs forbid
    from transformer_engine.pytorch import DotProductAttention

    packed = torch.randn(3, 512, 4, 128, dtype=torch.bfloat16, device="cuda")
    bounds = torch.tensor([0, 300, 512], dtype=torch.int32, device="cuda")
    limits = {"cu_seqlens_q": bounds, "cu_seqlens_kv": bounds, "max_seqlen_q": 300, "max_seqlen_kv": 300}
    output = DotProductAttention(4, 128, qkv_format="thd", attn_mask_type="padding_causal")(*packed, **limits)
    expected = []
    for sequence in packed.split([300, 212], dim=1):
        of_heads = F.scaled_dot_product_attention(*sequence.transpose(1, 2), is_causal=True)
        expected.append(of_heads.transpose(0, 1).flatten(1))
    difference = (output.flatten(1) - torch.cat(expected)).abs().max().item()
    if not difference < 0.05:  # NaN too
        raise RuntimeError(f"TransformerEngine's differs from torch's by {difference:.3g}")
    return f"TransformerEngine's equals torch's within {difference:.1g}"


def engine() -> str:
    """Serve a tiny random model with SGLang."""
    server_args = {"disable_cuda_graph": True}  # capturing graphs takes long
    rollout = Rollout(max_running_requests=4, max_total_tokens=4096, mem_fraction_static=0.3, server_args=server_args)
    dtype, gpu_ids = "bf16" if platform.has_cuda() else "fp32", platform.gpu_ids([0])
    with tempfile.TemporaryDirectory() as folder:
        _write_model(Path(folder))
        log = Path(folder, "engine.log")
        started = Engine(folder, rollout, dtype, index=0, gpu_ids=gpu_ids, log_path=log, seed=0)
        started.start()
        try:
            [answer] = started.wait_ready().generate([[1, 2, 3]], SamplingParams(4))
        finally:
            started.stop()
    return f"an engine wrote {len(answer.tokens)} tokens"


def _write_model(folder: Path) -> None:
    """Write a random Qwen2 whose heads have a size that SGLang's GPU kernels support."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=256,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=1,
        max_position_embeddings=128,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def limits() -> str:
    """Return the free shared memory, and the files that a process may open: ranks raise theirs to the hard limit.

    Raises:
        RuntimeError: it is too little, or caches cannot be written.
    """
    for fault in cache_errors():
        raise RuntimeError(fault)
    free_gib = shutil.disk_usage("/dev/shm").free / 2**30
    _, open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    state = f"{free_gib:.2f} GiB of /dev/shm are free, {open_files:,} files for a process"
    if free_gib < LEAST_SHARED_GIB or open_files < LEAST_OPEN_FILES:
        raise RuntimeError(f"{state}: expected {LEAST_SHARED_GIB} GiB and {LEAST_OPEN_FILES:,} files")
    return state


CHECKS: dict[str, tuple[Callable[[], str], str]] = {
    "packages": (packages, "bash launch/setup.sh, on GPUs: bash launch/setup.sh gpu"),
    "megatron": (megatron, "read the error above; bash launch/setup.sh, on GPUs: bash launch/setup.sh gpu"),
    "gpus": (gpus, "run nvidia-smi; in a container, docker run --gpus all"),
    "collectives": (collectives, "read the log of NCCL_DEBUG=INFO; unset NCCL_* and GLOO_*; see /dev/shm"),
    "attention": (attention, "build TransformerEngine again, see docs/clusters.md, or set model.layer_spec=torch"),
    "engine": (engine, "read SGLang's error above, and docs/troubleshooting.md; not installed: bash launch/setup.sh"),
    "limits": (limits, "docker run --shm-size=8g --ulimit nofile=1048576; under SLURM: LimitNOFILE= of slurmd's unit"),
}
"""Checks, named in `commands.arguments.CHECKS`, each with the remedy for its problems."""

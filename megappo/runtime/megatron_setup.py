"""Prepare this process for stock megatron-core: `install()`, before anything imports megatron.core.

It changes torch for the whole process, so a process that serves SGLang must not call it.
"""

import sys
import warnings

import torch

from megappo.runtime import megatron_patches, platform

# Warnings that megatron-core causes on every run.
HARMLESS_WARNINGS = (
    ".*Apex (is|are) not installed",
    "`torch.jit.script` is deprecated",  # TransformerEngine 2.11 and torch 2.14
    "`torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated",
    "`load_state_dict` is deprecated and will be removed in future versions",
    "Please use DTensor instead and we are deprecating ShardedTensor",
    "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed",
    "torch.distributed is disabled, unavailable or uninitialized, assuming the intent is to load in a single process",
    "`sequence_parallel` is set to `True`, but tensor model parallel size is 1",  # as it is for experts
)
HARMLESS_WARNINGS_ON_CPU = ("When using .* it is recommended to set .*CUDA_DEVICE_MAX_CONNECTIONS",)


def install() -> None:
    """Replace what megatron-core lacks here, see `megatron_patches`. Call it before anything imports megatron.core.

    Raises:
        RuntimeError: megatron.core was imported before the first call.
    """
    if getattr(install, "done", False):
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "megatron.core was imported before megappo.runtime.megatron_setup.install(): call install() first"
        )
    for message in HARMLESS_WARNINGS if platform.has_cuda() else HARMLESS_WARNINGS + HARMLESS_WARNINGS_ON_CPU:
        warnings.filterwarnings("ignore", message=message)
    if platform.fault("transformer-engine"):
        # megatron-core takes only an ImportError for its absence, and a broken one raises others.
        sys.modules["transformer_engine"] = None
    sys.modules["deep_ep"] = None  # see megatron_patches.import_deep_ep
    if platform.has_cuda():
        torch.cuda.set_device(platform.device())
    else:
        megatron_patches.run_cuda_calls_on_cpu()
        megatron_patches.import_without_compiling()
        megatron_patches.use_cpu_random_state()
        megatron_patches.read_token_counts_without_stream()
        megatron_patches.gather_uneven_parts()
        megatron_patches.skip_collectives_of_one_rank()
        megatron_patches.name_cpu_tensors_as_cuda()
    megatron_patches.define_missing_names()
    megatron_patches.cache_uncut_yarn_tables()
    megatron_patches.save_and_resume_torch_adamw()
    install.done = True

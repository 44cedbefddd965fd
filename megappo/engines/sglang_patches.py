"""All that megappo replaces in stock SGLang 0.5.23; each function gives the reason and what was tried before.

Functions of the server are replaced through SGLang's own plug-in interface, `HookRegistry`
(sglang/srt/plugins/hook_registry.py). An entry point would load the hooks into every SGLang server of the environment,
so megappo's server registers them itself.
"""

import importlib.util
import multiprocessing
import os
import pkgutil
import sys
import tempfile
import types
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import orjson
import torch
from torch.overrides import TorchFunctionMode

from megappo.data.tokenizer import TOKENIZER_FILE, load_tokenizer
from megappo.engines.generations import RAW_BYTES

KERNEL_NAMES = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
)
"""Names that SGLang's CPU mode imports from sgl_kernel at module level. Without AMX instructions it calls none."""
OPERATORS = (
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_mul_cpu",
)
"""Operators of sgl_kernel whose names SGLang's CPU mode looks up at module level (sglang/srt/models/qwen3_5.py), which
the processor of Qwen's models with vision imports. Models that megappo serves call none."""
MAX_SAMPLES = 1024
"""Most responses of one request to a prompt."""
KEYS = ("api_key", "admin_api_key", "ssl_keyfile_password")
"""Arguments of the server whose values are secrets."""


@cache
def prepare_import() -> None:
    """Make `import sglang` work on a CPU; do nothing where CUDA is present. Call it before the import.

    SGLang's variable for its CPU mode is public. The package sgl_kernel exists for CUDA only, and its import cannot be
    switched off.
    """
    if torch.cuda.is_available():
        return
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    if importlib.util.find_spec("sgl_kernel") is None:
        module = types.ModuleType("sgl_kernel", "Names that SGLang's CPU mode imports; calling one is an error.")
        for name in KERNEL_NAMES:
            setattr(module, name, _absent_kernel(name))
        module.declared = torch.library.Library("sgl_kernel", "FRAGMENT")  # its declarations end with it
        for name in OPERATORS:
            module.declared.define(f"{name}() -> ()")
        sys.modules["sgl_kernel"] = module


def hide_megatron() -> None:
    """Keep SGLang's dumper, a tool of its developers, from importing megatron-core (sglang/srt/debug_utils/dumper.py).

    It imports whatever is installed; no variable prevents that.
    """
    sys.modules["megatron"] = None


def pin_no_memory() -> None:
    """Ignore requests for pinned memory in this thread and its forked children; do nothing where CUDA is present.

    SGLang's LoRA pins memory in any case (sglang/srt/lora/mem_pool.py), which torch refuses without CUDA; no argument
    prevents that.
    """
    if not torch.cuda.is_available():
        _Unpinned().__enter__()


class _Unpinned(TorchFunctionMode):
    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if function is torch.Tensor.pin_memory:
            return args[0]
        return function(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def install_hooks(*, of_run: bool = False) -> None:
    """Replace functions of the server, in the process that starts it.

    Args:
        of_run: the server is the engine of a run, whose client is megappo's.
    Raises:
        RuntimeError: SGLang has no such function.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    keep_tools()
    server = "sglang.srt.entrypoints"
    hooks = {
        f"{server}.engine.Engine._launch_scheduler_processes": (fork_on_cpu, HookType.AROUND),
        f"{server}.engine._server_args_for_logging": (hide_keys, HookType.AFTER),
        f"{server}.http_server._freeze_gc_after_server_warmup": (freeze_after_warmup, HookType.AROUND),
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request": (
            refuse_empty_prompt,
            HookType.BEFORE,
        ),
        "sglang.srt.managers.io_struct.GenerateReqInput._handle_parallel_sampling": (limit_samples, HookType.AFTER),
        f"{server}.http_server.build_server_info": (hide_keys, HookType.AFTER),
        f"{server}.openai.protocol.Tool.model_dump": (as_given, HookType.AROUND),
        "sglang.srt.utils.hf_transformers.tokenizer.get_tokenizer": (tokenizer_as_trained, HookType.AROUND),
        "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine": (
            sleep_while_paused,
            HookType.AFTER,
        ),
        "sglang.srt.server_args.PortArgs.init_new": (name_shared_memory, HookType.AFTER),
        "sglang.srt.mem_cache.pool_host.common._cuda_host_register": (register_with_cuda, HookType.AROUND),
        "sglang.srt.configs.update_config.get_moe_padding_size": (keep_sizes, HookType.AROUND),
        "sglang.srt.utils.common.is_jpeg_with_cuda": (decode_on_cpu, HookType.AROUND),
    }
    if of_run:
        handle_output = "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_batch_output"
        hooks[handle_output] = (send_few_bytes, HookType.BEFORE)
    for target, (hook, kind) in hooks.items():
        HookRegistry.register(target, hook, kind)
    HookRegistry.apply_hooks()  # logs a failure instead of raising it
    for target in hooks:
        if not hasattr(pkgutil.resolve_name(target), "__wrapped__"):
            raise RuntimeError(f"{target} of SGLang could not be replaced: expected SGLang 0.5.23")


def keep_tools() -> None:
    """Let requests keep what SGLang does not know of a tool, such as "return". Call it before the server is imported.

    What a chat template renders must be what training rendered (sglang/srt/entrypoints/openai/protocol.py).
    """
    from sglang.srt.entrypoints.openai import protocol

    protocol.Function.model_config["extra"] = "allow"
    for name in ("Function", "Tool", "ChatCompletionMessageGenericParam", "ChatCompletionRequest"):
        getattr(protocol, name).model_rebuild(force=True)


def allow_torch_attention() -> None:
    """Let SGLang serve Gemma 4 on a CPU by torch's attention; do nothing where CUDA is present. Call it before SGLang's
    arguments are made.

    That attention computes the model correctly, but an assertion (sglang/srt/arg_groups/model_hook.py) requires kernels
    for GPUs or of sgl_kernel. No argument turns it off, and HookRegistry would replace the function in all modules.
    """
    if not torch.cuda.is_available():
        from sglang.srt.arg_groups import model_hook

        model_hook.attention_backends_of = lambda arguments: ("intel_amx", "intel_amx")


def absorb_latent_attention() -> None:
    """Let SGLang serve DeepSeek on a CPU by torch's attention. Call it in the scheduler, before a model computes.

    The kernels for GPUs get the keys and values of a new prompt for every head; torch's attention would read these from
    its cache, which has their latent vector alone (sglang/srt/layers/attention/torch_native_backend.py). So prompts are
    computed as further tokens are: by the latent vector, with projections of queries and results in their place.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)


def fork_on_cpu(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Fork the schedulers on a CPU, which saves most of the start time and half the memory.

    Nothing has started a thread or computed anything yet, so forking is safe. SGLang sets the start method "spawn"
    itself just before (`_set_envs_and_config`), so setting it earlier has no effect.
    """
    if not torch.cuda.is_available():
        multiprocessing.set_start_method("fork", force=True)
    return original(*args, **kwargs)


def hide_keys(arguments: dict[str, Any], *args: Any) -> dict[str, Any]:
    """Keep secrets out of the arguments that SGLang logs at log_level info; it takes a key from an argument only."""
    return {name: "***" if value and name in KEYS else value for name, value in arguments.items()}


def freeze_after_warmup(original: Any, server_args: Any) -> None:
    """Skip SGLang's request to /freeze_gc where the warm-up is skipped: the server may not listen yet."""
    if not server_args.skip_server_warmup:
        original(server_args)


def register_with_cuda(original: Any, *args: Any, **kwargs: Any) -> None:
    """Pin host memory only where there is CUDA: SGLang pins the memory of the tokens' experts in any case
    (sglang/srt/state_capturer/base.py)."""
    if torch.cuda.is_available():
        original(*args, **kwargs)


def keep_sizes(original: Any, weight_block_size: list[int] | None) -> int:
    """Pad the sizes of MLPs on a CPU only where blocks of quantized weights need it.

    SGLang pads them to a multiple of 32 for kernels of sgl_kernel that PyPI does not have, and adapters keep their own
    size: their engine would end at the first sync. No argument turns it off (sglang/srt/configs/update_config.py).
    """
    return 1 if weight_block_size is None else original(weight_block_size)


def decode_on_cpu(original: Any, *args: Any, **kwargs: Any) -> bool:
    """Decode JPEG on the CPU, as training does: nvJPEG, which SGLang takes for Qwen's models, computes other colours.

    No argument turns it off (sglang/srt/utils/common.py).
    """
    return False


def refuse_empty_prompt(manager: Any, request: Any, input_ids: list[int] | None) -> None:
    """Answer a prompt without a token with an error: it would crash SGLang's scheduler, and so the server."""
    if input_ids is not None and len(input_ids) == 0:
        raise ValueError("the prompt has no token: it is empty, or the tokenizer knows none of it")


def send_few_bytes(_: Any, received: Any) -> None:
    """Send the experts of a finished response as bytes in a string of JSON (`generations.RAW_BYTES`), of the smallest
    integer that holds them: 1.02 bytes for each number.

    SGLang encodes int32 in base64, 5.33 bytes a number (sglang/srt/managers/tokenizer_manager.py), and has no argument
    for it. A smaller type there, or a reply that is not JSON, would make this unnecessary. Only the engines of a run
    have this hook: servers that others start keep SGLang's format.
    """
    for index, experts in enumerate(getattr(received, "routed_experts", None) or ()):
        if experts is not None and len(experts):
            smallest = np.min_scalar_type(experts.max().item())
            raw = experts.numpy().astype(smallest).tobytes()
            raw = raw.replace(b"\\", b"\\\\")
            raw = raw.replace(b'"', b'\\"')
            raw = raw.replace(b"\n", b"\\n")
            received.routed_experts[index] = orjson.Fragment(b'{%b%b"}' % (RAW_BYTES, raw))


def limit_samples(_: None, request: Any) -> None:
    """Refuse a request for too many responses: SGLang copies the prompt for each before it checks anything."""
    if not 1 <= request.parallel_sample_num <= MAX_SAMPLES:
        raise ValueError(f"n must be from 1 to {MAX_SAMPLES}: send several requests for more responses to a prompt")


def as_given(original: Any, tool: Any, **options: Any) -> dict[str, Any]:
    """Return a tool for a chat template without the keys that its client left out: SGLang adds "defer_loading"."""
    return original(tool, **options | {"exclude_unset": True})


def tokenizer_as_trained(original: Any, folder: str, *args: Any, **kwargs: Any) -> Any:
    """Load a folder's tokenizer.json as training does, so that served prompts get the trained tokens.

    AutoTokenizer of transformers 5.19, which SGLang calls, takes the class of config.json's model_type:
    Qwen2Tokenizer replaces the model and the normalizer of a tokenizer.json of another kind. SGLang repairs only the
    pre-tokenizer and the decoder, and adds a BOS for some classes (sglang/srt/utils/hf_transformers/tokenizer.py).
    Processes that are spawned, on GPUs, lack this hook; they decode tokens and encode no prompt.
    """
    from sglang.srt.utils.hf_transformers.common import attach_additional_stop_token_ids

    is_other = kwargs.get("tokenizer_backend", "huggingface") != "huggingface"
    if is_other or not Path(folder, TOKENIZER_FILE).is_file():
        return original(folder, *args, **kwargs)
    tokenizer = load_tokenizer(folder, "--tokenizer-path")
    attach_additional_stop_token_ids(tokenizer)  # as SGLang does
    return tokenizer


def sleep_while_paused(_: None, scheduler: Any) -> None:
    """Let a paused scheduler wait for its next message, as one without requests does (--sleep-on-idle).

    Its loop (`event_loop_normal`) spins: on a CPU with few cores it keeps the server and the trainer from sending the
    weights for which it is paused. Schedulers on GPUs are spawned, without this hook, and have a core to themselves.
    """
    scheduler.maybe_sleep_on_idle()


def name_shared_memory(ports: Any, *args: Any, **kwargs: Any) -> Any:
    """Name the file of the schedulers' loads in /dev/shm after the engine's temporary folder.

    SGLang draws the name, and leaves the file behind when it is killed; so `server_keeper.remove_traces` finds it.
    """
    ports.instance_id = Path(tempfile.gettempdir()).name
    return ports


def _absent_kernel(name: str) -> object:
    def kernel(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} was called, but the package sgl_kernel is not installed here")

    return kernel

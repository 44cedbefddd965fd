"""SGLang's arguments, environment variables, port and temporary folder for an engine's process."""

import json
import os
import socket
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import IO

from megappo.architecture.architecture import DTYPES
from megappo.config.model_sections import Lora
from megappo.config.schema import Rollout
from megappo.engines.client import EngineError
from megappo.engines.server_keeper import LOADS_PREFIX, SHARED_MEMORY, remove_traces
from megappo.runtime import platform
from megappo.runtime.machine import PYTHON, for_python, usable
from megappo.userland.user_code import JsonObject

HOST = "127.0.0.1"
CPU_ARGUMENTS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "sleep_on_idle": True,  # else an idle engine takes a core from the trainer
    # It has nothing to compile, but waits for a second, and its sentence may have no token in a small vocabulary.
    "skip_server_warmup": True,
    "max_total_tokens": 65536,
}
GPU_ARGUMENTS = {
    "enable_memory_saver": True,  # sleep() frees the memory for the trainer
    "cuda_graph_backend_prefill": "disabled",  # SGLang's default there refuses graphs that sleep
}
CPU_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    # SGLang compiles the rotation in vision towers (layers/rotary_embedding/utils.py): minutes on a CPU.
    "TORCHDYNAMO_DISABLE": "1",
}
GPU_VARIABLES = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "true"}  # CUDA graphs sleep, too
TORCHRUN_PREFIXES = ("MASTER_", "TORCHELASTIC_", "RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE")
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
TRACES_PREFIX = "megappo-engine-"
PROBE_SLOTS = 4
"""Requests that an engine runs beside the rollouts, which never pause: the probe of a weight sync need not wait."""
SPIN_COUNT = "3000"
"""GOMP_SPINCOUNT: how often a thread of libgomp looks for work before it sleeps. On two idle cores an engine of a 110M
model writes 150 tokens/s with one thread; with two 160 at 1,000 looks, 198 at 2,000, 212 at 3,000, 221 at 6,000 and
more. Where something else has one of the cores it writes 147 with one thread; with two 113, 91 at 3,000, 73 at 6,000.
That is an Intel Xeon, whose pauses between two looks are long; on an AMD EPYC 1,000 were as good as more."""
LONGEST_SOCKET_DIR = 107 - len("/megappo-engine-4194304-random_8/tmprandom_8")
"""Bytes in the name of a folder for sockets; a socket's own name may have 107."""
MODELS = "megappo.engines.sglang_models"


def server_arguments(
    model_path: str | Path,
    rollout: Rollout,
    dtype: str,
    *,
    on_gpu: bool,
    seed: int,
    lora: Lora | None = None,
) -> JsonObject:
    """Return SGLang's ServerArgs by name, without host, port and key.

    Args:
        lora: configuration of the adapters that the engine will get.
    """
    arguments = {
        "model_path": str(model_path),
        "dtype": DTYPES[dtype].torch,
        "random_seed": seed,
        "tp_size": rollout.tensor_parallel,
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "incremental_streaming_output": False,  # the last event of a response holds all of it
        "max_running_requests": rollout.max_running_requests + (PROBE_SLOTS if rollout.runs_ahead else 0),
        "log_level": "warning",
    }
    if on_gpu:
        arguments |= {"mem_fraction_static": rollout.mem_fraction_static, **GPU_ARGUMENTS}
    else:
        arguments |= CPU_ARGUMENTS
    if rollout.routing_replay:
        arguments["enable_return_routed_experts"] = True
    if rollout.max_total_tokens:
        arguments["max_total_tokens"] = rollout.max_total_tokens
    if lora is not None:
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": lora.rank,
            "lora_target_modules": list(lora.modules),
            "max_loras_per_batch": 1,
            "lora_strict_loading": True,  # else SGLang leaves out unknown tensors with a warning in its log
        }
        # A sleep loses the model's own weights, which are not sent again; SGLang's other kernels need CUDA.
        arguments |= {"enable_weights_cpu_backup": True} if on_gpu else {"lora_backend": "torch_native"}
    return arguments | rollout.server_args


def start_keeper(
    settings: JsonObject,
    temporary: Path,
    environment: dict[str, str],
    output: IO[str] | None = None,
) -> subprocess.Popen:
    """Start a keeper in a session of its own, which starts the server with these settings.

    Args:
        settings: see megappo.engines.server.
        temporary: see `temporary_folder`.
        environment: the server's variables.
        output: file for what the server prints; None = where this process prints.
    """
    process = subprocess.Popen(
        [*PYTHON, "-m", "megappo.engines.server_keeper", str(os.getpid()), str(temporary)],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
        env=environment,
        start_new_session=True,
    )
    with process.stdin:
        process.stdin.write(json.dumps(settings).encode())
    return process


def environment(
    gpu_ids: list[str],
    tensor_parallel: int,
    temporary: Path,
    *,
    index: int = 0,
    num_threads: int | None = None,
) -> dict[str, str]:
    """Return the variables of an engine on these GPUs, or on the trainer's cores; arguments as for `Engine`."""
    variables = inherited_environment(temporary)
    if not gpu_ids:
        return _with_cpu_threads(variables, tensor_parallel, index, num_threads)
    variables = with_toolkit(_without_expandable_segments(variables))
    return GPU_VARIABLES | variables | {"CUDA_VISIBLE_DEVICES": ",".join(gpu_ids)}


def with_toolkit(variables: dict[str, str]) -> dict[str, str]:
    """Add where SGLang finds what pip has installed for GPUs, behind what the user has in paths.

    It compiles kernels at run time: by the nvcc of CUDA_HOME, and by `ninja`, called by its name. Its memory saver is
    loaded before torch (LD_PRELOAD), and needs CUDA's runtime.
    """
    variables = dict(variables)
    if nvcc := platform.nvcc():
        variables["CUDA_HOME"] = str(Path(nvcc).parents[1])
    pip_folders = {"PATH": sysconfig.get_path("scripts"), "LD_LIBRARY_PATH": platform.cuda_libraries()}
    for name, folder in pip_folders.items():
        if folder:
            variables[name] = os.pathsep.join(filter(None, [variables.get(name), folder]))
    return variables


def inherited_environment(temporary: Path) -> dict[str, str]:
    """Return this process's environment without torchrun's variables, which would draw SGLang into the trainer's
    group."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(TORCHRUN_PREFIXES)}
    return {
        "SGLANG_EXTERNAL_MODEL_PACKAGE": MODELS,
        **for_python(inherited),
        "PYTHONSAFEPATH": "1",
        "TMPDIR": str(temporary),
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",  # a generated token makes each check last a second
        # SGLang 0.5.23 sends nothing through this queue between an engine's ranks. The queue leaves 24 MiB in /dev/shm
        # when its process is killed, and on several nodes it listens on the interface towards the Internet.
        "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "false",
    }


def nccl_variables(server_args: JsonObject) -> dict[str, str]:
    """Return NCCL's variables as SGLang sets unset ones: a group with the trainer fails unless both have the same.

    Args:
        server_args: rollout.server_args.
    Source: sglang.srt.entrypoints.engine._set_envs_and_config.
    """
    symmetric = bool(server_args.get("enable_symm_mem"))
    switched = symmetric or bool(server_args.get("enable_nccl_nvls"))
    return {"NCCL_CUMEM_ENABLE": str(int(symmetric)), "NCCL_NVLS_ENABLE": str(int(switched))}


def _without_expandable_segments(variables: dict[str, str]) -> dict[str, str]:
    """Remove this option of torch's allocator: SGLang's memory saver, by which an engine sleeps, refuses it."""
    variables = dict(variables)
    for name in ALLOCATOR_VARIABLES:
        options = variables.pop(name, "").split(",")
        if remaining := ",".join(option for option in options if "expandable_segments" not in option):
            variables[name] = remaining
    return variables


def _with_cpu_threads(
    variables: dict[str, str],
    tensor_parallel: int,
    index: int,
    num_threads: int | None,
) -> dict[str, str]:
    """Add the number of threads, and the cores of each rank where there are several; the user's variables stay.

    SGLang wants the cores named when it has more ranks than the machine has NUMA nodes.
    """
    variables = CPU_VARIABLES | variables
    if num_threads:
        variables["OMP_NUM_THREADS"] = str(num_threads)
    if "OMP_WAIT_POLICY" not in variables:
        variables.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    if tensor_parallel > 1:
        size = num_threads or 1
        cores = sorted(usable())
        shares = []
        for rank in range(index * tensor_parallel, (index + 1) * tensor_parallel):
            own = [cores[i % len(cores)] for i in range(rank * size, (rank + 1) * size)]
            shares.append(",".join(map(str, own)))
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(shares)
    return variables


def reserve_port(port: int, host: str = HOST) -> socket.socket:
    """Reserve a port (0 = any free one) until the engine listens, many seconds later.

    The socket never listens, so SO_REUSEADDR lets the engine bind the port as well.

    Raises:
        EngineError: the port is taken.
    """
    guard = socket.socket()
    if port:  # with port 0 not before bind, which would then give a guarded port away again
        guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        guard.bind((host, port))
    except OSError as error:
        guard.close()
        raise EngineError(
            f"port {port} for an SGLang engine is not free on {host} ({error.strerror}): set rollout.port to another "
            "value, or to 0 for any free port, or end the process that listens there"
        ) from error
    guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return guard


def temporary_folder() -> Path:
    """Make a folder for SGLang's sockets, named after this process."""
    return Path(tempfile.mkdtemp(prefix=f"{TRACES_PREFIX}{os.getpid()}-", dir=socket_dir()))


def socket_dir() -> Path:
    """Return TMPDIR, as clusters set it for a job; /tmp where a socket's name would get too long in it."""
    folder = tempfile.gettempdir()
    return Path(folder if len(os.fsencode(folder)) <= LONGEST_SOCKET_DIR else "/tmp")


def remove_stale_traces() -> None:
    """Remove what engines left whose owner and keeper were killed, and so could not clean up."""
    folders = {path.name for path in socket_dir().glob(f"{TRACES_PREFIX}*")}
    memory = SHARED_MEMORY.glob(f"{LOADS_PREFIX}{TRACES_PREFIX}*")
    names = folders | {path.name.removeprefix(LOADS_PREFIX).rpartition("_")[0] for path in memory}
    for name in names:
        owner = name.removeprefix(TRACES_PREFIX).split("-")[0]
        if not Path("/proc", owner).exists():
            remove_traces(socket_dir() / name)

"""What an engine's process is started with: SGLang's arguments, environment variables, a port, a temporary folder."""

import itertools
import json
import os
import socket
import subprocess
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megappo.architecture.dtypes import DTYPES
from megappo.config.schema import Lora, Rollout
from megappo.engines.client import EngineError
from megappo.engines.server_keeper import remove_stale_loads, remove_traces
from megappo.runtime import platform
from megappo.runtime.cores import usable
from megappo.runtime.variables import PYTHON, for_python

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
GPU_VARIABLES = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "true"}  # CUDA graphs sleep, too
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
TRACES_PREFIX = "megappo-engine-"
SPIN_COUNT = "3000"
"""Of libgomp: how often a thread looks for work before it sleeps. On two idle cores an engine of a 110M model writes
150 tokens/s with one thread; with two 160 if they look 1,000 times, 198 at 2,000, 212 at 3,000, 221 at 6,000 and more.
Where something else has one of the cores it is 147 with one thread; with two 113, 91 at 3,000, 73 at 6,000. That is an
Intel Xeon, whose pauses between two looks are long; on an AMD EPYC 1,000 were as good as more on idle cores."""
LONGEST_HOME = 107 - len("/megappo-engine-4194304-random_8/tmprandom_8")
"""Bytes of the name of a folder that holds those; a socket's may have 107."""
MODELS = "megappo.engines.sglang_models"


@dataclass(frozen=True)
class NodePart:
    """A node's part of an engine that is on several.

    Attributes:
        node: its number among the engine's nodes; the first serves, the others answer for their health alone.
        num_nodes: of the engine.
        meeting: host:port, on the first, where they find each other.
    """

    node: int
    num_nodes: int
    meeting: str

    @property
    def server_arguments(self) -> dict[str, Any]:
        """SGLang's ServerArgs by name."""
        return {"nnodes": self.num_nodes, "node_rank": self.node, "dist_init_addr": self.meeting}

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables; SGLang's queue between ranks would listen where the Internet is."""
        return {"SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "false"}


def server_arguments(
    model_path: str | Path, rollout: Rollout, dtype: str, *, on_gpu: bool, seed: int, lora: Lora | None = None
) -> dict[str, Any]:
    """SGLang's ServerArgs by name, but for host, port and key.

    Args:
        lora: of the adapters that the engine will be given.
    """
    return {
        "model_path": str(model_path),
        "dtype": DTYPES[dtype].torch,
        "random_seed": seed,
        "tp_size": rollout.tensor_parallel,
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "incremental_streaming_output": False,  # the last event of a response holds all of it
        "max_running_requests": rollout.max_running_requests,
        "log_level": "warning",
        **({"mem_fraction_static": rollout.mem_fraction_static, **GPU_ARGUMENTS} if on_gpu else CPU_ARGUMENTS),
        **({"max_total_tokens": rollout.max_total_tokens} if rollout.max_total_tokens else {}),
        **(_adapter_arguments(lora, on_gpu=on_gpu) if lora else {}),
        **rollout.server_args,
    }


def _adapter_arguments(lora: Lora, *, on_gpu: bool) -> dict[str, Any]:
    return {
        "enable_lora": True,
        "max_lora_rank": lora.rank,
        "lora_target_modules": list(lora.modules),
        "max_loras_per_batch": 1,
        "lora_strict_loading": True,  # else what it has no place for is left out with a warning in its log
        # The model's own weights are not sent again after a sleep; of SGLang's kernels none but these know a CPU.
        **({"enable_weights_cpu_backup": True} if on_gpu else {"lora_backend": "torch_native"}),
    }


def start_keeper(
    settings: dict[str, Any], temporary: Path, environment: dict[str, str], output: IO[str] | None = None
) -> subprocess.Popen:
    """Start a keeper in a session of its own, and by it the server with these settings.

    Args:
        settings: see megappo.engines.server.
        temporary: of temporary_folder().
        environment: its variables.
        output: where it writes to; None = where this process does.
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
    gpu_ids: list[str], tensor_parallel: int, temporary: Path, *, index: int = 0, num_threads: int | None = None
) -> dict[str, str]:
    """The variables of an engine on these GPUs, or on cores that a trainer uses too; arguments as of `Engine`."""
    variables = environment_of_owner(temporary)
    if gpu_ids:
        variables = GPU_VARIABLES | with_toolkit(_without_expandable_segments(variables))
        return variables | {"CUDA_VISIBLE_DEVICES": ",".join(gpu_ids)}
    return _cpu_threads(variables, tensor_parallel, index, num_threads)


def with_toolkit(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables, with where SGLang finds what pip has installed for GPUs; behind what the user has in paths.

    It compiles kernels at run time: by the nvcc of CUDA_HOME, and by `ninja`, called by its name. Its memory saver is
    loaded before torch (LD_PRELOAD), and needs CUDA's runtime.
    """
    found = platform.nvcc()
    toolkit = {"CUDA_HOME": str(Path(found).parents[1])} if found else {}
    pips = {"PATH": sysconfig.get_path("scripts"), "LD_LIBRARY_PATH": platform.cuda_libraries()}
    paths = {name: os.pathsep.join(filter(None, [variables.get(name), folder])) for name, folder in pips.items()}
    return {**variables, **toolkit, **{name: path for name, path in paths.items() if path}}


def environment_of_owner(temporary: Path) -> dict[str, str]:
    """The owner's environment without torchrun's variables, which would draw SGLang into the trainer's group."""
    dropped = ("MASTER_", "TORCHELASTIC_", "RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    variables = for_python(variables) | {"PYTHONSAFEPATH": "1"}
    variables["TMPDIR"] = str(temporary)
    variables.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", MODELS)
    variables["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "false"  # a generated token makes each check last a second
    return variables


def nccl_variables(server_args: Mapping[str, Any]) -> dict[str, str]:
    """What SGLang sets of NCCL's variables where they are unset: a group with the trainer fails unless both have it.

    Args:
        server_args: rollout.server_args.
    Source: sglang.srt.entrypoints.engine._set_envs_and_config.
    """
    symmetric = bool(server_args.get("enable_symm_mem"))
    switched = symmetric or bool(server_args.get("enable_nccl_nvls"))
    return {"NCCL_CUMEM_ENABLE": str(int(symmetric)), "NCCL_NVLS_ENABLE": str(int(switched))}


def _without_expandable_segments(variables: dict[str, str]) -> dict[str, str]:
    """The variables without this option of torch's allocator, which may be right for the trainer: the memory saver,
    by which an engine sleeps, refuses to start with it."""
    left = dict(variables)
    for name in ALLOCATOR_VARIABLES:
        options = [part for part in left.pop(name, "").split(",") if "expandable_segments" not in part]
        if any(options):
            left[name] = ",".join(options)
    return left


def _cpu_threads(
    variables: dict[str, str], tensor_parallel: int, index: int, num_threads: int | None
) -> dict[str, str]:
    """The variables with those of threads; what the user has set of them stays.

    SGLang wants the cores named when it has more ranks than the machine has NUMA nodes.
    """
    threads = {"OMP_NUM_THREADS": str(num_threads)} if num_threads else {}
    variables = {"OMP_NUM_THREADS": "1"} | variables | threads
    if "OMP_WAIT_POLICY" not in variables:
        variables.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    if tensor_parallel > 1:
        size = num_threads or 1
        cores = itertools.cycle(map(str, sorted(usable())))
        mine = itertools.islice(cores, index * tensor_parallel * size, None)
        shares = [",".join(itertools.islice(mine, size)) for _ in range(tensor_parallel)]
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(shares)
    return variables


def reserve_port(port: int, host: str = HOST) -> socket.socket:
    """Keep a port (0 = any free one) from others until the engine listens, many seconds later.

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
    """A folder for SGLang's sockets, named after this process."""
    return Path(tempfile.mkdtemp(prefix=f"{TRACES_PREFIX}{os.getpid()}-", dir=home_of_sockets()))


def home_of_sockets() -> Path:
    """TMPDIR, as clusters set it for a job, unless a socket's name would get too long in it: /tmp then."""
    folder = tempfile.gettempdir()
    return Path(folder if len(os.fsencode(folder)) <= LONGEST_HOME else "/tmp")


def remove_stale_traces() -> None:
    """Remove what engines left whose owner was killed and so could not clean up."""
    for folder in home_of_sockets().glob(f"{TRACES_PREFIX}*"):
        owner = folder.name.removeprefix(TRACES_PREFIX).split("-")[0]
        if not Path("/proc", owner).exists():
            remove_traces(folder)
    remove_stale_loads()

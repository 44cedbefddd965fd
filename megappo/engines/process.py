"""An SGLang engine from its owner's side: start the server process, watch it, end exactly its process tree.

Or use a server that somebody else has started.
"""

import atexit
import importlib.util
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megappo.config.model_sections import Lora
from megappo.config.schema import Rollout
from megappo.config.sections import UNTRUE, changed_sampling
from megappo.engines import launch
from megappo.engines.client import HANG_SECONDS, EngineClient, EngineError, EngineFault
from megappo.engines.server_keeper import remove_traces
from megappo.runtime import platform
from megappo.runtime.heartbeat import heartbeat
from megappo.runtime.keeper import ask_to_end
from megappo.runtime.machine import unbound
from megappo.userland.user_code import JsonObject

LOG_TAIL_LINES = 25
POLL_SECONDS = 0.2
API_KEY = "MEGAPPO_ENGINE_API_KEY"
"""Environment variable with the key of servers of rollout.engines; unset if they want none."""
LARGEST_SHARE = 0.95
"""Largest share of its GPUs' free memory that a restarted engine takes."""


class Engine:
    """An SGLang server process of this process: loopback only, with a random API key, killed together with its owner.

    Args:
        model_path: Hugging Face folder whose weights are served until the first update.
        rollout: the run's rollout section.
        dtype: the run's model.dtype.
        index: number of this engine on its node; it takes rollout.port + index.
        gpu_ids: the node's CUDA devices of this engine, as CUDA_VISIBLE_DEVICES names them; empty on a CPU.
        log_path: file for the server's output.
        seed: seeds SGLang's sampling; must differ between engines.
        node_arguments: SGLang's arguments for this node's part of an engine on several nodes; empty for a whole engine.
        num_threads: threads of each of its ranks on a CPU; None = OMP_NUM_THREADS, or one.
        lora: settings of the adapters that it will receive; None = it receives whole models.
    Raises:
        EngineError: SGLang is not installed.
    """

    def __init__(
        self,
        model_path: str | Path,
        rollout: Rollout,
        dtype: str,
        *,
        index: int,
        gpu_ids: Sequence[str],
        log_path: Path,
        seed: int,
        node_arguments: JsonObject | None = None,
        num_threads: int | None = None,
        lora: Lora | None = None,
    ):
        if importlib.util.find_spec("sglang") is None:
            raise EngineError("SGLang, which writes rollouts, is not installed: run launch/setup.sh")
        arguments = launch.server_arguments(
            model_path,
            rollout,
            dtype,
            on_gpu=bool(gpu_ids),
            seed=seed,
            lora=lora,
        )
        self._arguments = arguments | (node_arguments or {})
        self._rollout = rollout
        self._gpu_ids = list(gpu_ids)
        self._index = index
        self._num_threads = num_threads
        self._api_key = secrets.token_urlsafe(32)
        self._process: subprocess.Popen | None = None
        self._log_mode = os.O_TRUNC
        self.log_path = log_path
        self.port = rollout.port + index if rollout.port else 0

    @property
    def url(self) -> str:
        """Address at which the engine listens, once started."""
        return f"http://{launch.HOST}:{self.port}"

    def start(self) -> None:
        """Start the process and return at once. Call it from a thread that lives as long as the engine shall.

        Raises:
            EngineError: the configured port is taken.
        """
        self._start(self._arguments)

    def wait_ready(self) -> EngineClient:
        """Wait until the engine serves, and return its client.

        Raises:
            EngineError: the process ended (with the end of its log), or rollout.start_timeout_seconds passed.
        """
        timeout = self._rollout.request_timeout_seconds
        limit = self._rollout.start_timeout_seconds
        hang_seconds = float(self._rollout.server_args.get("watchdog_timeout", HANG_SECONDS))
        client = EngineClient(self.url, self._api_key, timeout, self.check_alive, hang_seconds)
        if not _wait_serving(client, self._started + limit, self.check_alive):
            self.stop()
            raise EngineError(
                f"the SGLang engine did not start within {limit:g} s: raise rollout.start_timeout_seconds, or see why; "
                f"{self._log_end()}"
            )
        self._guard.close()
        if self._arguments.get("node_rank", 0) == 0:  # the other nodes' parts answer health checks only
            client.freeze_garbage()
        return client

    def restart(self) -> None:
        """End the engine and start it with the weights of model_path; address and key stay, so clients stay valid.

        Raises: as `start` and `wait_ready`.
        """
        self.stop()
        arguments = self._arguments
        if self._gpu_ids:  # SGLang takes a share of the free memory, which was everything at the first start
            share = arguments["mem_fraction_static"] / platform.free_gpu_share()
            arguments = arguments | {"mem_fraction_static": min(share, LARGEST_SHARE)}
        self._start(arguments)
        self.wait_ready()

    def check_alive(self) -> None:
        """Raise EngineFault if the process has ended, with the end of the log, or is being restarted."""
        if self._process is None:
            raise EngineFault("the SGLang engine is not running: it was not started, or was stopped")
        code = self._process.poll()
        if code is not None:
            raise EngineFault(f"the SGLang engine ended (exit code {code}); {self._log_end()}")

    def explain(self, fault: EngineFault) -> str:
        """Return a fault with the end of the log: a fault that a client has found does not name its cause."""
        message = str(fault)
        return message if str(self.log_path) in message else f"{message}; {self._log_end()}"

    def stop(self) -> None:
        """End the engine's processes, and only those; may be called at any time, and again."""
        if self._process is None:
            return
        ask_to_end(self._process)  # the keeper ends the server's processes and removes their traces
        self._process.wait()
        self._process = None
        self._guard.close()
        remove_traces(self._temporary)  # where the keeper was killed
        atexit.unregister(self.stop)

    def _start(self, arguments: JsonObject) -> None:
        launch.remove_stale_traces()
        self._guard = launch.reserve_port(self.port)
        self.port = self._guard.getsockname()[1]
        self._temporary = launch.temporary_folder()
        variables = launch.environment(
            self._gpu_ids,
            self._rollout.tensor_parallel,
            self._temporary,
            index=self._index,
            num_threads=self._num_threads,
        )
        settings = {"server_args": {**arguments, "host": launch.HOST, "port": self.port, "api_key": self._api_key}}
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        # For the owner's eyes only: at log_level info SGLang logs what it receives.
        descriptor = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | self._log_mode, 0o600)
        self._log_mode = os.O_APPEND  # a restart keeps the log that explains it
        with os.fdopen(descriptor, "w") as log, unbound():
            self._process = launch.start_keeper(settings, self._temporary, variables, log)
        self._started = time.monotonic()
        atexit.register(self.stop)

    def _log_end(self) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join([f"{self.log_path} ends:", *lines[-LOG_TAIL_LINES:]])


@dataclass
class ExternalEngine:
    """A server of rollout.engines, which somebody else starts, restarts and ends; used as an `Engine` is.

    Attributes:
        url: http://host:port.
        rollout: the run's rollout section.
    """

    url: str
    rollout: Rollout

    def wait_ready(self) -> EngineClient:
        """Wait until the engine serves, and return its client.

        Raises:
            EngineError: it does not within rollout.start_timeout_seconds, or refuses the key, differs in its
                tensor parallelism, or changes the sampling of requests.
        """
        client = EngineClient(self.url, os.environ.get(API_KEY, ""), self.rollout.request_timeout_seconds)
        limit = self.rollout.start_timeout_seconds
        if not _wait_serving(client, time.monotonic() + limit):
            raise EngineError(
                f"rollout.engines: {self.url} has not answered within {limit:g} s (rollout.start_timeout_seconds): "
                "is an SGLang server running there?"
            )
        server_args = client.server_args()
        if changed := changed_sampling(server_args):
            raise EngineError(f"rollout.engines: {self.url} has {', '.join(changed)}: start it without, as {UNTRUE}")
        client.hang_seconds = float(server_args["watchdog_timeout"])
        size = server_args["tp_size"]
        expected = self.rollout.tensor_parallel
        if size != expected:
            raise EngineError(
                f"rollout.engines: {self.url} has tensor parallelism {size}, rollout.tensor_parallel is {expected}: "
                f"set it to {size}"
            )
        return client

    def explain(self, fault: EngineFault) -> str:
        """Return a fault: whoever started the server has its log."""
        return str(fault)

    def stop(self) -> None:
        """Do nothing: whoever started the server ends it."""

    def restart(self) -> None:
        """Refuse to restart it.

        Raises:
            EngineError: always.
        """
        raise EngineError(f"{self.url} of rollout.engines has failed: start it again, then the run")


def _wait_serving(client: EngineClient, deadline: float, check_alive: Callable[[], None] = lambda: None) -> bool:
    """Wait until a server answers; return False if it does not before the deadline."""
    while not client.is_healthy():
        check_alive()
        if time.monotonic() > deadline:
            return False
        heartbeat.beat()
        time.sleep(POLL_SECONDS)
    return True

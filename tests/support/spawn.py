"""Real gloo ranks for tests: `run_ranks(2, function)` calls `function(rank, world_size)` in two processes."""

import importlib.util
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import megappo.megatron_setup
import megappo.platform

# Ranks are forked from a server that has imported the program (and so made megatron-core usable) once, and what their
# oracles need: more than half of a small test's time otherwise. A process that has touched CUDA cannot be forked.
START_METHOD = "spawn" if megappo.platform.has_cuda() else "forkserver"
multiprocessing.set_forkserver_preload(["megappo.train", "transformers.models.auto.modeling_auto"])


def run_ranks(world_size: int, function: Callable[..., None], *args: Any, timeout: float = 120) -> None:
    """Call `function(rank, world_size, *args)` on `world_size` spawned ranks of one default process group.

    `function` stands at the top level of a test module and `args` are picklable. No process outlives the call.

    Raises:
        ProcessRaisedException: the first failing rank's traceback.
        TimeoutError: the ranks did not finish within `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        module = sys.modules[function.__module__]
        # Pickled here: unpickling imports the test module, which must come after megatron_setup.install().
        call = pickle.dumps((function, args))
        arguments = (world_size, folder, timeout, module.__name__, module.__file__, call)
        context = mp.start_processes(_rank_main, arguments, nprocs=world_size, join=False, start_method=START_METHOD)
        try:
            _join(context, timeout)
        finally:
            for process in context.processes:
                process.kill()
                process.join()


def _join(context: mp.ProcessContext, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not context.join(timeout=1):
        if time.monotonic() > deadline:
            alive = [rank for rank, process in enumerate(context.processes) if process.is_alive()]
            raise TimeoutError(f"ranks {alive} did not finish within {timeout} seconds")


def _rank_main(rank: int, world_size: int, folder: str, timeout: float, name: str, file: str, call: bytes) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    megappo.megatron_setup.install()
    dist.init_process_group(
        megappo.platform.backend(),
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    _import(name, file)
    function, args = pickle.loads(call)
    try:
        function(rank, world_size, *args)
    except pytest.fail.Exception as failure:  # "DID NOT RAISE" is no Exception: torch would not report it
        raise AssertionError(str(failure)) from failure
    dist.barrier()
    dist.destroy_process_group()


def _import(name: str, file: str) -> None:
    """Import the test module under the name pytest's importlib mode gave it, which no path leads to."""
    spec = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])

"""A rank of the pool of `spawn`: runs one call after another, each in a new process group."""

import contextlib
import faulthandler
import gc
import importlib.util
import os
import pickle
import sys
import traceback
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

import megappo.runtime.megatron_setup
import megappo.runtime.platform


def serve(number: int, connection: Connection) -> None:
    """Run the incoming calls, and answer each with None or a traceback, until the other end is closed."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number))
    megappo.runtime.megatron_setup.install()
    gc.freeze()  # what is there by now stays: collecting after each call need not look at it
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            call = connection.recv()
            answer = _answer(number, call)
            # Before the answer: then goes the folder with the group's store, and a store that is let go looks there for
            # its file, for minutes.
            gc.collect()
            connection.send(answer)


def _answer(number: int, call: tuple) -> str | None:
    _, _, timeout, *_ = call
    try:
        faulthandler.dump_traceback_later(0.9 * timeout)  # where it is stuck, if it is
        with _left_as_found():
            _make(number, *call)
    except BaseException:  # pytest's "DID NOT RAISE" is no Exception
        return traceback.format_exc()
    finally:
        faulthandler.cancel_dump_traceback_later()
    return None


@contextlib.contextmanager
def _left_as_found() -> Iterator[None]:
    """Undo the side effects of a call that a later call would see; no test covers these."""
    from megatron.core import parallel_state  # only after megatron_setup.install()
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    environment, folder, random = dict(os.environ), os.getcwd(), torch.get_rng_state()
    yield
    # What Megatron keeps of models, and with them process groups, each with a thread that wakes 100 times a second.
    for cached in (RotaryEmbedding, YarnRotaryEmbedding):
        cached.forward.cache_clear()
    for found in gc.get_objects():
        if type(found) is DistributedDataParallel:
            vars(found).clear()  # autograd's nodes hold it by its hooks, where no collector looks
    dist.destroy_process_group()
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_global_memory_buffer()
    get_cuda_rng_tracker().reset()
    torch.set_rng_state(random)
    torch.set_num_threads(1)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)


def _make(number: int, world_size: int, folder: str, timeout: float, name: str, file: str, call: bytes) -> None:
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    dist.init_process_group(
        megappo.runtime.platform.backend(),
        init_method=f"file://{folder}/store",
        rank=number,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    if name not in sys.modules:
        _import(name, file)
    function, args = pickle.loads(call)
    function(number, world_size, *args)
    dist.barrier()


def _import(name: str, file: str) -> None:
    """Import a test module under the name that pytest's importlib mode gave it, which is not on the path."""
    spec = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])

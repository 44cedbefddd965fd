"""Weights for engines on other GPUs, broadcast to all ranks of the engines, by a rank of each stage of the actor, or by
one for all stages (see `Route.senders`).

Each sender has a group with the engines. An engine takes one bucket at a time: the senders take turns.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from threading import Thread
from urllib.parse import urlsplit

import torch
from torch.distributed import ProcessGroup, TCPStore, distributed_c10d

from megappo.engines.client import EngineClient
from megappo.runtime import platform
from megappo.runtime.listening import LOOPBACK, listener, node_address, own_address, run_store
from megappo.sync.transport import FLATTENED_BUCKET, Link, Receiver, Sender
from megappo.weights.buckets import Bucket

POLL_SECONDS = 0.1
NOTICE_SECONDS = 30.0
"""After which its owner knows that an engine has ended: what gloo says of it, it says at once."""


def open_store(host: str, world_size: int, timeout: timedelta) -> TCPStore:
    """Where the members of a group meet: on this rank, at a free port of `host`, this node's address."""
    served = listener(host, 0)
    return TCPStore(
        host,
        served.getsockname()[1],
        world_size,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=served.detach(),
    )


def join(name: str, store: TCPStore, world_size: int, timeout: timedelta, backend: str) -> ProcessGroup:
    """Rank 0 of a group whose other members are engines' ranks; returns when all have joined.

    torch makes groups of one torchrun world only, but for this function without a public name, by which SGLang
    (init_custom_process_group) makes its side.
    """
    group, _ = distributed_c10d._new_process_group_helper(
        world_size,
        0,
        [],
        distributed_c10d.Backend(backend),
        distributed_c10d.PrefixStore(name, store),
        group_name=name,
        timeout=timeout,
    )
    return group


class Breakage:
    """By which the owners of engines tell their sender that one has failed.

    Args:
        group_name: of the group that is broken then.
    """

    def __init__(self, group_name: str):
        self._store = run_store().clone()  # one that the main thread waits with would not answer
        self._key = f"{group_name}/broken"

    def tell(self) -> None:
        self._store.set(self._key, "")

    def is_told(self) -> bool:
        return self._store.check([self._key])


class BroadcastSender(Sender):
    """Broadcasts to the ranks of all engines that take this transport. They meet here, when first opened.

    Once an engine fails it leaves off: the others then fail as well, or hang, and all get the weights another time.
    """

    def __init__(self, link: Link):
        self.timeout = timedelta(seconds=link.config.trainer.process_group_timeout_seconds)
        self.world_size = _world_size(link)
        self._store = open_store(_own_host(link.config.rollout.engines), self.world_size, self.timeout)
        self._group: ProcessGroup | None = None
        self._name = f"megappo_weights_{secrets.token_hex(4)}"  # of each a name of its own, as torch wants it
        self._breakage = Breakage(self._name)
        self.address = self._store.host, self._store.port, self._name

    def open(self) -> None:
        if self._group is None:
            self._unless_broken(self._join)

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        self._unless_broken(partial(self._broadcast, flat))

    def _unless_broken(self, call: Callable[[], object]) -> None:
        """Have it done as long as all engines are well: for one that is not, it may wait for ever."""
        done: Future[None] | None = None
        while not self._breakage.is_told():
            done = done or _on_a_thread(call)
            if wait([done], POLL_SECONDS).done:
                return done.result()
        self.abandon()

    def _join(self) -> None:
        self._group = join(self._name, self._store, self.world_size, self.timeout, _backend())

    def _broadcast(self, flat: torch.Tensor) -> None:
        if not flat.is_cuda:
            self._group.broadcast(flat, 0).wait()
            return
        # On a stream of its own: the default one gathers the next bucket.
        with torch.cuda.device(flat.device), torch.cuda.stream(torch.cuda.Stream()):
            self._group.broadcast(flat, 0).wait()
            torch.cuda.current_stream().synchronize()  # else the memory might be used again meanwhile

    def abandon(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()  # to destroy it would wait for members that are gone


class BroadcastReceiver(Receiver):
    """Tells an engine, on whatever GPUs, what comes."""

    def __init__(self, link: Link, client: EngineClient):
        self.client = client
        ranks = link.config.rollout.tensor_parallel
        members = {"world_size": _world_size(link), "rank_offset": 1 + link.number * ranks, "backend": _backend()}
        self._names = [name for _, _, name in link.addresses]
        self._breakages = [Breakage(name) for name in self._names]
        self._groups = [
            {"group_name": name, "master_address": host, "master_port": port, **members}
            for host, port, name in link.addresses
        ]
        self._joined = False

    def open(self) -> None:
        if not self._joined:
            for group in self._groups:
                self.client.post("/init_weights_update_group", group)  # returns when all have joined
            self._joined = True
        self.client.begin_weight_update()
        self._tell_fault()

    def send(self, bucket: Bucket) -> None:
        body = {
            "group_name": self._names[bucket[0].sender],
            "names": [tensor.name for tensor in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in bucket],
            "shapes": [list(tensor.shape) for tensor in bucket],
            "load_format": FLATTENED_BUCKET,
            "flush_cache": False,
        }
        self.client.post("/update_weights_from_distributed", body)
        self._tell_fault()

    def close(self) -> None:
        self.client.end_weight_update()

    def _tell_fault(self) -> None:
        if self.client.has_failed:
            for breakage in self._breakages:
                breakage.tell()


def _on_a_thread(call: Callable[[], object]) -> Future[None]:
    """Begin what may never end, on a thread that no end of the process waits for."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            call()
            done.set_result(None)
        except Exception as error:
            time.sleep(NOTICE_SECONDS)
            done.set_exception(error)

    Thread(target=run, name="weight-broadcast", daemon=True).start()
    return done


def _world_size(link: Link) -> int:
    return 1 + link.num_engines * link.config.rollout.tensor_parallel


def _backend() -> str:
    return "nccl" if platform.has_cuda() else "gloo"


def _own_host(engines: Sequence[str]) -> str:
    """This node's address for all ranks, and for engines elsewhere."""
    hosts = {urlsplit(url).hostname or LOOPBACK for url in engines} - {LOOPBACK, "localhost"}
    return own_address(min(hosts)) if hosts else node_address()

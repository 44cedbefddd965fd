"""Broadcast weights to engines on other GPUs: from one rank of each of the actor's stages, or from one rank for all.

`SyncRoute.senders` names these ranks. Each has a process group with all ranks of the engines. An engine takes one
bucket at a time, so the senders take turns.
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

from megappo.engines.client import EngineClient, EngineFault
from megappo.runtime import platform
from megappo.runtime.listening import LOOPBACK, listener, node_address, own_address, run_store
from megappo.sync.transport import FLATTENED_BUCKET, Link, Receiver, Sender
from megappo.userland.user_code import JsonObject
from megappo.weights.buckets import Bucket

POLL_SECONDS = 0.1
NOTICE_SECONDS = 30.0
"""Time until the owner of a crashed engine notices the crash; gloo raises at once."""
LAST_SECONDS = 5.0
"""Time for an engine to finish what it has received, once another one has failed."""


def open_store(host: str, world_size: int, timeout: timedelta) -> TCPStore:
    """Serve a store for a group's rendezvous, at a free port of `host`, this node's address."""
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


def join(
    name: str,
    store: TCPStore,
    world_size: int,
    timeout: timedelta,
    backend: str,
) -> ProcessGroup:
    """Join a group of engines' ranks as its rank 0; return when all have joined.

    The public functions of torch 2.13 make groups within one torchrun world only. This private one does not, and SGLang
    uses it for its side (init_custom_process_group).
    """
    options = {"group_name": name, "timeout": timeout}
    prefixed = distributed_c10d.PrefixStore(name, store)
    backend = distributed_c10d.Backend(backend)
    group, _ = distributed_c10d._new_process_group_helper(world_size, 0, [], backend, prefixed, **options)
    return group


def fault_key(name: str) -> str:
    """Return the key that the run's store has once an engine in the group of this name has failed."""
    return f"{name}/broken"


class BroadcastSender(Sender):
    """Broadcasts to the ranks of all engines that use this transport; they join its group at the first `open`.

    Once an engine has failed it sends nothing more: the other engines fail as well, and everything is sent to all of
    them again.
    """

    def __init__(self, link: Link):
        self.timeout = timedelta(seconds=link.config.trainer.process_group_timeout_seconds)
        self.world_size = _world_size(link)
        self._store = open_store(_own_host(link.config.rollout.engines), self.world_size, self.timeout)
        self._group: ProcessGroup | None = None
        self._name = f"megappo_weights_{secrets.token_hex(4)}"  # torch wants a new name for each group
        self._faults = run_store().clone()  # the main thread may block the original while it waits
        self.address = self._store.host, self._store.port, self._name

    def open(self) -> None:
        if self._group is None:
            self._unless_broken(self._join)

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        self._unless_broken(partial(self._broadcast, flat))

    def abort(self) -> None:
        group = self._group
        self._group = None
        if group is not None:
            group.abort()  # destroying it would wait for members that have ended

    def _unless_broken(self, call: Callable[[], object]) -> None:
        """Run the call; abort once an engine has failed, as the call may then never return."""
        done: Future[None] | None = None
        while not self._faults.check([fault_key(self._name)]):
            done = done or _on_a_thread(call, NOTICE_SECONDS)
            if wait([done], POLL_SECONDS).done:
                return done.result()
        self.abort()

    def _join(self) -> None:
        self._group = join(self._name, self._store, self.world_size, self.timeout, _backend())

    def _broadcast(self, flat: torch.Tensor) -> None:
        if not flat.is_cuda:
            self._group.broadcast(flat, 0).wait()
            return
        # On a stream of its own: the default one gathers the next bucket.
        with torch.cuda.device(flat.device), torch.cuda.stream(torch.cuda.Stream()):
            self._group.broadcast(flat, 0).wait()
            torch.cuda.current_stream().synchronize()  # before the memory is used again


class BroadcastReceiver(Receiver):
    """Announces the senders' buckets to an engine.

    The engine waits for the senders and the other engines, and would wait until a timeout of minutes once one of these
    has failed: gloo's `abort` does nothing (torch 2.13). So it counts as failed as well, and is restarted.
    """

    def __init__(self, link: Link, client: EngineClient):
        self.client = client
        self._addresses = link.addresses
        self._member = {
            "world_size": _world_size(link),
            "rank_offset": 1 + link.number * link.config.rollout.tensor_parallel,
            "backend": _backend(),
        }
        self._faults = run_store().clone()
        self._fault_keys = [fault_key(name) for _, _, name in self._addresses]
        self._joined = False

    def open(self) -> None:
        if not self._joined:
            for host, port, name in self._addresses:
                body = {"group_name": name, "master_address": host, "master_port": port, **self._member}
                self.client.defer(self._request, "/init_weights_update_group", body)  # returns when all have joined
            self._joined = True
        self.client.begin_weight_update()
        self._report_fault()

    def send(self, bucket: Bucket) -> None:
        _, _, group_name = self._addresses[bucket[0].sender_index]
        body = {
            "group_name": group_name,
            "names": [tensor.name for tensor in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in bucket],
            "shapes": [list(tensor.shape) for tensor in bucket],
            "load_format": FLATTENED_BUCKET,
            "flush_cache": False,
        }
        self.client.defer(self._request, "/update_weights_from_distributed", body)
        self._report_fault()

    def close(self) -> None:
        self.client.end_weight_update()

    def _request(self, path: str, body: JsonObject) -> None:
        """Send a request that the engine answers when all members of a group have taken part."""
        answer = _on_a_thread(partial(self.client.request, "POST", path, body))
        while not wait([answer], POLL_SECONDS).done:
            if self._faults.check(self._fault_keys) and not wait([answer], LAST_SECONDS).done:
                raise EngineFault(f"{self.client.url}{path} waits for an engine that has failed")
        answer.result()

    def _report_fault(self) -> None:
        if self.client.has_failed:
            for key in self._fault_keys:
                self._faults.set(key, "")


def _on_a_thread(call: Callable[[], object], notice_seconds: float = 0.0) -> Future[None]:
    """Start a call that may never return, on a daemon thread: the process does not wait for it when it exits.

    Args:
        notice_seconds: delay of an error.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            call()
            done.set_result(None)
        except Exception as error:
            time.sleep(notice_seconds)
            done.set_exception(error)

    Thread(target=run, name="weight-broadcast", daemon=True).start()
    return done


def _world_size(link: Link) -> int:
    return 1 + link.num_engines * link.config.rollout.tensor_parallel


def _backend() -> str:
    return "nccl" if platform.has_cuda() else "gloo"


def _own_host(engines: Sequence[str]) -> str:
    """Return an address of this node that all ranks and the engines can reach."""
    hosts = {urlsplit(url).hostname or LOOPBACK for url in engines} - {LOOPBACK, "localhost"}
    return own_address(min(hosts)) if hosts else node_address()

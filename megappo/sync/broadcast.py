"""Weights for engines on other GPUs, broadcast by one of the actor's ranks to all ranks of the engines."""

import socket
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup, TCPStore, distributed_c10d

from megappo.listening import listener
from megappo.sync.handover import HandOver, Update
from megappo.weights.buckets import Bucket

GROUP_NAME = "megappo_weights"


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


def own_address(peer: str) -> str:
    """This machine's address as `peer` (a host) sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))  # sends nothing
        return probe.getsockname()[0]


def join(store: TCPStore, world_size: int, timeout: timedelta, backend: str) -> ProcessGroup:
    """Rank 0 of a group whose other members are engines' ranks; returns when all have joined.

    torch makes groups of one torchrun world only, but for this function without a public name, by which SGLang
    (init_custom_process_group) makes its side.
    """
    group, _ = distributed_c10d._new_process_group_helper(
        world_size,
        0,
        [],
        distributed_c10d.Backend(backend),
        distributed_c10d.PrefixStore(GROUP_NAME, store),
        group_name=GROUP_NAME,
        timeout=timeout,
    )
    return group


class BroadcastSender(HandOver):
    """Sends buckets to all engines of a group. The rank is the actor's, and serves the group's store."""

    def __init__(self, group: ProcessGroup, store: TCPStore):
        self.group = group
        self._store = store  # kept: the members find each other there as long as it lives

    def send(self, bucket: Bucket, flat: torch.Tensor | None) -> None:
        if flat is None:
            raise ValueError("weights are broadcast by one of the actor's ranks")
        if not flat.is_cuda:
            self.group.broadcast(flat, 0).wait()
            return
        # On a stream of its own: the default one gathers the next bucket.
        with torch.cuda.device(flat.device), torch.cuda.stream(torch.cuda.Stream()):
            self.group.broadcast(flat, 0).wait()
            torch.cuda.current_stream().synchronize()  # else the memory might be used again meanwhile


class BroadcastRelay(Update):
    """Tells an engine what comes; the rank owns the engine, on whatever GPUs."""

    needs_weights = False

    def send(self, bucket: Bucket, flat: torch.Tensor | None) -> None:
        self.receiver.update_weights_from_group(GROUP_NAME, bucket)

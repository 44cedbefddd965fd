"""The rank that broadcasts, and engines that fail meanwhile; what it broadcasts otherwise, test_stages.py and
tests/run/test_transports.py show."""

import time
from dataclasses import replace
from datetime import timedelta
from threading import Thread

import pytest
import torch
import torch.distributed as dist
from engine_server import EngineServer
from spawn import run_ranks
from torch.distributed import TCPStore, distributed_c10d
from weight_sources import SECTIONS, specs

from megappo.config.schema import Config
from megappo.engines.client import EngineClient, EngineFault, deferring_faults
from megappo.sync import broadcast
from megappo.sync.broadcast import BroadcastReceiver, BroadcastSender
from megappo.sync.transport import Link

TIMEOUT = timedelta(seconds=20)
WEIGHTS = torch.zeros(50 * 2**20, dtype=torch.uint8)
"""More bytes than the buffers of a connection hold while the peer reads nothing."""


def join(address: tuple[str, int, str]) -> None:
    """Join the group as an engine does, and then receive nothing."""
    host, port, name = address
    store = distributed_c10d.PrefixStore(name, TCPStore(host, port, timeout=TIMEOUT))
    distributed_c10d._new_process_group_helper(2, 1, [], dist.Backend("gloo"), store, group_name=name, timeout=TIMEOUT)


def lose_an_engine(rank: int, world_size: int, num_well: int) -> None:
    """Rank 0 sends to the engine of rank 1, which hangs after so many requests."""
    sections = SECTIONS | {"trainer": {"output_dir": "o", "process_group_timeout_seconds": TIMEOUT.seconds}}
    link = {"config": Config.model_validate(sections), "architecture": None, "bucket_bytes": 1, "num_engines": 1}
    sender = BroadcastSender(Link(**link)) if rank == 0 else None
    addresses: list[tuple[str, int, str] | None] = [None, None]
    dist.all_gather_object(addresses, sender.address if sender is not None else None)
    bucket, started = specs([("weights", WEIGHTS)]), time.monotonic()
    if sender is not None:
        sender.open()
        for _ in range(2):
            sender.send(bucket, WEIGHTS)
        sender.close()
        assert time.monotonic() - started < TIMEOUT.seconds / 2, "it waited for an engine that hangs"
        sender.abort()
        return
    if num_well:
        Thread(target=join, args=addresses[:1], daemon=True).start()
    with EngineServer("hang", num_well) as server:
        client = server.client()
        receiver = BroadcastReceiver(Link(**link, addresses=addresses[:1]), client)
        with deferring_faults(client):
            receiver.open()
            for _ in range(2):
                receiver.send(bucket)
            receiver.close()
        assert isinstance(client.take_fault(), EngineFault)


def lose_the_other_engine(rank: int, world_size: int) -> None:
    """Rank 1 has an engine that fails; rank 2's waits for it as long as its client lets it."""
    broadcast.LAST_SECONDS = 0.2
    link = Link(Config.model_validate(SECTIONS), None, 1, num_engines=2)
    sender = BroadcastSender(link) if rank == 0 else None
    addresses: list[tuple[str, int, str] | None] = [None] * 3
    dist.all_gather_object(addresses, sender.address if sender is not None else None)
    if sender is not None:
        sender.open()
        return
    with EngineServer("hang" if rank == 2 else "crash") as server:
        client = EngineClient(f"http://127.0.0.1:{server.server_port}", "key", 60.0, hang_seconds=60.0)
        receiver = BroadcastReceiver(replace(link, number=rank - 1, addresses=addresses[:1]), client)
        started = time.monotonic()
        with deferring_faults(client):
            receiver.open()
            receiver.send(specs([("weights", WEIGHTS)]))
        assert time.monotonic() - started < 20
        fault = client.take_fault()
    assert isinstance(fault, EngineFault)
    assert ("waits for an engine that has failed" in str(fault)) == (rank == 2)


def test_an_engine_does_not_wait_for_another_that_has_failed() -> None:
    run_ranks(3, lose_the_other_engine)


@pytest.mark.parametrize("num_well", [0, 2])
def test_nobody_waits_for_an_engine_that_hangs(num_well: int) -> None:
    """As it is to join, and when it is to take the weights."""
    run_ranks(2, lose_an_engine, num_well)

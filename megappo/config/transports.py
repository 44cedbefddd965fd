"""Transports of the actor's weights to an engine, an entry each; the values of rollout.sync.transport follow from it.

Without torch: each names what makes its ends, which stand in megappo.sync.
"""

from dataclasses import dataclass

from megappo.table import Function, Table

AUTO = "auto"
"""The rollout.sync.transport with which an engine takes the first of the table that is open to it."""
GPU_BUCKET_BYTES, CPU_BUCKET_BYTES = 2 * 2**30, 128 * 2**20
"""rollout.sync.bucket_bytes where it is null."""


@dataclass(frozen=True)
class Transport:
    """A rollout.sync.transport.

    Attributes:
        engine: (Link, EngineClient) -> the end of the rank that owns an engine: a Receiver; a Sender without `sender`.
        sender: (Link) -> the Sender of one of the actor's ranks, for all engines; None = each engine's owner gives it
            the weights itself, and must be one of the actor's ranks.
        needs_other_gpu: the rank that sends must not be on the engine's GPUs, as both are in a group of NCCL's.
        each_stage: with `sender`: where this holds for all engines, each pipeline stage of the actor has one, for its
            own tensors: `Link.addresses` has them all, `TensorSpec.sender` names the owner of a tensor.
        each_rank: without `sender`, on GPUs: all of the engine's ranks make its end if they are the actor's, so that
            each hands over what is on its own GPU: with `Link.peers`, and on all but the first with None for a client.
        adapters: the same way for the adapters alone of a model whose other weights engines have (actor.lora): their
            ends are sent one bucket, which holds them all. None = it has no such way.
    """

    engine: Function
    sender: Function | None = None
    needs_other_gpu: bool = False
    each_stage: bool = False
    each_rank: bool = False
    adapters: "Transport | None" = None


TRANSPORTS: Table[Transport] = Table(
    "transport",
    {
        "ipc": Transport(
            "megappo.sync.ipc:HandleSender",
            each_rank=True,
            adapters=Transport("megappo.sync.ipc:AdapterHandles", each_rank=True),
        ),
        "broadcast": Transport(
            "megappo.sync.broadcast:BroadcastReceiver",
            "megappo.sync.broadcast:BroadcastSender",
            needs_other_gpu=True,
            each_stage=True,
        ),
        "disk": Transport(
            "megappo.sync.disk:DiskReader",
            "megappo.sync.disk:DiskWriter",
            adapters=Transport("megappo.sync.disk:AdapterReader", "megappo.sync.disk:AdapterWriter"),
        ),
    },
)
"""By rollout.sync.transport."""

"""Interface of a transport: a `Sender`, which has the weights, and a `Receiver`, which announces them to an engine.

These endpoints have three calls: `open`, `send` for each bucket, `close`. The first two run on a thread, one after the
other, while the next bucket is gathered. All senders close; then, once all ranks have done so, all receivers.

| transport | ranks with a Sender | announces buckets to the engine |
| --- | --- | --- |
| ipc | the engine's owner; on GPUs all of its ranks, if they are the actor's | the Sender at the engine's owner |
| broadcast | one of the actor's per pipeline stage, or one for all stages | a Receiver at the engine's owner |
| disk | one of the actor's | a Receiver at the engine's owner |

An engine without a Receiver thus has its Senders on its own ranks, and a rank may be the owner of one engine and send
to others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megappo.architecture.architecture import Architecture
from megappo.config.schema import Config
from megappo.weights.buckets import Bucket

FLATTENED_BUCKET = "flattened_bucket"
"""SGLang's word for tensors of one dtype, one after the other in one piece of memory."""


@dataclass(frozen=True)
class Link:
    """Arguments of a transport's endpoints.

    Attributes:
        architecture: the actor's.
        num_engines: number of engines that use this transport.
        number: position of this rank's engine among them.
        addresses: `Sender.address` of each rank of `SyncRoute.senders`.
        peers: gloo group of the engine's ranks if each of them makes this endpoint; else None.
    """

    config: Config
    architecture: Architecture
    bucket_bytes: int
    num_engines: int
    number: int = 0
    addresses: Sequence[Any] = ()
    peers: dist.ProcessGroup | None = None

    @property
    def address(self) -> Any:
        """Address of the only sender."""
        [address] = self.addresses
        return address

    @property
    def folder(self) -> Path:
        """Folder that all ranks can write to."""
        return Path(self.config.trainer.output_dir).resolve() / "sync"


class Sender:
    """Endpoint on a rank of the actor that sends all weights, or the weights of its pipeline stage
    (`Transport.each_stage`).

    If the transport has no `Transport.sender`, each engine's owner has one for its own engine, and with
    `Transport.each_rank` all of the engine's ranks do.

    Attributes:
        address: data by which receivers find this sender; None if they need none.
    """

    address: Any = None

    def open(self) -> None:
        """Prepare for the first bucket."""

    def next_buffer(self, size: int) -> torch.Tensor | None:
        """Return memory for the next bucket, uint8 [size], from which the engine reads it; None = any memory will do.

        Called once a bucket, while the previous one may still be read.
        """

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Send a bucket, which lies in `flat` (see `views`); on return that memory may be reused."""
        raise NotImplementedError

    def close(self) -> None:
        """Finish after the last bucket."""

    def abort(self) -> None:
        """Clean up after a failed sync, or before another sender takes this one's place."""


class Receiver:
    """Endpoint at an engine's owner. Passes to the engine which bucket a Sender elsewhere is sending.

    If the engine fails, its client returns None instead of raising, so that `open`, `send` and `close` stay in step
    with other ranks. Afterwards the engine is restarted, and everything is sent again. A sender must not wait for an
    engine without a timeout.
    """

    def open(self) -> None:
        """Prepare for the first bucket."""

    def send(self, bucket: Bucket) -> None:
        """Announce a bucket to the engine; return when the engine has it."""

    def close(self) -> None:
        """Finish when all senders have closed."""

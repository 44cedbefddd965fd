"""Interface of a transport: the end that has the weights, and the end that announces them to an engine.

Each end has three calls: `open`, `send` for each bucket, `close`. The first two run on a thread, one after the other,
while the next bucket is gathered. All senders close; then, once all ranks have done so, all receivers.
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
    """Arguments of the ends of a transport.

    Attributes:
        architecture: the actor's.
        num_engines: engines that take this transport.
        number: of this rank's engine among them.
        addresses: each sender's `address`.
        peers: gloo group of the engine's ranks, where each of them makes this end; else None.
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
        """A folder that all ranks can write."""
        return Path(self.config.trainer.output_dir).resolve() / "sync"


class Sender:
    """The end on one of the actor's ranks, with all weights or those of a pipeline stage (see `Transport.each_stage`).

    Attributes:
        address: where the receivers find this end, if they must.
    """

    address: Any = None

    def open(self) -> None:
        """Prepare for the first bucket."""

    def buffer(self, size: int) -> torch.Tensor | None:
        """Return uint8 [size], the memory from which the engine reads the next bucket; None = any memory."""

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Send a bucket, whose memory `flat` is (see `views`); on return it may be reused."""
        raise NotImplementedError

    def close(self) -> None:
        """Finish after the last bucket."""

    def abort(self) -> None:
        """Clean up after a failed sync, or before another sender takes this one's place."""


class Receiver:
    """The end on a rank that owns an engine, which gets the weights from elsewhere.

    An engine that fails meanwhile raises nothing: its client then answers None, so that `open`, `send` and `close` keep
    in step with other ranks; it is restarted afterwards, and everything is sent again. A sender must not wait for it
    without a timeout.
    """

    def open(self) -> None:
        """Prepare for the first bucket."""

    def send(self, bucket: Bucket) -> None:
        """Announce a bucket to the engine; return when the engine has it."""

    def close(self) -> None:
        """Finish when all senders have closed."""

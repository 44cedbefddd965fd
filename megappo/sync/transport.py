"""What a transport is made of: the end that has the weights, and the end that tells an engine of them.

Each is three calls: `open`, `send` for each bucket, `close`. The first two run on a thread, one after the other, while
the next bucket is gathered. All senders close; then, when all ranks have come so far, all receivers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megappo.architecture.architecture import Architecture
from megappo.config.schema import Config
from megappo.sync.shared_memory import SharedMemory
from megappo.weights.buckets import Bucket

FLATTENED_BUCKET = "flattened_bucket"
"""SGLang's word for tensors of one dtype, one after the other in one piece of memory."""


@dataclass(frozen=True)
class Link:
    """What the ends of a transport are made from.

    Attributes:
        architecture: the actor's.
        num_engines: that take this transport. number: of this rank's among them.
        addresses: what each of the senders gives as its `address`. address: where there is but one.
        peers: the ranks of the engine, where each of them makes this end (gloo); else None.
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
        """See `addresses`."""
        [address] = self.addresses
        return address

    @property
    def folder(self) -> Path:
        """In which all ranks may leave something for others."""
        return Path(self.config.trainer.output_dir).resolve() / "sync"


class Sender:
    """The end that has the weights, or a pipeline stage's (see `Transport.each_stage`), on one of the actor's ranks.

    Attributes:
        memory: where the engine reads them: buckets are gathered there. None = any memory will do.
        address: where the receivers find this end, if they must.
    """

    memory: SharedMemory | None = None
    address: Any = None

    def open(self) -> None:
        """Before the first bucket."""

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Send a bucket, `flat` being its memory (see `views`), and return when that may be used again."""
        raise NotImplementedError

    def close(self) -> None:
        """After the last bucket."""

    def abort(self) -> None:
        """Instead of `close`, when something could not be sent."""

    def abandon(self) -> None:
        """Let go of engines some of which have been restarted: another end takes this one's place."""


class Receiver:
    """The end of a rank that owns an engine, which gets the weights from elsewhere.

    Of an engine that fails meanwhile nothing raises: its client answers None from then on, for `open`, `send` and
    `close` to go on in step with other ranks, and afterwards it is restarted and all is sent once more. A sender
    must not wait for it for ever.
    """

    def open(self) -> None:
        """Before the first bucket."""

    def send(self, bucket: Bucket) -> None:
        """Tell the engine what comes, and return when it is there."""

    def close(self) -> None:
        """When all senders have closed."""

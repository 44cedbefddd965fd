"""Weight sync: reshard the actor's weights into the engines, bucket by bucket, each sent while the next is gathered.

Nothing is renamed on the way: an `Export` gathers tensors under their Hugging Face names, which engines load by. The
tables of `megappo/architecture/parameters.py` map them to Megatron's parameters.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from megappo.sync.transport import Receiver, Sender
from megappo.weights.buckets import Bucket, TensorSpec, all_finite, in_turns, num_bytes, views
from megappo.weights.export import Export


@dataclass(frozen=True)
class SyncStats:
    """Size and duration of one sync, by this rank's clock."""

    bytes: int = 0
    seconds: float = 0.0


@dataclass
class WeightSync:
    """Sync of one model's weights to all engines, on this rank. All ranks of the run make it, and call it, together.

    Attributes:
        tensors: the model's, the same on every rank, in the order in which they are gathered.
        source: gathers them; None on ranks that take no part.
        senders, receivers: this rank's endpoints of transports.
        expected: name -> shape of every tensor the engines have.
        barrier: waits for all ranks of the run.
        engines_keep: the engines keep their weights from one sync to the next.
        sender_index: `sender_index` of the tensors that this rank gathers, and sends if it has senders.
    Raises:
        ValueError: the engines do not know a tensor, have it in another shape, or miss one; the message names it.
    """

    tensors: Sequence[TensorSpec]
    source: Export | None
    senders: Sequence[Sender]
    receivers: Sequence[Receiver]
    expected: Mapping[str, tuple[int, ...]]
    bucket_bytes: int
    barrier: Callable[[], object]
    engines_keep: bool
    sender_index: int = 0

    def __post_init__(self) -> None:
        check_tensors(self.tensors, self.expected)
        self._sent = False

    def __call__(self, *, changed: bool = True) -> SyncStats:
        """Replace the engines' weights.

        Args:
            changed: the model may have been trained since the last call. Engines that keep their weights get everything
                the first time, later what is trained, and nothing where nothing has changed; others get everything.
        Raises:
            FloatingPointError: a tensor is not finite. The engines' weights are then part old, part new, and their
                updates stay open: they must not be used further.
        """
        started = time.perf_counter()
        if tensors := self.pending(changed=changed):
            self._send(tensors)
            self.barrier()
            for receiver in self.receivers:
                receiver.close()
            self._sent = True
        return SyncStats(num_bytes(tensors), time.perf_counter() - started)

    def pending(self, *, changed: bool) -> Sequence[TensorSpec]:
        """Return the tensors that a call would send now, the same on every rank."""
        if self._sent and self.engines_keep:
            return [tensor for tensor in self.tensors if changed and not tensor.is_frozen]
        return self.tensors

    def forget(self) -> None:
        """Send everything the next time, whatever the engines have."""
        self._sent = False

    def _send(self, tensors: Sequence[TensorSpec]) -> None:
        """Gather each bucket while the previous one is sent, so that two are in flight."""
        buckets = in_turns(tensors, self.bucket_bytes)
        largest = max(map(num_bytes, buckets))
        if not self.receivers:  # an engine's owner announces every bucket, whoever sends it
            buckets = [bucket for bucket in buckets if bucket[0].sender_index == self.sender_index]
        endpoints = [*self.senders, *self.receivers]
        threads = ThreadPoolExecutor(max_workers=max(1, len(endpoints)))
        try:
            pending = [threads.submit(endpoint.open) for endpoint in endpoints]
            if not self._sent:  # a group may be made, during which no other collective may run
                wait_for(pending)
            for bucket in buckets:
                flat = None
                if self.source is not None and bucket[0].sender_index == self.sender_index:
                    flat = self.source.gather(bucket, self._buffer(bucket, largest))
                    if self.senders:
                        check_finite(bucket, flat)
                wait_for(pending)
                pending = [threads.submit(send, sender, bucket, [flat]) for sender in self.senders if flat is not None]
                pending += [threads.submit(receiver.send, bucket) for receiver in self.receivers]
                del flat
            wait_for(pending)
            for sender in self.senders:
                sender.close()
        except BaseException:
            for sender in self.senders:
                sender.abort()
            raise
        finally:
            threads.shutdown(wait=False, cancel_futures=True)  # a thread that waits for an engine must not delay errors

    def _buffer(self, bucket: Bucket, largest: int) -> torch.Tensor | None:
        """Return the memory from which the engine reads the bucket; None = any."""
        for sender in self.senders:
            memory = sender.next_buffer(largest)
            if memory is not None:
                return memory[: num_bytes(bucket)]
        return None


def send(sender: Sender, bucket: Bucket, held: list[torch.Tensor]) -> None:
    """Send the bucket held, and let go of it: the pool keeps a call's arguments a moment longer than the call."""
    sender.send(bucket, held.pop())


def wait_for(futures: Sequence[Future]) -> None:
    """Wait for all; raise the error of the first that fails, as the others may then never end."""
    for future in wait(futures, return_when=FIRST_EXCEPTION).done:
        future.result()


def check_tensors(tensors: Sequence[TensorSpec], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Check that these are the engines' tensors: SGLang reports success for an unknown name.

    Raises:
        ValueError: one is unknown, of another shape, or missing; the message names it.
    """
    for tensor in tensors:
        name = tensor.name
        shape = tuple(tensor.shape)
        if name not in expected:
            raise ValueError(f"weight sync: the engine has no tensor {name}; was it started from another model.path?")
        if shape != tuple(expected[name]):
            raise ValueError(f"weight sync: {name} has shape {shape}, but the engine's is {tuple(expected[name])}")
    missing = sorted(expected.keys() - {tensor.name for tensor in tensors})
    if missing:
        names = ", ".join(missing[:5])
        raise ValueError(
            f"weight sync: {len(missing)} of the engine's {len(expected)} tensors are not the model's: {names}"
        )


def check_finite(bucket: Bucket, flat: torch.Tensor) -> None:
    """Check that a bucket's values are finite.

    Raises:
        FloatingPointError: they are not; a tensor is named.
    """
    # Senders rely on this check. On a GPU, reading its result waits for the kernels that fill the bucket; the senders'
    # threads and the engines do not wait for this stream.
    if all_finite(flat.view(bucket[0].dtype)):
        return
    for name, tensor in views(bucket, flat):
        if not all_finite(tensor):
            raise FloatingPointError(
                f"weight sync: {name} holds values that are not finite: the actor's weights are corrupt, or were "
                "damaged on the way; resume from a checkpoint before this step"
            )

"""Wait until an engine that sleeps has freed its GPU memory."""

import time

from megappo.runtime import platform
from megappo.runtime.heartbeat import heartbeat

GIB = 2**30
RETURNED = 0.8
"""Share of the bytes that an engine reports for weights and KV cache that must become free: the report is not exact."""
LIMIT_SECONDS = 30.0
POLL_SECONDS = 0.02


class Footprint:
    """Memory of this rank's GPU that other processes hold.

    SGLang 0.5.23 answers `release_memory_occupation` as soon as the first of an engine's ranks has released its own.

    Args:
        held_bytes: the part of it that an engine frees when it sleeps; 0 without such an engine.
    """

    def __init__(self, held_bytes: float):
        self._held_bytes = held_bytes
        self._awake = 0

    def note_awake(self) -> None:
        """Note the memory in use while the engine is awake."""
        self._awake = platform.bytes_of_others() if self._held_bytes else 0

    def wait_asleep(self) -> None:
        """Wait until the sleeping engine has freed its memory; warn if it has not within the limit."""
        if not self._held_bytes:
            return
        expected = self._awake - RETURNED * self._held_bytes
        deadline = time.monotonic() + LIMIT_SECONDS
        while (found := platform.bytes_of_others()) > expected:
            if time.monotonic() > deadline:
                print(self._still_held(found, expected), flush=True)  # of this rank, which may have no observer
                return
            heartbeat.beat()
            time.sleep(POLL_SECONDS)

    def _still_held(self, found: float, expected: float) -> str:
        processes = "; ".join(platform.gpu_processes()) or "nvidia-smi names none"
        return (
            f"WARNING: {platform.device()}: other processes hold {found / GIB:.1f} GiB {LIMIT_SECONDS:g} s after the "
            f"engine went to sleep, expected at most {expected / GIB:.1f}; the models may run out of memory. "
            f"Processes there: {processes}. End those that are not of this run, or lower rollout.mem_fraction_static"
        )

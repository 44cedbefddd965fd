"""Wait for what other processes do."""

import time
from collections.abc import Callable

POLL_SECONDS = 0.05


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until a condition holds.

    Raises:
        AssertionError: it does not hold within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition was not met within {seconds} s"
        time.sleep(POLL_SECONDS)

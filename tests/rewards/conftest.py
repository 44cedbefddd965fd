"""Whatever a test of reward functions starts must be gone when it ends."""

import uuid
from collections.abc import Iterator

import psutil
import pytest


@pytest.fixture(autouse=True)
def no_process_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test starts, and whatever that starts, is gone when the test ends."""
    marker = uuid.uuid4().hex  # inherited by all of them, whoever their parent is by then
    monkeypatch.setenv("REWARDS_UNDER_TEST", marker)
    yield
    left = [process for process in psutil.process_iter(["cmdline"]) if is_marked(process, marker)]
    assert not left, [process.info["cmdline"] for process in left]


def is_marked(process: psutil.Process, marker: str) -> bool:
    try:
        return process.environ().get("REWARDS_UNDER_TEST") == marker and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False

"""Environments for tests, and a check that no test leaves a process behind."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest


@pytest.fixture(autouse=True)
def no_process_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that all processes that a test starts, and all that these start, have ended with the test."""
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


ENVIRONMENTS = """
import asyncio
import os
import time


class Counts:
    columns = ("number",)

    async def reset(self, row):
        self.left = row["number"]

    async def step(self, message):
        await asyncio.sleep(0.2)
        self.left -= 1
        return f"left {self.left}", 1, self.left == 0


class Plain(Counts):
    def reset(self, row):
        self.left = 1
        return [{"role": "tool", "content": str(row["number"])}]

    def step(self, message):
        time.sleep(0.2)
        return None, [0.5] * len(message["token_ids"]), True


class Raises(Counts):
    def step(self, message):
        raise KeyError("no such thing")


class Exits(Counts):
    async def step(self, message):
        raise SystemExit(3)


class Hangs(Counts):
    async def step(self, message):
        await asyncio.sleep(100)


class HangsInAThread(Counts):
    def step(self, message):
        time.sleep(100)


class Blocks(Counts):
    async def step(self, message):
        time.sleep(100)


class Dies(Counts):
    async def step(self, message):
        os._exit(3)


class DiesOfAHundred(Counts):
    async def step(self, message):
        if self.left == 100:
            os._exit(3)
        return await super().step(message)


class NoJson(Counts):
    async def step(self, message):
        return {"role": "user", "content": "x", "more": {1, 2}}, 0.0, True


class Rewrites(Counts):
    async def step(self, message):
        return [{"replace": "again"}, {"replace": [{"role": "user", "content": "a"}] * 2}][self.left % 2], 0.0, True


class RewritesToNothing(Counts):
    async def step(self, message):
        return {"replace": []}, 0.0, True


class RewritesAndMore(Counts):
    async def step(self, message):
        return {"replace": "again", "role": "user"}, 0.0, True


class HalfACharacter(Counts):
    async def step(self, message):
        return chr(0xD800), 0.0, True


class Slow(Counts):
    made = closed = 0

    def __init__(self):
        time.sleep(0.5)
        type(self).made += 1

    async def reset(self, row):
        return f"{self.made} made, {self.closed} closed"

    async def close(self):
        type(self).closed += 1


class Long(Counts):
    ended = closed = 0

    async def reset(self, row):
        return f"{self.ended} ended, {self.closed} closed"

    async def step(self, message):
        try:
            await asyncio.sleep(100)
        finally:
            type(self).ended += 1

    async def close(self):
        type(self).closed += self.ended > self.closed


class ClosesSlowly(Counts):
    async def step(self, message):
        await asyncio.sleep(100)

    def close(self):
        while not os.path.exists(os.environ["CLOSED"] + " may be"):
            time.sleep(0.01)
        with open(os.environ["CLOSED"], "a") as file:
            file.write("x")


class MadeSlowly(ClosesSlowly):
    def __init__(self):
        time.sleep(1)


class NotCancelled(ClosesSlowly):
    async def step(self, message):
        while True:
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                pass


class SaysMuch(Counts):
    async def step(self, message):
        return "x" * 2**23, 0, True


class ThreeOnly(Counts):
    async def step(self, message):
        return 3


class NoText(Counts):
    async def step(self, message):
        return 3, 0.0, True


class NoNumber(Counts):
    async def step(self, message):
        return "", "1", True


class NotFinite(Counts):
    async def step(self, message):
        return "", float("nan"), True


class TooLarge(Counts):
    async def step(self, message):
        return "", 10**400, True


class NoBool(Counts):
    async def step(self, message):
        return "", 0.0, "no"


class TooManyRewards(Counts):
    async def step(self, message):
        return "", [1.0] * 9, True


class OneColumn(Counts):
    columns = "number"


class NoTools(Counts):
    tools = [{"name": Counts}]


class NoStep:
    async def reset(self, row):
        pass
"""


@pytest.fixture(scope="session")
def environments(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("environments") / "environments.py"
    path.write_text(ENVIRONMENTS)
    return path

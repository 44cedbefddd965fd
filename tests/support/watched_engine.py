"""Responses that an engine writes while a test does something else to it."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from megappo.engines.client import EngineClient
from megappo.engines.generations import Generation, SamplingParams
from megappo.engines.process import Engine


class Watched(EngineClient):
    """A client that counts the events of its streams: the first ones are each sequence's first token."""

    def __init__(self, engine: Engine):
        super().__init__(engine.url, engine._api_key, 60.0, engine.check_alive)
        self.num_events, self.num_prompts, self.has_begun = 0, 0, threading.Event()

    def _finished(self, *arguments: Any) -> tuple[int, Generation] | None:
        self.num_events += 1
        if self.num_events == self.num_prompts:
            self.has_begun.set()
        return super()._finished(*arguments)


@contextmanager
def writing(client: Watched, prompts: Sequence[list[int]], params: SamplingParams, times: int = 1) -> Iterator[Future]:
    """While the block runs, the engine responds so many times to the prompts, each of which has a token; yields the
    responses to come."""
    client.num_prompts = len(prompts)

    async def generate() -> list[Generation]:
        async with client.open_async() as http:
            found = [one async for one in client.generate_async(http, list(prompts) * times, params)]
        return [generation for _, generation in sorted(found, key=lambda one: one[0])]

    with ThreadPoolExecutor(1) as threads:
        responses = threads.submit(asyncio.run, generate())
        while not client.has_begun.wait(0.1):
            assert not responses.done() or responses.result(), "the responses ended before all had begun"
        yield responses

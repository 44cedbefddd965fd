"""Spreads prompts over engines: each takes the next prompts when it has room, so that a fast engine takes more."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist

from megappo.rollout.client import EngineClient, EngineFault, Generation, SamplingParams

REQUESTS_IN_FLIGHT = 8
STOP_SECONDS = 0.5
"""How often to ask whether to stop."""


@dataclass(frozen=True)
class Sample:
    """One response to one prompt, as `Generation`; log_probs are None at tokens that an environment wrote."""

    prompt_index: int
    sample_index: int
    tokens: list[int]
    log_probs: Sequence[float | None]
    finish_reason: Literal["stop", "length"]

    @property
    def num_policy_tokens(self) -> int:
        """How many of the tokens the policy wrote."""
        return sum(log_prob is not None for log_prob in self.log_probs)


@dataclass(frozen=True)
class Sampled:
    """What an engine wrote.

    Attributes:
        samples: all n of each prompt that is among them.
        fault: why there are no more, where the engine has failed.
    """

    samples: list[Sample]
    fault: EngineFault | None = None


def store_counter(store: dist.Store, key: str) -> Callable[[int], int]:
    """Hands out positions 0, 1, 2, ... each once, to whichever rank asks: the first of the next `count`, which is how
    many were taken before, by anybody. `key` must be new in the store."""
    return lambda count: store.add(key, count) - count


def sample(
    prompts: Sequence[tuple[int, list[int]]],
    n: int,
    params: SamplingParams,
    client: EngineClient,
    take: Callable[[int], int],
    *,
    num_engines: int,
    max_running_requests: int,
    on_prompts: Callable[[int], None] = lambda count: None,
    stop: Callable[[], bool] = lambda: False,
) -> Sampled:
    """Sample n responses for those of the prompts that this process' engine gets to, in no particular order.

    Every process with an engine calls this at once, with the same prompts; together they return each sample once.

    Args:
        prompts: (prompt_index, token ids).
        client: this process' engine.
        take: a `store_counter` shared by all processes.
        num_engines: engines of all processes together.
        max_running_requests: sequences one engine decodes at once.
        on_prompts: called with the number of prompts of which this engine has just finished all n samples.
        stop: asked now and then; once it says so, the rest is left, and what is there returned.
    Raises:
        EngineError: the engine refused a request, or took too long for it.
    """
    chunk, requests = _chunking(len(prompts), n, num_engines, max_running_requests)
    samples: list[Sample] = []

    async def work(http: Any) -> None:
        while (first := take(chunk)) < len(prompts):
            taken = prompts[first : first + chunk]
            repeated = [tokens for _, tokens in taken for _ in range(n)]
            generations = await client.generate_async(http, repeated, params)
            for order, (prompt_index, _) in enumerate(taken):
                samples.extend(_group(prompt_index, generations[order * n : (order + 1) * n]))
            on_prompts(len(taken))

    async def watch(workers: Sequence[asyncio.Task]) -> None:
        while not all(worker.done() for worker in workers):
            if stop():
                for worker in workers:
                    worker.cancel()
            await asyncio.wait(workers, timeout=STOP_SECONDS)

    async def work_all() -> None:
        async with client.open_async() as http, asyncio.TaskGroup() as tasks:
            workers = [tasks.create_task(work(http)) for _ in range(requests)]
            tasks.create_task(watch(workers))
            health = tasks.create_task(client.watch(http))
            await asyncio.wait(workers)
            health.cancel()

    try:
        _run(work_all())
    except EngineFault as fault:
        return Sampled(samples, fault)
    return Sampled(samples)


def _chunking(num_prompts: int, n: int, num_engines: int, max_running_requests: int) -> tuple[int, int]:
    """Prompts per request and requests in flight for one engine.

    With several engines each has at most half of its even share in flight: the rest goes to whoever is free first.
    """
    share = math.ceil(num_prompts / num_engines / (1 if num_engines == 1 else 2))
    in_flight = max(1, min(max_running_requests // n, share))
    chunk = math.ceil(in_flight / REQUESTS_IN_FLIGHT)
    return chunk, math.ceil(in_flight / chunk)


def _group(prompt_index: int, generations: Sequence[Generation]) -> list[Sample]:
    return [Sample(prompt_index, order, g.tokens, g.log_probs, g.finish_reason) for order, g in enumerate(generations)]


def _run(work: Any) -> None:
    """Run a coroutine; of several failures at once the first is raised as it is."""
    try:
        asyncio.run(work)
    except* Exception as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None

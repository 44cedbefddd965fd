"""Run the rollout session of one engine to its end."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megappo.engines.client import EngineClient, EngineFault
from megappo.engines.generations import SamplingParams
from megappo.rollouts.sample_rows import Sample
from megappo.rollouts.sampler import EngineUsage, IndexedPrompts, RolloutSession, SharedPrompts, grouped


class Sampled(NamedTuple):
    samples: list[Sample]
    usage: EngineUsage
    fault: EngineFault | None


def sample(
    prompts: IndexedPrompts,
    n: int,
    params: SamplingParams,
    client: EngineClient,
    take: Callable[[int], int],
    *,
    num_engines: int,
    on_group: Callable[[Sequence[Sample]], object] = lambda group: None,
    **settings: Any,
) -> Sampled:
    """Return everything that a session samples, one of `num_engines` that share the prompts."""
    samples: list[Sample] = []
    usage = EngineUsage()

    def add(group: Sequence[Sample]) -> None:
        samples.extend(group)
        on_group(group)

    source, most_open, on_sample = SharedPrompts(prompts, n, take), n * (len(prompts) // num_engines), grouped(n, add)
    session = RolloutSession(
        source, n, params, client, most_open=most_open, usage=usage, on_sample=on_sample, **settings
    )
    fault = session.run()
    return Sampled(samples, usage, fault)

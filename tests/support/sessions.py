"""Run the rollout session of one engine to its end."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megappo.engines.client import EngineFault
from megappo.rollouts.sample_rows import Sample
from megappo.rollouts.sampler import EngineUsage, RolloutSession


class Sampled(NamedTuple):
    samples: list[Sample]
    usage: EngineUsage
    fault: EngineFault | None


def sample(
    *arguments: Any,
    on_group: Callable[[Sequence[Sample]], object] = lambda group: None,
    early_stop: Callable[[], bool] | None = None,
    **settings: Any,
) -> Sampled:
    """Return everything that a session samples."""
    samples: list[Sample] = []
    usage = EngineUsage()

    def add(group: Sequence[Sample]) -> None:
        samples.extend(group)
        on_group(group)

    session = RolloutSession(*arguments, usage=usage, on_group=add, **settings)
    fault = session.run(early_stop=early_stop)
    return Sampled(samples, usage, fault)

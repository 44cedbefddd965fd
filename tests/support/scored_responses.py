"""Responses with known scores."""

from collections.abc import Mapping, Sequence

from megappo.data.prompts import Prompt
from megappo.observe.metrics import Metric
from megappo.rollouts.responses import Responses
from megappo.rollouts.sample_rows import Sample
from megappo.rollouts.sampler import EngineUsage
from megappo.rollouts.step_responses import StepResponses
from megappo.userland.grades import Grade


class ScoredResponses(Responses):
    """Samples with their scores."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        samples: list[Sample],
        grades: list[Grade],
        usage: EngineUsage | None = None,
        failures: Mapping[str, Metric] | None = None,
    ):
        super().__init__(prompts, None, None)
        self.samples, self._is_graded = samples, True
        for sample, one in zip(samples, grades, strict=True):
            sample.grade = one
        self.usage = usage or EngineUsage()
        self._failures = dict(failures or {})

    def failure_metrics(self) -> dict[str, Metric]:
        return self._failures


def step_of(responses: Responses) -> StepResponses:
    """Return a step that trains on all of them."""
    return StepResponses(responses.prompts, responses.samples, [responses], responses.usage)

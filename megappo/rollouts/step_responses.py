"""The responses that a step trains on, and what yields them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megappo.data.prompts import Prompt
from megappo.observe.metrics import Metric, merge_metrics
from megappo.rollouts.responses import Responses
from megappo.rollouts.sample_rows import Sample
from megappo.rollouts.sampler import EngineUsage


class Scored(Protocol):
    """Responses of this rank that are scored, or are being scored."""

    def fill_grades(self) -> None:
        """Wait for the scores and fill in the samples' grades."""

    def failure_metrics(self) -> dict[str, Metric]:
        """Count samples for which a function failed, where that does not end the run."""


@dataclass
class StepResponses:
    """The groups of responses that a step trains on.

    Attributes:
        prompts: one for each group, the same on all ranks.
        samples: this rank's; `prompt_index` is an index into `prompts`.
        parts: what this rank's samples are a part of, with the responses that the step has dropped.
        usage: work of this rank's engine for them.
        num_dropped_tokens: tokens of dropped responses, on all ranks.
        metrics: the same on all ranks, such as counts of groups and of draws.
        greedy: a greedy response to each prompt, where the estimator needs them.
        seconds: time that the engines took for them.
    """

    prompts: Sequence[Prompt]
    samples: list[Sample]
    parts: Sequence[Scored]
    usage: EngineUsage
    num_dropped_tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    greedy: Responses | None = None
    seconds: float = 0.0

    def fill_grades(self) -> None:
        """Wait for the scores of all parts and fill in the samples' grades."""
        for one in self.parts:
            one.fill_grades()

    def failure_metrics(self) -> dict[str, Metric]:
        """Return the failure metrics of all samples of all parts, see `Scored`."""
        return merge_metrics(one.failure_metrics() for one in self.parts)

    def engine_metrics(self) -> dict[str, Metric]:
        """Return this rank's part of the metrics of all engines, greedy responses included."""
        greedy = [] if self.greedy is None else [self.greedy.usage]
        return merge_metrics(usage.metrics() for usage in [self.usage, *greedy])


class Batches:
    """Yields each step's scored rows. All ranks call it together.

    Attributes:
        num_drawn: prompts, or examples, that have been drawn so far.
        pending: positions, in the order of drawing, of prompts or examples that no step has trained on or left out yet.
    """

    num_drawn = 0
    pending: Sequence[int] = ()

    def sample(self, step: int, phase: Any) -> Any:
        """Return nothing: a record, or a file, has a step's responses with their scores."""

    def prepare_save(self) -> None:
        """Prepare for a checkpoint. Only a run that samples ahead of training has responses in progress."""

    def forget_saved(self, step: int) -> None:
        """Delete what no run needs that resumes from a checkpoint after this step."""

"""Findings about the health of a run: rules that begin to hold, with the remedy, and the end that one may cause."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megappo.config.config_error import printable
from megappo.errors import EXIT_UNHEALTHY, ActionableError

PREFIX = "health/"
"""The metric of a rule is health/<rule>: 1 in the steps in which it holds, 0 in the others that have its metrics."""

LoggedMetrics = Mapping[str, Any]
"""Metrics of a step by name: numbers and histograms."""
Steps = Sequence[LoggedMetrics]
Samples = Sequence[Mapping[str, Any]]
"""Responses, with what is logged about each."""
Examples = Callable[[], Samples]
"""Returns a few responses of the step: mappings with prompt, response and score."""


@dataclass(frozen=True)
class Finding:
    """A rule that begins to hold, or that is over.

    Attributes:
        page: page and section of the documentation about the rule.
        samples: responses of the step, as `Examples` returns them; empty where they do not help.
    """

    rule: str
    step: int
    message: str
    remedy: str = ""
    page: str = ""
    samples: Samples = ()

    @property
    def is_over(self) -> bool:
        """True if the rule no longer holds."""
        return not self.remedy

    def __str__(self) -> str:
        """Return the finding as one line, and one more for each response."""
        if self.is_over:
            return f"healthy again ({self.rule}): {self.message}"
        lines = [f"unhealthy ({self.rule}): {self.message}. {self.remedy}: {self.page}"]
        for sample in self.samples:
            prompt, response = (json.dumps(sample[name], ensure_ascii=False) for name in ("prompt", "response"))
            lines.append(printable(f"  score {sample['score']:.4g}: {prompt:.60} -> {response:.100}"))
        return "\n".join(lines)


class Unhealthy(ActionableError):
    """A rule of trainer.stop_on ends a run, with everything saved; raised on all ranks."""

    exit_code = EXIT_UNHEALTHY

    def report(self, rank: int) -> str:
        return f"stopped by {self}: everything is saved"


def held_steps(steps: Steps) -> dict[str, list[int]]:
    """Return the steps in which each rule held, of the rules that were checked in any of a run's steps."""
    held: dict[str, list[int]] = {}
    for metrics in steps:
        for name in filter(lambda name: name.startswith(PREFIX), metrics):
            held_in = held.setdefault(name.removeprefix(PREFIX), [])
            if metrics[name]:
                held_in.append(metrics["step"])
    return held

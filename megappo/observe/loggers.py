"""Loggers: everything that records a run, behind six hooks. Torch-free.

The console, metrics.jsonl, run.json, the samples and the report are loggers; `trainer.loggers` adds trackers.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megappo.errors import ActionableError
from megappo.observe.health import Finding, Unhealthy
from megappo.runtime.interruption import Interrupted
from megappo.table import Table, resolved


@dataclass(frozen=True)
class RunInfo:
    """Facts about a run that are known when it starts.

    Attributes:
        total_steps: PPO steps of the whole run.
        resume_step: first step that will be logged now: 0 for a new run, k + 1 after a checkpoint of step k.
        run_id: the same whenever the run resumes; another one if it starts from the beginning.
        config: all keys, nested as in YAML.
        commit: git commit of megappo's code, with "-dirty" if files differ from it; "" outside a repository.
        hardware: what the run computes on, and the versions of its libraries.
        placement: component -> its ranks and layout.
        planned_gib: phase -> estimate of `memory/<phase>_peak_gib`; empty on a CPU.
    """

    output_dir: Path
    total_steps: int
    resume_step: int = 0
    run_id: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    commit: str = ""
    hardware: Mapping[str, str] = field(default_factory=dict)
    placement: Mapping[str, str] = field(default_factory=dict)
    planned_gib: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunEnd:
    """End of a run.

    Attributes:
        message: the reason of an interruption, or the error; "" for a finished run.
    """

    status: Literal["finished", "interrupted", "failed"] = "finished"
    message: str = ""

    @classmethod
    def by(cls, error: BaseException | None) -> "RunEnd":
        """Return the end of a run that this error ended; None: nothing went wrong."""
        if error is None:
            return cls()
        if isinstance(error, Interrupted | Unhealthy):
            return cls("interrupted", str(error))
        return cls("failed", describe(error))


def describe(error: BaseException) -> str:
    """Return an error's message, after its type unless people can act on the message."""
    return str(error) if isinstance(error, ActionableError) else f"{type(error).__name__}: {error}"


class Logger:
    """Base of all loggers: each hook does nothing. Rank 0 calls them, in its main thread."""

    def on_start(self, run: RunInfo) -> None:
        """Begin to log, before any other hook."""

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log the metrics of a step, over all ranks: numbers, and `Histogram`s. Step 0 is the model before training."""

    def on_finding(self, finding: Finding) -> None:
        """Report that a rule of the run's health begins to hold, or is over, after the step's `on_step`."""

    def on_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log responses to held-out prompts: mappings with dataset, prompt, response, label, score and passed."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Note a complete checkpoint of the weights after a step."""

    def on_end(self, end: RunEnd) -> None:
        """Finish, once, whether the run ended well or not."""


class Tracker(NamedTuple):
    """A tracker that `trainer.loggers` names.

    Attributes:
        make: creates it.
        package: module that it imports; "" for none that megappo does not need itself.
        install: the package's name for pip.
    """

    make: Callable[[], Logger] | str
    package: str = ""
    install: str = ""


LOGGERS = Table("logger", {"tensorboard": Tracker("megappo.observe.tensorboard_logger:TensorBoard")})
"""Value of trainer.loggers -> tracker."""


def open_trackers(names: Sequence[str]) -> dict[str, Logger]:
    """Create the trackers that trainer.loggers names, by name."""
    return {name: resolved(LOGGERS[name].make)() for name in names}


def logger_errors(names: Sequence[str]) -> list[str]:
    """Return the errors of trainer.loggers, one line each: unknown names, and packages that are not installed."""
    errors = []
    for name in names:
        if name not in LOGGERS:
            errors.append(f"trainer.loggers: unknown logger {name!r}: name any of {', '.join(LOGGERS)}")
        elif (package := LOGGERS[name].package) and importlib.util.find_spec(package) is None:
            errors.append(f"trainer.loggers: {name} needs the package {package}: pip install {LOGGERS[name].install}")
    return errors

"""Loggers: everything that records a run, behind six hooks. Torch-free.

The console, metrics.jsonl, run.json, the samples and the report are loggers; `trainer.loggers` adds trackers. The
command that starts a run hands over the report, and the monitor of its health, in its `Outlook`.
"""

import difflib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megappo.config.config_error import Errors, shorten
from megappo.errors import ActionableError, own_command
from megappo.observe.findings import Examples, Finding, LoggedMetrics, Samples, Unhealthy
from megappo.runtime.interruption import Interrupted
from megappo.table import Table, resolved
from megappo.user_modules import import_file, share_all

PROJECT = "megappo"
"""Project or experiment of a tracker, unless its environment variable names another."""


_POSITIVE = [1e-6 * 1.25**power for power in range(125)]
BUCKETS = [*(-limit for limit in reversed(_POSITIVE)), *_POSITIVE, sys.float_info.max]
"""Upper limits of a histogram's buckets, the same for all, so that histograms add up."""


@dataclass(frozen=True)
class Histogram:
    """A metric for trackers alone: the sum and the sum of squares of its values, and how many lie in each bucket."""

    numbers: tuple[float, ...]

    def bins(self) -> tuple[list[int], list[float]]:
        """Return the counts of the n buckets from the first with a value to the last, and their n + 1 limits; nothing
        without a value."""
        counts = [int(count) for count in self.numbers[2:]]
        filled = [index for index, count in enumerate(counts) if count]
        if not filled:
            return [], []
        first, last = filled[0], filled[-1]
        limits = [-sys.float_info.max, *BUCKETS]
        return counts[first : last + 1], limits[first : last + 2]


def only_numbers(metrics: LoggedMetrics) -> dict[str, float]:
    """Return the metrics that are numbers, without the histograms."""
    return {name: float(value) for name, value in metrics.items() if not isinstance(value, Histogram)}


@dataclass(frozen=True)
class RunInfo:
    """Facts about a run that are known when it starts.

    Attributes:
        total_steps: PPO steps of the whole run.
        resume_step: first step that will be logged now: 0 for a new run, k + 1 after a checkpoint of step k.
        logged_step: last step that earlier processes of this run have logged; -1 in a new run.
        run_id: the same whenever the run resumes; another one if it starts from the beginning.
        config: all keys, nested as in YAML.
        commit: git commit of megappo's code, with "-dirty" if files differ from it; "" outside a repository.
        hardware: what the run computes on, and the versions of its libraries.
        placement: component -> its ranks and layout.
        planned_gib: phase -> estimate of `memory/<phase>_peak_gib`; empty on a CPU.
        data: checksums of the training files.
        limits: metric -> highest value for which the run has memory, by the same estimate.
    """

    output_dir: Path
    total_steps: int
    resume_step: int = 0
    logged_step: int = -1
    run_id: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    commit: str = ""
    hardware: Mapping[str, str] = field(default_factory=dict)
    placement: Mapping[str, str] = field(default_factory=dict)
    planned_gib: Mapping[str, float] = field(default_factory=dict)
    data: str = ""
    limits: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The output folder's name."""
        return self.output_dir.resolve().name

    def facts(self) -> dict[str, Any]:
        """Return the config with everything else about the run, as a section `run`."""
        others = {name: value for name, value in vars(self).items() if name != "config"}
        return {**self.config, "run": others | {"output_dir": str(self.output_dir)}}


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
    """Base of all loggers: each hook does nothing. Rank 0 calls the hooks, a tracker's in a thread of its own."""

    def on_start(self, run: RunInfo) -> None:
        """Begin to log, before any other hook."""

    def on_step(self, step: int, metrics: LoggedMetrics) -> None:
        """Log the metrics of a step, over all ranks: numbers, and `Histogram`s. Step 0 is the model before training."""

    def on_finding(self, finding: Finding) -> None:
        """Report that a rule of the run's health begins to hold, or is over, after the step's `on_step`."""

    def on_samples(self, step: int, samples: Samples) -> None:
        """Log responses to held-out prompts: mappings with dataset, prompt, response, label, score and passed. Trackers
        get the rollouts that a step keeps, too; their dataset is "training"."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Note a complete checkpoint of the weights after a step."""

    def on_end(self, end: RunEnd) -> None:
        """Finish, once, whether the run ended well or not."""


class Monitor:
    """Base of what checks each step before the loggers log it. This one checks nothing.

    Attributes:
        reads: metric that a check adds to a step -> the metrics that it reads.
        stop_reason: why trainer.stop_on ends the run; "" if it does not.
    """

    reads: Mapping[str, Sequence[str]] = {}
    stop_reason: str = ""

    def check(
        self, step: int, metrics: LoggedMetrics, examples: Examples
    ) -> tuple[dict[str, float], Sequence[Finding]]:
        """Return further metrics of a step, and the findings about it.

        Args:
            examples: called if responses help to understand a finding.
        """
        return {}, ()


@dataclass(frozen=True)
class Outlook:
    """Facts that the command which starts a run knows beforehand, and the parts that explain the run while it trains.

    Attributes:
        facts: fields of `RunInfo` that follow from the plan: placement, planned_gib, limits.
        monitor: returns the monitor of a run that has started.
        loggers: name -> logger that every run has beside its trackers.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    monitor: Callable[[RunInfo], Monitor] = lambda run: Monitor()
    loggers: Mapping[str, Logger] = field(default_factory=dict)


NOTHING_KNOWN = Outlook()


class Tracker(NamedTuple):
    """A tracker that `trainer.loggers` names.

    Attributes:
        make: creates it.
        package: the package that it needs, by the name of its module and for pip; "" for one of megappo's own.
    """

    make: Callable[[], Logger] | str
    package: str = ""


LOGGERS = Table(
    "logger",
    {
        "tensorboard": Tracker("megappo.observe.tensorboard_logger:TensorBoard"),
        "wandb": Tracker("megappo.observe.wandb_tracker:Wandb", "wandb"),
        "mlflow": Tracker("megappo.observe.mlflow_tracker:MLflow", "mlflow"),
        "swanlab": Tracker("megappo.observe.swanlab_tracker:SwanLab", "swanlab"),
        "trackio": Tracker("megappo.observe.trackio_tracker:Trackio", "trackio"),
    },
)
"""Value of trainer.loggers -> tracker; FILE.py:CLASS is a value, too."""


def make_tracker(name: str) -> Logger:
    """Create a tracker that trainer.loggers names."""
    return resolved(LOGGERS[name].make if name in LOGGERS else _own_class(name))()


def replaces_steps(name: str) -> bool:
    """Return whether a tracker can replace a step that is trained again: a package cannot take back what it sent."""
    return name not in LOGGERS or not LOGGERS[name].package


def _own_class(name: str) -> type[Logger]:
    """Return the class of a value FILE.py:CLASS."""
    file, _, attribute = name.rpartition(":")
    found = getattr(import_file(str(Path(file).resolve())), attribute)
    share_all()
    if not issubclass(found, Logger):
        raise TypeError(f"{attribute} is not a subclass of {Logger.__module__}.Logger")
    return found


def logger_errors(names: Sequence[str]) -> Errors:
    """Yield the errors of trainer.loggers, one line each: unknown names, missing packages, files that fail."""
    for name in names:
        if name in LOGGERS:
            package = LOGGERS[name].package
            spec = importlib.util.find_spec(package) if package else None
            if package and (spec is None or spec.origin is None):  # W&B leaves a folder `wandb` where it runs
                command = f"{own_command('python')} -m pip install {package}"
                yield f"trainer.loggers: {name} needs the package {package}, which is not installed: {command}"
        elif ".py:" not in name:
            near = difflib.get_close_matches(name, LOGGERS, n=1)
            advice = f"did you mean {near[0]}?" if near else f"name {', '.join(LOGGERS)} or FILE.py:CLASS"
            advice = "drop it, as each step is printed" if name == "console" else advice
            advice = f"write a list, [{name}]" if "," in name else advice
            yield f"trainer.loggers: there is no logger {shorten(repr(name))}: {advice}"
        else:
            try:
                _own_class(name)
            except (Exception, SystemExit) as error:
                yield f"trainer.loggers: {name}: {shorten(describe(error))}: correct the file"

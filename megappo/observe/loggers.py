"""Loggers: everything that records a run, behind six hooks. Torch-free.

The console, metrics.jsonl, run.json, the samples and the report are loggers; `trainer.loggers` adds trackers.
"""

import difflib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megappo.config.config_error import shorten
from megappo.errors import ActionableError, own_command
from megappo.observe.health import Finding, Unhealthy
from megappo.runtime.interruption import Interrupted
from megappo.table import Table, resolved
from megappo.user_modules import import_file, share_all

PROJECT = "megappo"
"""Project or experiment of a tracker, unless its environment variable names another."""


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


def _own_class(name: str) -> type[Logger]:
    """Return the class of a value FILE.py:CLASS."""
    file, _, attribute = name.rpartition(":")
    found = getattr(import_file(str(Path(file).resolve())), attribute)
    share_all()
    if not issubclass(found, Logger):
        raise TypeError(f"{attribute} is no subclass of {Logger.__module__}.Logger")
    return found


def logger_errors(names: Sequence[str]) -> Iterator[str]:
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
            yield f"trainer.loggers: there is no logger {shorten(repr(name))}: {advice}"
        else:
            try:
                _own_class(name)
            except (Exception, SystemExit) as error:
                yield f"trainer.loggers: {name}: {shorten(describe(error))}: correct the file"

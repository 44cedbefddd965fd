"""The training loop's output: rank 0's observer writes and prints, the other ranks' does nothing."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from operator import methodcaller
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from types import TracebackType

from megappo.observe.console import Console
from megappo.observe.files import HF_ACTOR, HF_CRITIC, HF_REWARD_MODEL, REPORT_FILE, kept_file
from megappo.observe.findings import Examples, LoggedMetrics, Samples
from megappo.observe.loggers import (
    NOTHING_KNOWN,
    Logger,
    Outlook,
    RunEnd,
    RunInfo,
    describe,
    make_tracker,
    replaces_steps,
)
from megappo.observe.metrics_file import MetricsFile, read_metrics
from megappo.observe.run_file import RunFile, exported_model
from megappo.observe.run_summary import summary
from megappo.observe.samples import SampleFiles, read_samples
from megappo.runtime.heartbeat import heartbeat

FAILED_CALLS = "loggers/failed_calls"
"""Metric: calls of trackers that failed, or were late, since the run started. Only a run with such a call has it."""
CALL_SECONDS = 120.0
"""Time that a run waits for a call of its trackers, also for the last one. Weights & Biases gives up a start after 90.
"""
NUM_ROLLOUTS = 16
"""Kept rollouts of a step that trackers get."""
LATE = "it has not returned in time, and is left out from now on"
Hook = Callable[[Logger], None]


class TrackerThread:
    """Calls hooks of a tracker, one after another, in a thread: a run waits for a call no longer than a limit."""

    def __init__(self, name: str, tracker: Logger) -> None:
        self._hooks: SimpleQueue[Hook] = SimpleQueue()
        self._faults: SimpleQueue[str] = SimpleQueue()
        Thread(target=self._work, args=[tracker], name=f"tracker {name}", daemon=True).start()
        self.begin = self._hooks.put

    def fault(self, deadline: float) -> str:
        """Return why the call that was begun has failed; "" if it has not, LATE after a deadline by
        `time.monotonic`."""
        with heartbeat.waiting():
            try:
                return self._faults.get(timeout=max(deadline - time.monotonic(), 0))
            except Empty:
                return LATE

    def _work(self, tracker: Logger) -> None:
        while True:
            hook = self._hooks.get()
            try:
                hook(tracker)
                self._faults.put("")
            except (Exception, SystemExit) as error:
                self._faults.put(describe(error))


class Observer(AbstractContextManager):
    """Passes what happens in a run to its loggers, and ends them when the run ends.

    A failure of the core loggers (console, metrics.jsonl, run.json, samples) is raised. A tracker or report
    that fails is reported once and counted. A tracker that hangs is left out. The run continues in both cases.
    """

    def __init__(
        self, run: RunInfo, trackers: Mapping[str, Logger] | None = None, outlook: Outlook = NOTHING_KNOWN
    ) -> None:
        """Start the loggers.

        Args:
            trackers: trackers by their names in trainer.loggers.
            outlook: has further loggers, and the monitor, which adds its metrics to each step.
        Raises:
            ConfigError: metrics.jsonl, which an earlier run left, cannot be read.
        """
        self._run = run
        self._console = Console()
        self._core: list[Logger] = [self._console, MetricsFile(), SampleFiles(), RunFile()]
        loggers = {**outlook.loggers, **(trackers or {})}
        self._trackers = {name: TrackerThread(name, logger) for name, logger in loggers.items()}
        self._failed_calls: dict[str, int] = {}
        self._has_ended = False
        self._call(lambda logger: logger.on_start(run))
        self._monitor = outlook.monitor(run)
        self._console.reads = self._monitor.reads
        for name in self._failed_calls:
            self._trackers.pop(name, None)  # without a start there is nothing to log to

    def _call(self, hook: Hook, step: int | None = None) -> None:
        """Call a hook of all loggers; one that logs a step, only of trackers that have not logged it already."""
        for logger in self._core:
            hook(logger)
        self._call_trackers(hook, step)

    def _call_trackers(self, hook: Hook, step: int | None) -> None:
        has_logged = step is not None and step <= self._run.logged_step
        called = [name for name in self._trackers if not has_logged or replaces_steps(name)]
        for name in called:
            self._trackers[name].begin(hook)
        deadline = time.monotonic() + CALL_SECONDS
        for name in called:
            if not (fault := self._trackers[name].fault(deadline)):
                continue
            self._failed_calls[name] = self._failed_calls.get(name, 0) + 1
            if fault == LATE:
                del self._trackers[name]
            if fault == LATE or self._failed_calls[name] == 1:
                self.message(f"WARNING: the logger {name} failed, and the run continues: {fault}")

    @property
    def stop_reason(self) -> str:
        """Return why trainer.stop_on ends the run; "" if it does not."""
        return self._monitor.stop_reason

    def log(self, step: int, metrics: LoggedMetrics, examples: Examples = tuple) -> None:
        """Log a step once, the rollouts that were kept of it, and the findings of the run's health.

        Args:
            metrics: `timing_s/*` are this rank's, all else is of all ranks.
            examples: called if a rule begins to hold that responses help to understand.
        """
        held, findings = self._monitor.check(step, metrics, examples)
        metrics = {**metrics, **held}
        if self._failed_calls:
            metrics = {**metrics, FAILED_CALLS: sum(self._failed_calls.values())}
        self._call(lambda logger: logger.on_step(step, metrics), step)
        kept = kept_file(self._run.output_dir, step)
        if kept.is_file():
            # Read once for all trackers, within their calls: a fault must not end the run.
            read = cache(lambda: read_samples(kept)[:NUM_ROLLOUTS])
            self._call_trackers(lambda tracker: tracker.on_samples(step, read()), step)
        for finding in findings:
            self._call(methodcaller("on_finding", finding))

    def samples(self, step: int, samples: Samples) -> None:
        """Print and keep a few rollouts, each a mapping such as prompt, response, label, score."""
        if samples:
            self._call(lambda logger: logger.on_samples(step, samples), step)

    def checkpoint(self, step: int, path: Path) -> None:
        """Log a complete checkpoint of the weights after a step."""
        self._call(lambda logger: logger.on_checkpoint(step, path))

    def message(self, text: str) -> None:
        """Print a line between steps: what the run is doing now."""
        self._console.text(text)

    def end(self, end: RunEnd) -> None:
        """End the loggers; a second call does nothing. After the last step: write report.html, and print where
        everything is and what the run achieved."""
        if self._has_ended:
            return
        self._has_ended = True
        self._call(lambda logger: logger.on_end(end))
        if end.status == "finished":
            folder = self._run.output_dir
            self.message(summary(folder, read_metrics(folder), folder / REPORT_FILE))
            exported = exported_model(folder)
            uses = {
                HF_ACTOR: "try the model: megappo serve ",
                HF_CRITIC: "start PPO from it: critic.model_path=",
                HF_REWARD_MODEL: "score by it: reward_model.model_path=",
            }
            self.message("finished" if exported is None else f"finished; to {uses[exported.name]}{exported}")

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the loggers of a run that this error ended."""
        self.end(RunEnd.by(error))


class NullObserver(AbstractContextManager):
    """Null object with the methods of Observer, for the ranks that stay silent."""

    stop_reason = ""

    def _do_nothing(self, *args: object) -> None:
        """Do nothing."""

    log = samples = checkpoint = message = end = __exit__ = _do_nothing


def open_observer(
    run: RunInfo | None, trackers: Sequence[str], outlook: Outlook, lines: Iterable[str], cleanup: ExitStack
) -> Observer | NullObserver:
    """Return the observer of a rank, after it has printed the lines that are not empty.

    Args:
        run: None on a rank that stays silent.
        trackers: names, as in trainer.loggers.
        outlook: has the monitor and further loggers.
        cleanup: ends the observer, with the error that ends the run.
    """
    observer = (
        NullObserver() if run is None else Observer(run, {name: make_tracker(name) for name in trackers}, outlook)
    )
    cleanup.enter_context(observer)
    for line in filter(None, lines):
        observer.message(line)
    return observer

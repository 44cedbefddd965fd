"""The end of a run before its last step, as its launcher sees it: where it resumes and what is lost; and its log where
the ranks were ended before they could write it, by Ctrl-C or because they were killed."""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megappo.checkpoint.folders import checkpoints_in, place_of, step_of
from megappo.config.config_error import ConfigError, counted
from megappo.config.loading import read_values
from megappo.lab.report.report import write_report
from megappo.observe.files import CHECKPOINTS
from megappo.observe.loggers import RunEnd
from megappo.observe.metrics_file import read_metrics
from megappo.observe.run_file import RUN_FILE, RUNNING, read_run, write_end
from megappo.preflight.folder_lock import in_use


class Ending(NamedTuple):
    """End of a run.

    Attributes:
        account: text that names where the run resumes, and what is lost.
        reason: why it was interrupted; "" if it was not, or has not noted it.
        has_trained: it has begun, and has finished or saved a step, now or earlier.
    """

    account: str
    reason: str
    has_trained: bool


def ending_of(arguments: Sequence[str], started: float) -> Ending | None:
    """Return the end of the run with these arguments of megappo.train, from the files in its folder.

    Args:
        started: seconds since 1970 when the ranks were started. A run that was refused has written no run.json since.
    Returns:
        None for a run that trains nothing, or whose config cannot be read.
    """
    try:
        folder = _run_folder(arguments)
        if folder is None:
            return None
        steps = read_metrics(folder)
    except ConfigError:
        return None
    try:
        run = read_run(folder)
        reason = run["message"] if run["status"] == "interrupted" else ""
    except ConfigError:  # a damaged run.json
        reason = ""
    num_done = steps[-1]["step"] if steps else 0
    checkpoints = checkpoints_in(folder / CHECKPOINTS)
    has_trained = _has_begun(folder, started) and bool(num_done or checkpoints)
    return Ending(_account(checkpoints, num_done), reason, has_trained)


def end_abandoned_run(arguments: Sequence[str], started: float, code: int) -> None:
    """Log the end of a run in run.json and its report, unless the run has done so, or another one has its folder.

    Args:
        arguments, started: as for `ending_of`.
        code: the launcher's exit code: 128 + n after signal n.
    """
    try:
        folder = _run_folder(arguments)
        if folder is None or not _has_begun(folder, started):
            return
        if read_run(folder)["status"] == RUNNING and not in_use(folder):
            end = RunEnd("failed", f"a rank ended without an error message (exit code {code}): see the run's output")
            if code - 128 in set(signal.Signals):
                end = RunEnd("interrupted", f"ended by {signal.Signals(code - 128).name}")
            write_end(folder, end)
            write_report(folder)
    except Exception as error:  # the run has ended for a reason of its own, which must stay its exit code
        print(f"WARNING: the report of the run was not written: {type(error).__name__}: {error}", file=sys.stderr)


def _run_folder(arguments: Sequence[str]) -> Path | None:
    """Return the output folder of the run with these arguments of megappo.train; None for one that trains nothing.

    Raises:
        ConfigError: the config cannot be read.
    """
    configs = [word for word in arguments if "=" not in word]
    if not configs:
        return None
    trainer = read_values(Path(configs[0]), [word for word in arguments if "=" in word]).get("trainer")
    if not isinstance(trainer, dict) or "output_dir" not in trainer or trainer.get("eval_only"):
        return None
    return Path(str(trainer["output_dir"])).expanduser()


def _has_begun(folder: Path, started: float) -> bool:
    """Return whether the run in a folder has written its run.json since `started`: one that is refused does not."""
    file = folder / RUN_FILE
    return file.is_file() and file.stat().st_mtime >= started


def _account(checkpoints: Sequence[Path], num_done: int) -> str:
    if not checkpoints:
        lost = f"no checkpoint yet; {counted(num_done, 'step')} lost"
        return lost if num_done else "before the first step; nothing is lost"
    place = place_of(checkpoints[-1])
    num_lost = num_done - step_of(checkpoints[-1])
    return f"resumes {place}; {counted(num_lost, 'step')} lost" if num_lost > 0 else f"resumes {place}; nothing is lost"

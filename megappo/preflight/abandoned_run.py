"""The end of a run whose ranks were ended before they could log it: by Ctrl-C, or because they were killed."""

import signal
import sys
from collections.abc import Sequence

from megappo.observe.loggers import RunEnd
from megappo.observe.report import write_report
from megappo.observe.run_file import RUNNING, read_run, write_end
from megappo.preflight.ending import has_begun, run_folder
from megappo.preflight.output_folder import in_use


def end_abandoned_run(words: Sequence[str], started: float, code: int) -> None:
    """Log the end of a run in run.json and its report, unless the run has done so, or another one has its folder.

    Args:
        words, started: as for `ending_of`.
        code: the launcher's exit code: 128 + n after signal n.
    """
    try:
        folder = run_folder(words)
        if folder is None or not has_begun(folder, started):
            return
        if read_run(folder).get("status") == RUNNING and not in_use(folder):
            write_end(folder, _end(code))
            write_report(folder)
    except Exception as error:  # the run has ended for a reason of its own, which must stay its exit code
        print(f"WARNING: the report of the run was not written: {type(error).__name__}: {error}", file=sys.stderr)


def _end(code: int) -> RunEnd:
    if code - 128 in set(signal.Signals):
        return RunEnd("interrupted", f"ended by {signal.Signals(code - 128).name}")
    return RunEnd("failed", f"a rank ended without an error message (exit code {code}): see the run's output")

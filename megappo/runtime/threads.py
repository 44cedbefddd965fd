"""Background threads: one that an exception ends is reported, and counted. The standard library alone."""

import sys
import threading
import traceback

FAILED: list[str] = []
"""Names of the threads of this process that an exception has ended, ours and those of libraries."""


def report_failures(process: str) -> None:
    """From now on report each thread of this process that an exception ends, in one line on stderr.

    Args:
        process: what to call this one, such as "rank 3".
    """

    def report(ended: threading.ExceptHookArgs) -> None:
        if ended.exc_type is SystemExit:  # a thread's way to end, for Python's own hook, too
            return
        name = getattr(ended.thread, "name", "that is gone")
        FAILED.append(name)
        frame = traceback.extract_tb(ended.exc_traceback)[-1]
        print(
            f"WARNING ({process}): the background thread {name} ended, and its work is no longer done: "
            f"{ended.exc_type.__name__}: {ended.exc_value} ({frame.filename} line {frame.lineno}); see 'background "
            "thread' in docs/troubleshooting.md",
            file=sys.stderr,
            flush=True,
        )

    threading.excepthook = report

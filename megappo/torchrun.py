"""torchrun, but quiet: where a rank has said why it failed, torchrun's own report and traceback would only hide that.

usage: python -m megappo.torchrun TORCHRUN_ARGUMENTS
"""

import logging
import os
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main as torchrun

LOGGERS = ("multiprocessing.api", "multiprocessing.errors.error_handler", "agent.server.api")
"""They tell of each process they end, and of files they pass on."""


def main() -> int:
    """Run torchrun; its exit code: the first failed rank's, or 128 + n when signal n ended torchrun."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, with a warning
    for name in LOGGERS:
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    try:
        torchrun(sys.argv[1:])
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            _report_killed(rank, failure)
        return max(1, error.get_first_failure()[1].exitcode)
    except SignalException as error:
        print(f"ended by {error.sigval.name}", file=sys.stderr)
        return 128 + error.sigval
    return 0


def _report_killed(rank: int, failure: ProcessFailure) -> None:
    """A killed rank could not say anything; those that torchrun ended in its wake need not."""
    if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
        hint = ": the machine may be out of memory (see dmesg)" if failure.exitcode == -signal.SIGKILL else ""
        print(f"error: rank {rank} (pid {failure.pid}) was ended by {failure.signal_name()}{hint}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

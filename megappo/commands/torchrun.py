"""torchrun without its own reports: they would hide the error message of the rank that failed.

It reports how ranks and nodes ended that could not report it themselves. Its stores listen on the address by which they
are reached, not on all interfaces.

usage: .venv/bin/python -m megappo.torchrun TORCHRUN_ARGUMENTS
"""

import argparse
import logging
import os
import shlex
import sys
import time

from megappo.runtime.interruption import COMMAND, EXIT_AGAIN, EXIT_LOST_RANK, end_at_once
from megappo.runtime.status import STATUS

if __name__ == "__main__":
    STATUS.start("imports of the launcher", writes_heartbeats=False)
    end_at_once()  # importing torch takes seconds, and other nodes may be waited for
    # torch reads it as it is imported; a store that is gone would be pages of warnings.
    has_log_level = "TORCH_CPP_LOG_LEVEL" in os.environ
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher import api
from torch.distributed.run import parse_args, parse_min_max_nnodes, run

from megappo.errors import EXIT_CONFIG, EXIT_UNHEALTHY
from megappo.runtime import platform
from megappo.runtime.failure import report_failed_threads
from megappo.runtime.launcher import Agent, OtherNodeError, StartAgain
from megappo.runtime.listening import LOOPBACK, bind_stores, head_address, stay_on_this_node
from megappo.table import resolved

LOGGERS = ("multiprocessing.api", "multiprocessing.errors.error_handler", "agent.server.api")
"""Loggers that report each process they end, and the files they pass on."""
ENDING_OF, END_RUN = "megappo.lab.report.ending:ending_of", "megappo.lab.report.ending:end_abandoned_run"
"""Imported at the end of a run that has not finished: they read configs."""
RUNS = ("megappo.train", "megappo.sft", "megappo.reward_model")
"""Modules whose ranks are the ranks of a run."""
GRACE_SECONDS = 5
"""Seconds that a rank of megappo.train may take to save and exit; others, which may have to clean up, torchrun's 30."""
STARTED = time.time()


def main() -> int:
    """Run torchrun and return its exit code: the first failed rank's, 75 when the ranks have saved all and are to be
    started again, or 128 + n when signal n ended torchrun."""
    for name in LOGGERS:
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    report_failed_threads("launcher")
    platform.raise_open_file_limit()
    bind_stores()
    api.LocalElasticAgent = Agent
    args = prepared(parse_args(sys.argv[1:]))
    several_nodes = parse_min_max_nnodes(args.nnodes)[1] > 1
    if several_nodes and (args.standalone or args.max_restarts):
        remedy = "unset PET_NNODES and PET_MAX_RESTARTS, or start every node by launch/torchrun_node.sh"
        conflict = f"--standalone and --max-restarts are for one node, and --nnodes is {args.nnodes}"
        print(f"error: {conflict}: {remedy}", file=sys.stderr)
        return 2
    platform.share_cores(args.nproc_per_node)
    platform.keep_freed_memory()
    code = _run_ranks(args)
    if code not in (0, EXIT_CONFIG) and _heads_run(args):
        resolved(END_RUN)(args.training_script_args, STARTED, code)
    return code


def _run_ranks(args: argparse.Namespace) -> int:
    """Run the ranks to their end, and return the exit code."""
    try:
        run(args)
    except ChildFailedError as error:
        code = next(iter(error.failures.values())).exitcode
        if code != EXIT_CONFIG:
            _print_ending(args, "", is_saved=code == EXIT_UNHEALTHY)
        return code if code > 0 and code != EXIT_LOST_RANK else 1
    except SignalException as error:
        _print_ending(args, error.sigval.name)
        return 128 + error.sigval
    except StartAgain as error:
        _print_ending(args, str(error), is_saved=True)
        return EXIT_AGAIN
    except OtherNodeError as error:
        print(f"error: {error}", file=sys.stderr)
        _print_ending(args, "")
        return 1
    except (DistError, RendezvousError, OSError) as error:
        head = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}"
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        first_line = str(cause).partition("\n")[0]
        place = f"node {args.node_rank} of {args.nnodes}, head {head}"
        print(f"error: {place}: rendezvous failed: {first_line}", file=sys.stderr)
        return 1
    return 0


def prepared(args: argparse.Namespace) -> argparse.Namespace:
    """Return torchrun's arguments, with this program's defaults where the user sets nothing."""
    if args.standalone or parse_min_max_nnodes(args.nnodes)[1] == 1:
        args.local_addr = args.local_addr or LOOPBACK
        stay_on_this_node()
    elif args.node_rank == 0:
        args.master_addr = head_address(args.master_addr)
    if not args.module:
        os.environ.pop("PYTHONSAFEPATH", None)  # scripts find their neighbours
    if args.training_script in RUNS:
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE_SECONDS))
        Agent.ranks_can_save = True
    if not args.log_dir and (args.redirects, args.tee, args.local_ranks_filter) == ("0", "0", ""):
        args.log_dir = os.devnull  # else a folder for the ranks' error files, which nobody reads or removes
    args.signals_to_handle = ""  # the agent handles the signals that end a run; torchrun's handlers would raise
    return args


def _heads_run(args: argparse.Namespace) -> bool:
    """Return whether this is the launcher of a run on its head node."""
    return args.training_script in RUNS and args.node_rank == 0


def _print_ending(args: argparse.Namespace, signal: str, *, is_saved: bool = False) -> None:
    """Print the last line of a run that has not finished: what happened, what is lost, and the command that resumes it.

    Args:
        signal: name of the one that ended this launcher; "" if none did.
        is_saved: the ranks have saved what they had.
    """
    ending = resolved(ENDING_OF)(args.training_script_args, STARTED) if _heads_run(args) else None
    if ending is None:
        saved = ": start it again to resume" if is_saved else ""
        if signal:
            print(f"ended by {signal}{saved}", file=sys.stderr)
        return
    reason = signal or (ending.reason or "a signal" if is_saved else "")
    if not reason and not ending.has_trained:
        return  # the error has been reported, and nothing is lost
    what = f"ended by {reason}" if reason else "the run failed"
    command = os.environ.get(COMMAND) or shlex.join([sys.executable, "-m", "megappo.torchrun", *sys.argv[1:]])
    print(f"{what}: {ending.account}. To resume: {command}", file=sys.stderr)


if __name__ == "__main__":
    if not has_log_level:
        del os.environ["TORCH_CPP_LOG_LEVEL"]  # the ranks' warnings may be about anything
    code = main()
    STATUS.stop()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that talk to the store would abort an interpreter that ends its own way

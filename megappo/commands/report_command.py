"""`megappo report` and `megappo compare`: a page of one run, or of several. Nothing heavy is imported before the
arguments are known to be right."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megappo.observe.files import no_run
from megappo.observe.metrics_file import METRICS_FILE
from megappo.table import resolved


def report(arguments: Sequence[str]) -> int:
    """Write report.html of a run again; return the process's exit code."""
    parser = argparse.ArgumentParser(prog="megappo report", description="Write report.html of a run again.")
    parser.add_argument("run", type=Path, metavar="RUN", help="output folder of a run")
    args = parser.parse_args(arguments)
    _check_runs(parser, [args.run])
    print(f"wrote {resolved('megappo.lab.report.report:write_report')(args.run)}")
    return 0


def compare(arguments: Sequence[str]) -> int:
    """Write one page of several runs; return the process's exit code."""
    description = "Write one page that overlays several runs. Runs that differ only in their seed become a band."
    example = "example: megappo compare outputs/ppo outputs/grpo --output ppo_grpo.html"
    parser = argparse.ArgumentParser(prog="megappo compare", description=description, epilog=example)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="output folders of runs")
    parser.add_argument("--output", type=Path, default=Path("compare.html"), help="default: compare.html")
    args = parser.parse_args(arguments)
    _check_runs(parser, args.runs)
    if len(args.runs) < 2:
        parser.error("expected two runs or more; for one: megappo report RUN")
    folder = args.output.absolute().parent
    if not folder.is_dir():
        parser.error(f"--output: there is no folder {folder}: create it, or choose another one")
    print(f"wrote {resolved('megappo.lab.report.report:write_comparison')(args.runs, args.output)}")
    return 0


def _check_runs(parser: argparse.ArgumentParser, folders: Sequence[Path]) -> None:
    """End the process with a message unless these are the folders of runs."""
    for folder in folders:
        if not (folder / METRICS_FILE).is_file():
            parser.error(no_run(folder, METRICS_FILE))

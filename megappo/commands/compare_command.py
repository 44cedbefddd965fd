"""`megappo compare`: several runs on one page. Imports nothing heavy until the arguments are known to be right."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megappo.commands.report_command import check_runs
from megappo.table import resolved


def main(arguments: Sequence[str] | None = None) -> int:
    """Write one page of several runs; return the process's exit code."""
    description = "Write one page that overlays several runs. Runs that differ only in their seed become a band."
    example = "example: megappo compare outputs/ppo outputs/grpo --output ppo_grpo.html"
    parser = argparse.ArgumentParser(prog="megappo compare", description=description, epilog=example)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="output folders of runs")
    parser.add_argument("--output", type=Path, default=Path("compare.html"), help="default: compare.html")
    args = parser.parse_args(arguments)
    if len(args.runs) < 2:
        parser.error("expected two runs or more; for one: megappo report RUN")
    check_runs(parser, args.runs)
    folder = args.output.absolute().parent
    if not folder.is_dir():
        parser.error(f"--output: there is no folder {folder}: create it, or choose another one")
    print(f"wrote {resolved('megappo.lab.report.report:write_comparison')(args.runs, args.output)}")
    return 0

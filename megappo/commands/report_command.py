"""`megappo report`: write a run's report again. Imports nothing heavy until the arguments are known to be right."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megappo.observe.files import no_run
from megappo.observe.metrics_file import METRICS_FILE
from megappo.table import resolved


def main(arguments: Sequence[str] | None = None) -> int:
    """Write report.html of a run again; return the process's exit code."""
    parser = argparse.ArgumentParser(prog="megappo report", description="Write report.html of a run again.")
    parser.add_argument("run", type=Path, metavar="RUN", help="output folder of a run")
    args = parser.parse_args(arguments)
    check_runs(parser, [args.run])
    print(f"wrote {resolved('megappo.lab.report.report:write_report')(args.run)}")
    return 0


def check_runs(parser: argparse.ArgumentParser, folders: Sequence[Path]) -> None:
    """End the process with a message unless these are the folders of runs."""
    for folder in folders:
        if not (folder / METRICS_FILE).is_file():
            parser.error(no_run(folder, METRICS_FILE))

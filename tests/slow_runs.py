"""Run the slow tests file by file, and record each file's results in slow_runs.csv.

    bash launch/test.sh --all                    # the suite, then all of them
    .venv/bin/python tests/slow_runs.py FILE ... # these files
    .venv/bin/python tests/slow_runs.py --list   # when each file last ran

All of them take hours. Started again, it skips files that have passed on this commit, so it can be interrupted.
"""

import argparse
import csv
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("slow_runs.csv")
COLUMNS = ("file", "commit", "date", "passed", "failed", "skipped", "minutes")
NOTHING_COLLECTED = 5  # pytest's exit code

Result = dict[str, str]


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def state() -> str:
    """Return the commit of the working tree, with a + if something but the table has changed."""
    changes = git("status", "--porcelain", "--", ".", f":!{TABLE.relative_to(ROOT)}")
    return git("rev-parse", "--short=10", "HEAD") + "+" * bool(changes)


def read_table() -> dict[str, Result]:
    if not TABLE.exists():
        return {}
    with TABLE.open(newline="") as file:
        return {row["file"]: row for row in csv.DictReader(file)}


def write_table(results: dict[str, Result]) -> None:
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(results[name] for name in sorted(results))


def files_with_slow_tests() -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "slow", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: pytest could not collect the slow tests:\n{done.stdout}")
    return sorted({line.split("::")[0] for line in done.stdout.splitlines() if "::" in line})


def run(name: str, commit: str) -> Result | None:
    """Run the slow tests of a file; return None if it has none."""
    with tempfile.TemporaryDirectory() as folder:
        report, start = Path(folder, "results.xml"), time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "-n", "2", "--dist", "loadgroup", name]
        code = subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT).returncode
        if code == NOTHING_COLLECTED:
            return None
        if not report.exists():
            raise SystemExit(f"error: pytest ended with exit code {code} and without results; its output is above")
        counts = ElementTree.parse(report).getroot().find("testsuite").attrib
    failed, skipped = int(counts["failures"]) + int(counts["errors"]), int(counts["skipped"])
    numbers = (int(counts["tests"]) - failed - skipped, failed, skipped, f"{(time.monotonic() - start) / 60:.1f}")
    return dict(zip(COLUMNS, map(str, (name, commit, date.today(), *numbers)), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="relative to the repository (default: all)")
    parser.add_argument("--list", action="store_true", help="print the table, oldest results first")
    args = parser.parse_args()
    results, commit = read_table(), state()
    if args.list:
        for row in sorted(results.values(), key=lambda row: row["date"]):
            print("  ".join(f"{row[column]:<10}" for column in reversed(COLUMNS)))
        return
    names = args.files or files_with_slow_tests()
    for number, name in enumerate(names, 1):
        known = results.get(name)
        if known and known["commit"] == commit and known["failed"] == "0" and not commit.endswith("+"):
            print(f"slow tests, {number}/{len(names)}: {name} has passed on {commit}", flush=True)
            continue
        print(f"slow tests, {number}/{len(names)}: {name}", flush=True)
        if result := run(name, commit):
            results[name] = result
            write_table(results)
    failed = [name for name in names if name in results and results[name]["failed"] != "0"]
    sys.exit(f"error: slow tests failed in {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()

"""Run the benchmarks that measure ratios, one after the other, and write a table for this machine's processor.

    .venv/bin/python tools/bench/all.py
    .venv/bin/python tools/bench/all.py --only gae balance

Writes Markdown and the same rows as JSON; rows measured on other processors stay. Each ratio comes from a single run,
but the machine should be idle: other load slows the two sides of a ratio differently, and threads spin while they wait.
Takes 20 to 45 minutes.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from child_run import run_child
from timed import Row, markdown

HERE = Path(__file__).parent
DISTRIBUTIONS = ("torch", "megatron-core", "sglang")


@dataclass(frozen=True)
class Benchmark:
    """A script of this folder that writes its rows to the file given by --json.

    Attributes:
        ranks: number of ranks that megappo.torchrun starts, as in a run; 0 runs the script as a plain process.
    """

    script: str
    arguments: tuple[str, ...] = ()
    ranks: int = 0


BENCHMARKS = {
    "gae": Benchmark("gae.py", ranks=1),
    "balance": Benchmark("balance.py"),
    "groups": Benchmark("groups.py"),
    "groups over gloo": Benchmark("groups.py", ("--processes", "16")),
    "exchange": Benchmark("exchange.py"),
    "sync": Benchmark("sync.py"),
    "update": Benchmark("update.py", ranks=1),
    "head": Benchmark("head.py"),
    "step": Benchmark("step.py"),
    "rewards": Benchmark("rewards.py"),
    "agents": Benchmark("agents.py"),
    "rollout": Benchmark("rollout.py", ("--repeats", "3")),
    "data": Benchmark("data.py"),
    "ahead": Benchmark("ahead.py"),
    "overlap": Benchmark("overlap.py"),
}


def run(benchmark: Benchmark) -> list[Row]:
    """Run a benchmark in a process of its own and return its rows."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        torchrun = ["-m", "megappo.torchrun", "--nproc-per-node", str(benchmark.ranks)] if benchmark.ranks else []
        command = [sys.executable, *torchrun, HERE / benchmark.script, *benchmark.arguments, "--json", file]
        variables = os.environ | {"CUDA_VISIBLE_DEVICES": ""}  # else megappo.torchrun has ranks do as on GPUs
        run_child(command, check=True, stdout=subprocess.DEVNULL, cwd=HERE.parents[1], env=variables)
        return [Row(**row) for row in json.loads(file.read_text())]


def machine() -> dict[str, str]:
    """Return the commit, the machine and the versions behind the figures."""
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, check=True, capture_output=True, text=True, cwd=HERE).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "commit": commit,
        "measured": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "processor": f"{os.cpu_count()} cores, {names[0] if names else platform.machine()}",
        "memory": f"{memory:.0f} GiB",
        "load": f"{os.getloadavg()[1]:.1f} in the five minutes before",
        **{name: version(name) for name in DISTRIBUTIONS},
    }


def page(measured: list[dict]) -> str:
    """Return the page with the results, one section per processor."""
    lines = [
        "# Benchmarks",
        "",
        "Each row compares a measurement with an anchor of the same run: a ratio of medians of alternating calls. The",
        "seconds are from one machine. If other processes used its cores (see the load), measurements with",
        "several threads are too low. `tools/bench/all.py` writes this page, a table per processor; with `--only` it",
        "runs some of the benchmarks and writes nothing.",
    ]
    for one in measured:
        facts = [f"- {name}: {value}" for name, value in one["machine"].items() if name != "processor"]
        rows = markdown([Row(**row) for row in one["rows"]])
        lines += ["", f"## {one['machine']['processor']}", "", *facts, "", rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, help="these; nothing is written then")
    parser.add_argument(
        "--output", type=Path, default=HERE.parents[1] / "docs" / "benchmarks.md", help="the page (default %(default)s)"
    )
    parser.add_argument(
        "--json", type=Path, default=HERE / "benchmarks.json", metavar="FILE", help="the same (default %(default)s)"
    )
    args = parser.parse_args()
    place, rows = machine(), []
    for name in args.only or BENCHMARKS:
        print(f"\n{name}", flush=True)
        rows += (found := run(BENCHMARKS[name]))
        print(markdown(found), flush=True)  # at once: what comes later may fail
    if not args.only:
        kept = json.loads(args.json.read_text()) if args.json.exists() else []
        measured = {one["machine"]["processor"]: one for one in kept}
        measured[place["processor"]] = {"machine": place, "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(list(measured.values()), indent=2) + "\n")
        args.output.write_text(page(list(measured.values())))


if __name__ == "__main__":
    main()

"""Run stages on this machine, each within its own limit, and keep what each prints: JSON and a log.

    .venv-gpu/bin/python tests/gpu/kit/run.py [--seconds N] [--output FOLDER] [STAGE ...]

Without names all stages run, those first that tell most. A stage that fails or takes too long does not stop the next
one. Exit code 1 if any did. FOLDER/results.json has everything; report.py makes tables of it.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
OUTPUT = REPOSITORY / "outputs" / "gpu-kit" / "results"
DOCTOR = ["-m", "megappo.doctor", "packages", "gpus", "collectives", "attention", "handles"]
STAGES: dict[str, tuple[list[str], int]] = {
    "doctor": (DOCTOR, 90),
    "group": (["tests/gpu/stages/group.py"], 120),
    "quickstart": (["tests/gpu/stages/quickstart.py"], 300),
    "whole_run_te": (["tests/gpu/stages/whole_run.py", "transformer_engine"], 240),
    "whole_run_torch": (["tests/gpu/stages/whole_run.py", "torch"], 240),
    "syncs": (["tests/gpu/stages/syncs.py"], 300),
    "heads": (["tests/gpu/stages/heads.py"], 240),
    "offload": (["tests/gpu/stages/offload.py"], 240),
    "attention": (["tests/gpu/stages/attention.py"], 300),
    "ipc": (["tests/gpu/stages/ipc.py"], 300),
    "export": (["tests/gpu/stages/export.py"], 240),
    "models": (["tests/gpu/stages/models.py"], 600),
    "checkpoint": (["tests/gpu/stages/checkpoint.py"], 300),
}
"""Arguments of Python, and seconds at full size."""
VARIABLES = {
    "OMP_NUM_THREADS": "1",  # as the launcher sets it on GPUs
    "PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK": "1",  # the target's cuDNN may be older than the one torch was built with
}
LEAST_SECONDS = 10
"""No stage is started with less time."""


def run_stage(name: str, folder: Path, limit: float) -> dict:
    """Run a stage in a session of its own, whose processes end with it; return its result."""
    arguments, seconds = STAGES[name]
    variables = VARIABLES | os.environ | {"STAGE_OUTPUT": str(folder), "OUT": str(folder)}
    command = [sys.executable, *arguments]
    started = time.monotonic()
    with (folder / f"{name}.json").open("w+") as output, (folder / f"{name}.log").open("w") as log:
        settings = {"cwd": REPOSITORY, "env": variables, "start_new_session": True}
        process = subprocess.Popen(command, stdout=output, stderr=log, **settings)
        try:
            code = process.wait(min(seconds, limit))
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            end_session(process)
        output.seek(0)
        printed = output.read()
    result = {"stage": name, "rc": code, "seconds": round(time.monotonic() - started, 1)}
    try:
        return result | {"figures": json.loads(printed)}
    except ValueError:  # the doctor's lines, or what a stage printed before it failed
        return result | {"printed": printed[-4000:]}


def end_session(process: subprocess.Popen) -> None:
    """End the processes that a stage left: first as Ctrl-C does, so that runs end their engines, then at once."""
    for number, patience in ((signal.SIGINT, 10), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def commit() -> str:
    """Return the commit of the working tree."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)} (default: all)")
    parser.add_argument("--seconds", type=float, default=600, help="for all stages together (default: 600)")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder (default: outputs/gpu-kit/results)")
    args = parser.parse_args()
    if unknown := set(args.stages) - STAGES.keys():
        parser.error(f"no stage {', '.join(sorted(unknown))}: choose from {', '.join(STAGES)}")
    folder = args.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    deadline, results = time.monotonic() + args.seconds, []
    for name in args.stages or STAGES:
        remaining = deadline - time.monotonic()
        if remaining < LEAST_SECONDS:
            print(f"{name}: not run, no time is left", flush=True)
            continue
        result = run_stage(name, folder, remaining)
        outcome = "passed" if result["rc"] == 0 else f"FAILED with exit code {result['rc']}, see {folder}/{name}.log"
        print(f"{name}: {outcome}, {result['seconds']} s", flush=True)
        results.append(result)
        found = {"commit": commit(), "date": date.today().isoformat(), "stages": results}
        (folder / "results.json").write_text(json.dumps(found, indent=1))
    return int(any(result["rc"] for result in results))


if __name__ == "__main__":
    sys.exit(main())

"""Run stages on this machine, each with a time limit of its own, and keep their results and logs.

    .venv-gpu/bin/python tests/gpu/kit/run.py [--seconds N] [--output FOLDER] [STAGE ...]

Without names all stages run, the most informative first. A stage that fails or exceeds its limit does not stop the next
one; the exit code is 1 then. FOLDER/results.json has all results; report.py prints them as tables.
"""

import argparse
import contextlib
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
DOCTOR = ["-m", "megappo.doctor", "packages", "gpus", "collectives", "attention"]
WHOLE_RUN = "tests/gpu/stages/whole_run.py"
STAGES: dict[str, tuple[list[str], int]] = {
    "doctor": (DOCTOR, 90),
    "group": (["tests/gpu/stages/group.py"], 120),
    "quickstart": (["tests/gpu/stages/quickstart.py"], 300),
    "whole_run_te": ([WHOLE_RUN, "whole_run_te", "qwen3", "bf16", "model.layer_spec=transformer_engine"], 240),
    "whole_run_torch": ([WHOLE_RUN, "whole_run_torch", "qwen3", "bf16", "model.layer_spec=torch"], 240),
    "whole_run_moe": ([WHOLE_RUN, "whole_run_moe", "qwen3_moe", "bf16"], 240),
    "whole_run_replay": ([WHOLE_RUN, "whole_run_replay", "qwen3_moe", "bf16", "rollout.routing_replay=true"], 240),
    "whole_run_gpt_oss": ([WHOLE_RUN, "whole_run_gpt_oss", "gpt_oss", "bf16"], 240),
    "whole_run_gemma4": ([WHOLE_RUN, "whole_run_gemma4", "gemma4_text", "bf16"], 240),
    "whole_run_linear": ([WHOLE_RUN, "whole_run_linear", "qwen3_next", "bf16"], 240),
    "whole_run_fp8": ([WHOLE_RUN, "whole_run_fp8", "qwen3", "fp8"], 240),
    "rlhf": (["tests/gpu/stages/rlhf.py"], 300),
    "ahead": (["tests/gpu/stages/ahead.py"], 240),
    "syncs": (["tests/gpu/stages/syncs.py"], 300),
    "heads": (["tests/gpu/stages/heads.py"], 240),
    "activations": (["tests/gpu/stages/activations.py"], 120),
    "offload": (["tests/gpu/stages/offload.py"], 240),
    "attention": (["tests/gpu/stages/attention.py"], 300),
    "ipc": (["tests/gpu/stages/ipc.py"], 300),
    "export": (["tests/gpu/stages/export.py"], 240),
    "models": (["tests/gpu/stages/models.py"], 600),
    "training": (["tests/gpu/stages/training.py"], 300),
    "checkpoint": (["tests/gpu/stages/checkpoint.py"], 300),
}
"""Stage -> Python's arguments, and the limit in seconds."""
VARIABLES = {
    "OMP_NUM_THREADS": "1",  # as the launcher sets it on GPUs
    "PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK": "1",  # the target's cuDNN may be older than torch's
}
PATIENCE_SECONDS = 10
LEAST_SECONDS = 10
"""A stage is not started with less time than this."""


def run_stage(name: str, folder: Path, limit: float) -> dict:
    """Run a stage in a session of its own, end all of its processes, and return the result."""
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
    except ValueError:  # the doctor's text, or the output of a stage that failed
        return result | {"printed": printed[-4000:]}


def end_session(process: subprocess.Popen) -> None:
    """End a stage's remaining processes: first as Ctrl-C does, so that runs end their engines, then by a kill."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(PATIENCE_SECONDS)


def commit() -> str:
    """Return the commit of the working tree, with -dirty behind it where files differ from it."""
    command = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)} (default: all)")
    parser.add_argument("--seconds", type=float, default=600, help="for all stages together (default: 600)")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder (default: outputs/gpu-kit/results)")
    args = parser.parse_args()
    if unknown := set(args.stages) - STAGES.keys():
        parser.error(f"no stage {', '.join(sorted(unknown))}: choose from {', '.join(STAGES)}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the stage at work, too
    folder = args.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    deadline, results = time.monotonic() + args.seconds, []
    for name in args.stages or STAGES:
        remaining = deadline - time.monotonic()
        if remaining < LEAST_SECONDS:
            print(f"{name}: not run, no time remains", flush=True)
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

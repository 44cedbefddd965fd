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

from report import lines

REPOSITORY = Path(__file__).resolve().parents[3]
OUTPUT = REPOSITORY / "outputs" / "gpu-kit" / "results"
DOCTOR = ["-m", "megappo", "doctor", "packages", "megatron", "gpus", "collectives", "attention"]
Stages = dict[str, tuple[list[str], int]]
STAGE_FOLDER = "tests/gpu/stages"
LIMIT = 240


def whole_run(name: str, model_type: str, variant: str = "bf16", *keys: str) -> tuple[list[str], int]:
    """Return the command and limit of a stage of whole_run.py."""
    return [f"{STAGE_FOLDER}/whole_run.py", name, model_type, variant, *keys], LIMIT


def stage(name: str, *arguments: str, limit: int = LIMIT) -> tuple[list[str], int]:
    return [f"{STAGE_FOLDER}/{name}.py", *arguments], limit


STAGES: Stages = {
    "doctor": (DOCTOR, 120),
    "imports": stage("imports", limit=180),
    "chosen_attention": stage("chosen_attention"),
    "group": stage("group", limit=120),
    "quickstart": stage("quickstart", limit=300),
    "kernels": stage("kernels", limit=300),
    "in_flight": stage("in_flight"),
    "whole_run_te": whole_run("whole_run_te", "qwen3", "bf16", "model.layer_spec=transformer_engine"),
    "whole_run_torch": whole_run("whole_run_torch", "qwen3", "bf16", "model.layer_spec=torch"),
    "whole_run_lora": whole_run("whole_run_lora", "qwen3", "lora"),
    "whole_run_critic_lora": whole_run("whole_run_critic_lora", "qwen3", "critic_lora"),
    "whole_run_moe": whole_run("whole_run_moe", "qwen3_moe"),
    "whole_run_replay": whole_run("whole_run_replay", "qwen3_moe", "bf16", "rollout.routing_replay=true"),
    "whole_run_gemma3": whole_run("whole_run_gemma3", "gemma3_text"),
    "whole_run_mla": whole_run("whole_run_mla", "deepseek_v3"),
    "whole_run_gpt_oss": whole_run("whole_run_gpt_oss", "gpt_oss"),
    "whole_run_gemma4": whole_run("whole_run_gemma4", "gemma4_text"),
    "whole_run_linear": whole_run("whole_run_linear", "qwen3_next"),
    "whole_run_fp8": whole_run("whole_run_fp8", "qwen3", "fp8"),
    "drift": stage("drift"),
    "starts": stage("starts", limit=300),
    "rlhf": stage("rlhf", limit=300),
    "ahead_continue": stage("ahead", "continue"),
    "ahead_keep_cache": stage("ahead", "keep_cache"),
    "ahead_adapters": stage("ahead", "adapters"),
    "balancing": stage("balancing"),
    "memory": stage("memory", limit=300),
    "syncs": stage("syncs", limit=300),
    "heads": stage("heads"),
    "activations": stage("activations", limit=120),
    "offload": stage("offload"),
    "attention": stage("attention", limit=300),
    "ipc": stage("ipc", limit=300),
    "export": stage("export"),
    "models": stage("models", limit=600),
    "training": stage("training", limit=300),
    "checkpoint": stage("checkpoint", limit=300),
}
"""Stage -> Python's arguments, and the limit in seconds."""
VARIABLES = {
    "OMP_NUM_THREADS": "1",  # as the launcher sets it on GPUs
    "PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK": "1",  # the target's cuDNN may be older than torch's
}
PATIENCE_SECONDS = 10
LEAST_SECONDS = 10
"""A stage is not started with less time than this."""


def run_stage(name: str, stages: Stages, folder: Path, limit: float) -> dict:
    """Run a stage in a session of its own, end all of its processes, and return the result."""
    arguments, seconds = stages[name]
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


def main(stages: Stages = STAGES, description: str = __doc__, seconds: int = 600, *, prints_table: bool = False) -> int:
    """Run the stages that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(stages)} (default: all)")
    parser.add_argument("--seconds", type=float, default=seconds, help=f"for all stages together (default: {seconds})")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder (default: outputs/gpu-kit/results)")
    args = parser.parse_args()
    if unknown := set(args.stages) - stages.keys():
        parser.error(f"no stage {', '.join(sorted(unknown))}: choose from {', '.join(stages)}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the stage at work, too
    folder = args.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    deadline, results = time.monotonic() + args.seconds, []
    for name in args.stages or stages:
        remaining = deadline - time.monotonic()
        if remaining < LEAST_SECONDS:
            print(f"{name}: not run, no time remains", flush=True)
            continue
        result = run_stage(name, stages, folder, remaining)
        outcome = "passed" if result["rc"] == 0 else f"FAILED with exit code {result['rc']}, see {folder}/{name}.log"
        print(f"{name}: {outcome}, {result['seconds']} s", flush=True)
        results.append(result)
        found = {"commit": commit(), "date": date.today().isoformat(), "stages": results}
        (folder / "results.json").write_text(json.dumps(found, indent=1))
    if prints_table and results:
        print("\n".join(lines(found)))
    return int(any(result["rc"] for result in results))


if __name__ == "__main__":
    sys.exit(main())

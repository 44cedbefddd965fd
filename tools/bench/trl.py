"""Time GRPO steps of TRL and of megappo on one public model, on a CPU, and compare them part by part.

    .venv/bin/python tools/make_example.py smollm2 --output outputs/smollm2
    python3 -m venv outputs/trl
    outputs/trl/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    outputs/trl/bin/pip install trl==1.16.0 transformers==5.19.0
    .venv/bin/python tools/bench/trl.py --model outputs/smollm2/model --trl outputs/trl/bin/python

TRL has an environment of its own, for this comparison alone. Both train all weights in fp32 on the same prompts, with
as many rows a step, one optimizer step over all of them, no KL, the same sampling and the same number of cores; either
starts as its users start it. Responses end where the model ends them: the table has their mean length. The runs
alternate; figures are medians over all steps but the first of each run. CPU seconds are the sum over a run's processes.
They vary less than seconds if something else uses the cores, but include threads that spin while they wait.
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil
from timed import Row, parser_of, report

from megappo.observe.metrics_file import read_metrics
from megappo.runtime.keeper import die_with

HERE = Path(__file__).parent
GROUP, PROMPT = 8, 96
"""Responses to a prompt, and the most tokens of a prompt."""
MICRO_BATCH, TOKENS = 16, 1024
"""Rows of a micro-batch of TRL, and tokens of one of megappo: about as many."""
PARTS = {
    "rollout": ("rollout",),
    "old log-probs": ("old_log_probs",),
    "update": ("update_actor",),
    "weight sync": ("sync",),
}
"""Part of a step -> phases of megappo."""
LR, CLIP = 1e-6, 1.0
POLL_SECONDS = 0.05

Step = dict[str, float]
"""Seconds of a step by part, its `step`, the `cpu` seconds and the mean `length` of its responses."""


def write_prompts(file: Path, count: int) -> None:
    """Write sums of two numbers as chat messages."""
    rng = random.Random(0)
    lines = []
    for _ in range(count):
        first, second = rng.randrange(2, 100), rng.randrange(2, 100)
        question = f"What is {first} + {second}? Answer with the number alone."
        lines.append(json.dumps({"prompt": [{"role": "user", "content": question}], "label": str(first + second)}))
    file.write_text("\n".join(lines) + "\n")


def timed_run(command: Sequence[object], read: Callable[[], list[Step]], variables: Mapping[str, str]) -> list[Step]:
    """Run a command that logs its steps and return them without the first, with the CPU seconds of each.

    Args:
        read: returns the steps logged so far.
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables}
    cpu: list[float] = []
    with tempfile.TemporaryFile("w+") as log:
        end = partial(die_with, os.getpid(), signal.SIGTERM)
        words = [*map(str, command)]
        run = psutil.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=environment, preexec_fn=end)
        while run.poll() is None:
            time.sleep(POLL_SECONDS)
            if len(read()) > len(cpu):
                cpu.append(cpu_seconds(run))
        steps = read()
        if run.returncode or len(cpu) < len(steps):
            log.seek(0)
            raise SystemExit(f"{command[0]} failed:\n{log.read()[-3000:]}")
    return [step | {"cpu": cpu[i] - cpu[i - 1]} for i, step in enumerate(steps) if i]


def cpu_seconds(run: psutil.Process) -> float:
    """Return the CPU seconds of a process and its descendants that are alive."""
    total = 0.0
    for process in (run, *run.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def of_megappo(args, folder: Path) -> list[Step]:
    """Time a run of megappo."""
    output = folder / "run"
    config = {
        "model.path": args.model.resolve(),
        "model.dtype": "fp32",
        "placement": f'{{"actor": "0-{args.ranks - 1}", "rollout": "0"}}',
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": "false",
        "actor.ppo_mini_batch_size": args.rows // GROUP,
        "actor.max_tokens_per_micro_batch": TOKENS,
        "actor.optim": json.dumps({"lr": LR, "clip_grad": CLIP}),
        "rollout.n": GROUP,
        "rollout.max_response_length": args.response_length,
        "data.train_files": folder / "prompts.jsonl",
        "data.train_batch_size": args.rows // GROUP,
        "data.max_prompt_length": PROMPT,
        "reward.function": f"{HERE / 'trl_steps.py'}:scores",
        "trainer.output_dir": output,
        "trainer.total_steps": args.steps + 1,
        "trainer.save_interval": 0,
        "trainer.export_hf": "false",
        "trainer.keep_rollouts": 0,
    }
    keys = [f"{key}={value}" for key, value in config.items()]
    empty = folder / "empty.yaml"
    empty.write_text("{}\n")

    def read() -> list[Step]:
        return [parts_of(metrics) for metrics in read_metrics(output) if metrics["step"]]

    command = [sys.executable, "-m", "megappo", "train", "--nproc", args.ranks, empty, *keys]
    return timed_run(command, read, {"PYTHONPATH": str(HERE.parents[1])})


def parts_of(metrics: Mapping[str, float]) -> Step:
    """Return the seconds of the parts of a step of megappo."""
    step = {"step": metrics["timing_s/step"], "length": metrics["rollout/response_length/mean"]}
    for part, phases in PARTS.items():
        step[part] = sum(metrics.get(f"timing_s/{phase}", 0.0) for phase in phases)
    return step


def of_trl(args, folder: Path) -> list[Step]:
    """Time a run of TRL."""
    file = folder / "steps.jsonl"
    file.write_text("")
    settings = {
        "model": str(args.model.resolve()),
        "prompts": str(folder / "prompts.jsonl"),
        "output": str(folder / "trl"),
        "log": str(file),
        "rows": args.rows,
        "group": GROUP,
        "micro_batch": MICRO_BATCH,
        "response_length": args.response_length,
        "steps": args.steps + 1,
        "lr": LR,
        "clip": CLIP,
    }

    def read() -> list[Step]:
        return [json.loads(line) for line in file.read_text().splitlines()]

    # -P: this folder has a module of the name of the package.
    command = [args.trl, "-P", HERE / "trl_steps.py", json.dumps(settings)]
    return timed_run(command, read, {"OMP_NUM_THREADS": str(args.cores)})


def table(found: Mapping[str, Sequence[Step]]) -> str:
    """Return the medians of both as a Markdown table."""
    lines = ["| seconds | megappo | TRL |", "| --- | --- | --- |"]
    for part in (*PARTS, "step", "cpu", "length"):
        cells = [f"{statistics.median(step.get(part, 0.0) for step in steps):.3g}" for steps in found.values()]
        name = {"cpu": "CPU seconds of a step", "length": "response, tokens", "step": "**step**"}.get(part, part)
        lines.append(f"| {name} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__, repeats=2)
    parser.add_argument(
        "--model", type=Path, required=True, help="folder of a small Hugging Face model with a chat template"
    )
    parser.add_argument("--trl", type=Path, required=True, help="Python of the environment with TRL")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of a run (default %(default)s)")
    parser.add_argument("--rows", type=int, default=64, help="of a step (default %(default)s)")
    parser.add_argument("--cores", type=int, default=2, help="that either may use (default %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="of megappo (default %(default)s)")
    parser.add_argument("--response-length", type=int, default=32, help="at most (default %(default)s)")
    args = parser.parse_args()
    found: dict[str, list[Step]] = defaultdict(list)
    for _ in range(args.repeats):
        for name, run in {"megappo": of_megappo, "TRL": of_trl}.items():
            with tempfile.TemporaryDirectory() as folder:
                write_prompts(Path(folder, "prompts.jsonl"), args.rows // GROUP * (args.steps + 1))
                found[name] += run(args, Path(folder))
    print(table(found), end="\n\n")
    rows = []
    for kind, name in {"step": "GRPO step", "cpu": "GRPO step, CPU seconds"}.items():
        ours, theirs = (statistics.median(step[kind] for step in steps) for steps in found.values())
        rows.append(
            Row(f"{name} of {args.model.parent.name}", ours / theirs, "at most 0.8", f"TRL's, {theirs:.3g} s", ours)
        )
    report(rows, args.json)


if __name__ == "__main__":
    main()

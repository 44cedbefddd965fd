"""Time the steps of whole runs: the quickstart's overhead besides models and engines, and a larger model's utilization.

    .venv/bin/python tools/bench/step.py
    .venv/bin/python tools/bench/step.py --json FILE

Runs of megappo.train under megappo.torchrun, two ranks on a CPU, as launch/quickstart.sh and launch/local.sh start
them; figures are medians of the steps after the first.

- the quickstart's job, one thread per rank, without evaluation and checkpoints. Overhead is the part of a step outside
  rollout, forward pass, update (backward pass and optimizer) and sync: scoring, moving rows, advantages, metrics.
- a Qwen2 of 110M parameters, its actor on TP2, the critic, of the same shape, on PP2; 32 rows of about 124 tokens. The
  figure is the share of a step that its matrix products would take at peak rate, by the formulas of MFU for rollout,
  three forward passes and two updates. The peak rate is measured before the run and after it: both ranks multiply
  square matrices at the same time.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))


import torch
import yaml
from child_run import run_child
from timed import VOCABULARY, Row, on_ranks, parser_of, report, seconds, write_qwen2
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from megappo.architecture.flops import TRAINING, flops_of
from megappo.architecture.parsing import read_architecture
from megappo.observe.metrics_file import read_metrics

ROOT = Path(__file__).parents[2]
RANKS = 2
SIDE, RATE_SECONDS = 1024, 3.0
"""Size of the matrices whose products measure the peak rate, and the time spent on them."""
MODEL_WORK = {"rollout", "old_log_probs", "ref_log_probs", "values", "update_actor", "update_critic", "sync"}
PROMPT, RESPONSE, ROWS = 28, 96, 32
PASSES = {"policy": 1 + 2 + TRAINING, "value": 1 + TRAINING}
"""Head -> the forward passes that a step of the model with it is worth: what a rollout computes is one."""
LARGER = {
    "model": {"dtype": "fp32"},
    "placement": {"actor, critic": "0-1", "rollout": 0},
    "actor": {"parallel": {"tensor": 2}, "optim": {"lr": 1e-6}, "ppo_mini_batch_size": ROWS},
    "critic": {"parallel": {"pipeline": 2}, "optim": {"lr": 1e-6}, "ppo_mini_batch_size": ROWS},
    "rollout": {"n": 1, "max_response_length": RESPONSE},
    "data": {"train_batch_size": ROWS, "max_prompt_length": PROMPT},
}


def steps_of(config: Path, output: Path, *overrides: str, **variables: str) -> list[Mapping[str, float]]:
    """Return the metrics of a run's steps, without the first.

    Args:
        variables: environment variables of the run.
    """
    changes = (f"trainer.output_dir={output}", "trainer.eval_interval=0", "trainer.export_hf=false", *overrides)
    torchrun = ["-m", "megappo.torchrun", "--standalone", "--nproc-per-node", str(RANKS)]
    run_child(
        [sys.executable, *torchrun, "-m", "megappo.train", config, *changes],
        check=True,
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)} | variables,
        stdout=subprocess.DEVNULL,
    )
    return read_metrics(output)[1:]


def quickstart(folder: Path, steps: int) -> Row:
    """Measure the share of a step outside models and engines."""
    make = [sys.executable, "tools/make_quickstart.py", "--output", folder, "--force"]
    run_child(make, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    paths = (f"model.path={folder}/model", f"data.train_files={folder}/train.jsonl", "data.val_files=[]")
    length = (f"trainer.total_steps={steps + 1}", f"trainer.save_interval={steps + 1}")
    found = steps_of(ROOT / "configs" / "quickstart.yaml", folder / "run", *paths, *length, OMP_NUM_THREADS="1")
    took = statistics.median(step["timing_s/step"] for step in found)
    others = statistics.median(
        step["timing_s/step"] - sum(step[f"timing_s/{phase}"] for phase in MODEL_WORK) for step in found
    )
    return Row("quickstart's step, neither models nor engines", others / took, "at most 0.03", "the step", took)


def larger(folder: Path, steps: int) -> Row:
    """Measure the share of a step that the matrix products would take at peak rate."""
    write_qwen2(folder / "model")
    write_words(folder)
    config = folder / "config.yaml"
    sections = {
        "model": LARGER["model"] | {"path": str(folder / "model")},
        "data": LARGER["data"] | {"train_files": [str(folder / "prompts.jsonl")]},
        "trainer": {"total_steps": steps + 1, "save_interval": steps + 1},
    }
    config.write_text(yaml.safe_dump(LARGER | sections))
    rate_before = on_ranks(RANKS, rate)
    found = steps_of(config, folder / "run")
    rates = rate_before, on_ranks(RANKS, rate)
    took = statistics.median(step["timing_s/step"] for step in found)
    responses = statistics.fmean(step["rollout/response_length/mean"] for step in found)
    flops = {head: flops_of(read_architecture(folder / "model", head)) for head in PASSES}
    rows = [(PROMPT + responses, responses)] * ROWS
    work = sum(passes * flops[head].forward(rows) for head, passes in PASSES.items())
    products = work / statistics.fmean(rates)
    return Row("step of a Qwen2 of 110M", products / took, "at least 0.5", "the rate of plain products", took)


def rate(rank: int) -> float:
    """Return the operations per second of all ranks, assuming that each does as many as this one."""
    matrix, product = torch.rand(SIDE, SIDE), torch.empty(SIDE, SIDE)
    took, end = [], time.perf_counter() + RATE_SECONDS
    while time.perf_counter() < end:
        took.append(seconds(lambda: torch.mm(matrix, matrix, out=product)))
    return RANKS * 2 * SIDE**3 / statistics.median(took)


def write_words(folder: Path) -> None:
    """Write a tokenizer of digits and meaningless words, and prompts of digits."""
    words = {"<eos>": 0, **{str(digit): 1 + digit for digit in range(10)}}
    words |= {f"w{i}": i for i in range(len(words), VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "unk_token": "0"}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(config))
    rng = random.Random(0)
    prompts = ["".join(rng.choices("0123456789", k=PROMPT)) for _ in range(16 * ROWS)]
    lines = [json.dumps({"prompt": prompt, "label": "0"}) for prompt in prompts]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = parser_of(__doc__)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [quickstart(Path(folder, "quickstart"), 8 * args.repeats), larger(Path(folder), args.repeats)]
    report(rows, args.json)


if __name__ == "__main__":
    main()

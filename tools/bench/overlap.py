"""Time steps whose rollouts run ahead of training against the longer of the two sides alone.

    .venv/bin/python tools/bench/overlap.py

Trains a random Llama of 5M parameters, with a critic of the same shape, on two ranks, each bound to a core of its own:
the models to one, the engine with its server and workers to the other. One run samples ahead of training, one trains on
the rollouts that the first has recorded, without an engine, and one only samples. The two sides take about the same
time. The learning rate is so small that the lengths of responses do not change.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))


import yaml
from child_run import run_child
from make_quickstart import VOCABULARY, write_tokenizer
from timed import Row, parser_of, report, write_llama

from megappo.observe.metrics_file import read_metrics

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
MAX_STALENESS, FIRST_STEPS, STEPS = 2, 4, 8
"""Steps until sampling runs ahead as far as it may, and further steps."""
BATCH_SIZE = 256
TRAINED = {"optim": {"lr": 1e-9}, "ppo_mini_batch_size": BATCH_SIZE, "max_tokens_per_micro_batch": 1024}
SETTINGS = {
    "model": {"dtype": "fp32"},
    "placement": {"actor, critic": 0, "rollout": 1},
    "actor": TRAINED,
    "critic": TRAINED,
    "rollout": {"n": 1, "max_response_length": 48, "max_running_requests": 8},
    "data": {"train_batch_size": BATCH_SIZE, "max_prompt_length": 8},
    "trainer": {"save_interval": 0, "eval_interval": 0, "export_hf": False, "keep_rollouts": 0},
}


def write_job(folder: Path) -> Path:
    """Write a model, prompts and a config; return the config."""
    write_llama(folder / "model", 5e6, hidden=256, vocabulary=len(VOCABULARY))
    write_tokenizer(folder / "model")
    sums = [(10 + number // 32, 10 + number % 32) for number in range(2048)]
    lines = [json.dumps({"prompt": f"{a}+{b}=", "label": str(a + b)}) for a, b in sums]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    own = {
        "model": SETTINGS["model"] | {"path": str(folder / "model")},
        "data": SETTINGS["data"] | {"train_files": str(folder / "prompts.jsonl")},
        "trainer": SETTINGS["trainer"] | {"extensions": [str(HERE / "bound_ranks.py")]},
    }
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(SETTINGS | own))
    return config


def steps_of(config: Path, output: Path, *keys: str) -> list[dict[str, float]]:
    """Return the metrics of a run's steps once sampling runs as far ahead as it may.

    Args:
        keys: keys of the run alone.
    """
    last = FIRST_STEPS + STEPS
    # The last steps draw no further prompts.
    settings = (f"trainer.output_dir={output}", f"trainer.total_steps={last + MAX_STALENESS}", *keys)
    run_child(
        [sys.executable, "-m", "megappo", "train", config, *settings],
        check=True,
        cwd=REPOSITORY,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    return read_metrics(output)[FIRST_STEPS:last]


def measure(folder: Path) -> Row:
    config, record = write_job(folder), folder / "record"
    ahead = (f"rollout.max_staleness={MAX_STALENESS}", f"trainer.record_rollouts={record}")
    sampling = ("trainer.rollout_only=true", f"trainer.record_rollouts={folder / 'sampled'}")
    runs = {"ahead": ahead, "training": (f"trainer.replay_rollouts={record}",), "sampling": sampling}
    found = {name: steps_of(config, folder / name, *keys) for name, keys in runs.items()}
    took = {name: statistics.median(step["timing_s/step"] for step in steps) for name, steps in found.items()}
    longer = max(took["training"], took["sampling"])
    anchor = f"the longer of training, {took['training']:.2f} s, and sampling, {took['sampling']:.2f} s"
    return Row("Step with rollout.max_staleness 2", took["ahead"] / longer, "at most 1.12", anchor, took["ahead"])


def main() -> None:
    args = parser_of(__doc__, repeats=1).parse_args()
    rows = []
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(Path(folder)))
    rows.sort(key=lambda row: row.ratio)
    report([rows[(len(rows) - 1) // 2]], args.json)  # the median


if __name__ == "__main__":
    main()

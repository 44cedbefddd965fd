"""Train a task at several staleness limits, with several methods and seeds, and compare what they reach.

    .venv/bin/python tools/bench/learning.py [key=value ...] --output outputs/learning [--task quickstart]
        [--staleness 0 1 2 4 8] [--methods clip decoupled dis] [--seeds 0 1 2]

The runs are made one after another, on a rank for the models and one for the engine; a run that is finished already is
not repeated. Prints a table of held-out scores at the end of training, and writes it with its plot to the output
folder: table.md, learning.svg. The model and the data of the task must exist (launch/quickstart.sh,
tools/make_example.py).
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from child_run import run_child
from svg import COLOURS, HEIGHT, MARGIN, Point, figure, line, place

from megappo.observe.metrics_file import read_metrics

REPOSITORY = Path(__file__).parents[2]
METHODS = {
    "clip": (),
    "decoupled": ("algorithm.rollout_correction.level=token", "algorithm.rollout_correction.threshold=5"),
    "dis": (
        *("algorithm.old_log_probs=engine", "actor.policy_loss=dis"),
        *("actor.clip_ratio_low=0.3", "actor.clip_ratio_high=5"),
    ),
}
"""Method -> its keys."""
FIXED = (
    *("placement.actor=0", "placement.critic=0", "placement.rollout=1"),
    *("actor.parallel.tensor=1", "critic.parallel.pipeline=1"),
    *("trainer.save_interval=0", "trainer.export_hf=false"),
)

Scores = dict[tuple[str, int], list[float]]
"""(method, staleness) -> score of each seed, in percent."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="quickstart", help="name of a config in configs/")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, required=True)
    args, keys = parser.parse_known_args()
    scores: Scores = {}
    for staleness in args.staleness:
        for method in args.methods:
            of_seeds = scores.setdefault((method, staleness), [])
            for seed in args.seeds:
                folder = args.output / f"{method}_{staleness}_{seed}"
                chosen = [*METHODS[method], f"rollout.max_staleness={staleness}", f"trainer.seed={seed}", *keys]
                of_seeds.append(100 * final_score(args.task, folder, chosen))
                print(f"{method}, staleness {staleness}, seed {seed}: {of_seeds[-1]:.1f}", flush=True)
    text = table(scores, args.methods, args.staleness)
    (args.output / "table.md").write_text(text)
    (args.output / "learning.svg").write_text(plot(scores, args.methods, args.staleness))
    print(text, end="")


def final_score(task: str, folder: Path, keys: Sequence[str]) -> float:
    """Make a run, unless it is finished, and return the mean of its last held-out scores."""
    evaluations = [of_step for line in train(task, folder, keys) if (of_step := held_out(line))]
    return statistics.mean(evaluations[-1])


def train(task: str, folder: Path, keys: Sequence[str]) -> list[dict[str, float]]:
    """Make a run, unless it is finished, and return the metrics of its steps."""
    config = REPOSITORY / "configs" / f"{task}.yaml"
    log = folder.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        command = [sys.executable, "-m", "megappo", "train", config, f"trainer.output_dir={folder}", *FIXED, *keys]
        if run_child(command, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT):
            raise SystemExit(f"the run failed: see {log}")
    return read_metrics(folder)


def held_out(line: Mapping[str, float]) -> list[float]:
    """Return the mean score of each held-out data set in a step's metrics."""
    return [value for name, value in line.items() if name.startswith("val/") and name.endswith("/score/mean")]


def table(scores: Scores, methods: Sequence[str], limits: Sequence[int]) -> str:
    """Return the mean score over the seeds, and its standard deviation, as a Markdown table."""
    rows = [f"| staleness | {' | '.join(methods)} |", "| --- |" + " --- |" * len(methods)]
    for limit in limits:
        found = [scores[method, limit] for method in methods]
        cells = [f"{statistics.mean(one):.1f} +- {statistics.pstdev(one):.1f}" for one in found]
        rows.append(f"| {limit} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def plot(scores: Scores, methods: Sequence[str], limits: Sequence[int]) -> str:
    """Return an SVG of the scores against the staleness: a dot for each seed, a line through the means."""
    lowest = min(map(min, scores.values()))
    span = max(max(map(max, scores.values())) - lowest, 1.0)

    def at(index: int, score: float) -> Point:
        return place(index / max(len(limits) - 1, 1), (score - lowest) / span)

    parts = []
    for index, limit in enumerate(limits):
        parts.append(f'<text x="{at(index, 0)[0]}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">{limit}</text>')
    for score in (lowest, lowest + span):
        parts.append(f'<text x="4" y="{at(0, score)[1] + 4}">{score:.1f}</text>')
    for method, colour in zip(methods, COLOURS, strict=False):
        means = [at(index, statistics.mean(scores[method, limit])) for index, limit in enumerate(limits)]
        parts.append(line(means, colour))
        for index, limit in enumerate(limits):
            for x, y in (at(index, score) for score in scores[method, limit]):
                parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}" fill-opacity="0.5"/>')
        left = MARGIN + 110 * methods.index(method)
        parts.append(f'<text x="{left}" y="20" fill="{colour}">{method}</text>')
    return figure("rollout.max_staleness", parts)


if __name__ == "__main__":
    main()

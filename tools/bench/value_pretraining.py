"""Compare PPO from a critic that was trained alone with PPO that warms its critic up, and with PPO that does neither.

    .venv/bin/python tools/bench/value_pretraining.py --output outputs/value_pretraining [--task quickstart]
        [--gate 0.35] [--warmup 15] [--score 0.9] [--seeds 0 1 2] [key=value ...]

Each seed trains a critic alone until it reaches the gate; its steps are printed. The three PPO runs evaluate every
second step. Prints a table of the steps that each needs until the held-out score is first reached, its warm-up
included, and the explained variance of its first step with a trained actor. A run that is finished is not repeated.
"""

import argparse
import statistics
from pathlib import Path

from learning import held_out, train

OFTEN = ("trainer.eval_interval=2", "trainer.num_samples=0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="quickstart", help="name of a config in configs/")
    parser.add_argument(
        "--gate", type=float, default=0.35, help="explained variance of the critic that is trained alone"
    )
    parser.add_argument("--warmup", type=int, default=15, help="critic.warmup_steps of the run that warms it up")
    parser.add_argument("--score", type=float, default=0.9, help="held-out score to reach")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, required=True)
    args, keys = parser.parse_known_args()
    steps: dict[str, list[float]] = {}
    explained: dict[str, list[float]] = {}
    for seed in args.seeds:
        seeded = [*keys, f"trainer.seed={seed}"]
        alone = args.output / f"alone_{seed}"
        gate = (f"critic.gate.explained_variance={args.gate}", "trainer.train=[critic]", "trainer.eval_interval=5")
        last = train(args.task, alone, [*seeded, *gate, "trainer.export_hf=true"])[-1]
        print(f"seed {seed}: the critic alone took {last['step']} steps", flush=True)
        methods = {
            "a critic trained alone": (f"critic.model_path={alone / 'hf_critic'}",),
            f"critic.warmup_steps={args.warmup}": (f"critic.warmup_steps={args.warmup}",),
            "neither": (),
        }
        for number, (name, settings) in enumerate(methods.items()):
            lines = train(args.task, args.output / f"ppo_{number}_{seed}", [*seeded, *OFTEN, *settings])
            reached = (line["step"] for line in lines if (of_step := held_out(line)) and min(of_step) >= args.score)
            steps.setdefault(name, []).append(next(reached, float("inf")))
            of_actor = next(line for line in lines if "actor/pg_loss" in line)
            explained.setdefault(name, []).append(of_actor["critic/vf_explained_var"])
            print(f"seed {seed}, {name}: {steps[name][-1]:g} steps", flush=True)
    rows = [
        f"| PPO from | steps to {args.score:g}, of each seed | mean | explained variance |",
        "| --- | --- | --- | --- |",
    ]
    for name, found in steps.items():
        of_seeds = ", ".join(f"{one:g}" for one in found)
        rows.append(
            f"| {name} | {of_seeds} | {statistics.fmean(found):.1f} | {statistics.fmean(explained[name]):.2f} |"
        )
    (args.output / "table.md").write_text("\n".join(rows) + "\n")
    print("\n".join(rows))


if __name__ == "__main__":
    main()

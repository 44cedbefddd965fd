"""Compare methods with a critic and without one where credit is hard to assign: on the voyages of configs/voyage.yaml.

    .venv/bin/python tools/make_example.py voyage --output outputs/voyage
    .venv/bin/python tools/bench/credit.py --output outputs/credit [--doubtful] [--seeds 0 1 2] [--methods NAME ...]
        [--steps 50] [--critic-steps 20] [key=value ...]

All methods sample as many episodes. A critic that is trained beforehand is trained alone in the first steps, on
episodes of the policy as it is before training. With --doubtful one reward in five is wrong. A run that is finished is
not repeated. Writes a table and a plot to the output folder, credit.md and credit.svg: the share of right choices among
the sampled ones of the last TAIL steps, after all steps and after the seconds that the fastest method takes for them.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "configs"))

from learning import train
from svg import COLOURS, HEIGHT, MARGIN, figure, line, place
from voyage_environment import HARBOURS

TAIL = 5
WITHOUT_CRITIC = ("algorithm.gae_level=token", "algorithm.lam=1", "algorithm.critic_lam=null")
IN_GROUPS = (*WITHOUT_CRITIC, "rollout.n=8", "data.train_batch_size=8", "actor.ppo_mini_batch_size=8")
BEFOREHAND = "PPO, critic trained beforehand"
METHODS = {
    BEFOREHAND: (),
    "PPO": (),
    "PPO, HL-Gauss": ("critic.value_loss=hl_gauss", "critic.value_range=[0,1]", "critic.optim.lr=5e-3"),
    "REINFORCE++": (*WITHOUT_CRITIC, "algorithm.adv_estimator=reinforce_plus_plus"),
    "RLOO": (*IN_GROUPS, "algorithm.adv_estimator=rloo"),
    "GRPO": (*IN_GROUPS, "algorithm.adv_estimator=grpo"),
}
"""Method -> its keys."""
NO_EXTRAS = ("trainer.eval_interval=0", "trainer.num_samples=0")
DOUBTFUL = "rollout.environment=configs/voyage_environment.py:DoubtfulVoyage"

Lines = list[dict[str, float]]
"""Metrics of the steps of a run."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--doubtful", action="store_true", help="one reward in five is wrong")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=50, help="steps of each method")
    parser.add_argument("--critic-steps", type=int, default=20, help="steps that train a critic beforehand")
    parser.add_argument("--output", type=Path, required=True)
    args, keys = parser.parse_known_args()
    if args.doubtful:
        keys.append(DOUBTFUL)
    runs: dict[str, list[Lines]] = {}
    for seed in args.seeds:
        for number, method in enumerate(METHODS):
            if method not in args.methods:
                continue
            chosen = [*METHODS[method], *NO_EXTRAS, f"trainer.seed={seed}", *keys]
            before: Lines = []
            if method == BEFOREHAND:
                critic = args.output / f"critic_{seed}"
                alone = ("trainer.train=[critic]", "trainer.export_hf=true", f"trainer.total_steps={args.critic_steps}")
                before = train("voyage", critic, [*chosen, *alone])
                chosen.append(f"critic.model_path={critic / 'hf_critic'}")
            num_steps = args.steps - len(before)
            found = train("voyage", args.output / f"{number}_{seed}", [*chosen, f"trainer.total_steps={num_steps}"])
            found = [*before, *found]
            runs.setdefault(method, []).append(found)
            print(f"{method}, seed {seed}: {100 * right(found[-TAIL:]):.1f}", flush=True)
    text = table(runs)
    (args.output / "credit.md").write_text(text)
    (args.output / "credit.svg").write_text(plot(runs))
    print(text, end="")


def right(lines: Lines) -> float:
    """Return the share of the harbours at which the sampled choice was right."""
    return statistics.mean(one["episode/part/right"] for one in lines) / HARBOURS


def within(lines: Lines, seconds: float) -> Lines:
    """Return the metrics of the steps that end within some seconds of training."""
    total = 0.0
    kept = []
    for one in lines:
        total += one["timing_s/step"]
        if total <= seconds:
            kept.append(one)
    return kept


def table(runs: Mapping[str, Sequence[Lines]]) -> str:
    """Return the shares of right choices, mean and standard deviation over the seeds, in percent, as Markdown."""
    seconds = {
        name: statistics.mean(sum(one["timing_s/step"] for one in run) for run in of) for name, of in runs.items()
    }
    least = min(seconds.values())
    rows = [f"| method | after all steps | after {least:.0f} s | seconds of a step |", "| --- | --- | --- | --- |"]
    for name, of_seeds in runs.items():
        at_end = [100 * right(run[-TAIL:]) for run in of_seeds]
        in_time = [100 * right(within(run, least)[-TAIL:]) for run in of_seeds]
        each = seconds[name] / len(of_seeds[0])
        rows.append(f"| {name} | {spread(at_end)} | {spread(in_time)} | {each:.1f} |")
    return "\n".join(rows) + "\n"


def spread(values: Sequence[float]) -> str:
    """Return mean and standard deviation as text."""
    return f"{statistics.mean(values):.0f} +- {statistics.pstdev(values):.0f}"


def plot(runs: Mapping[str, Sequence[Lines]]) -> str:
    """Return an SVG of the share of right choices by step, each the mean of TAIL steps and of the seeds."""
    parts = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(f'<text x="4" y="{place(0, share)[1] + 4}">{100 * share:.0f} %</text>')
    num_steps = min(len(run) for of_seeds in runs.values() for run in of_seeds)
    for step in range(TAIL, num_steps + 1, TAIL):
        x = place(step / num_steps, 0)[0]
        parts.append(f'<text x="{x}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">{step}</text>')
    for number, (name, of_seeds) in enumerate(runs.items()):
        colour = COLOURS[number]
        places = []
        for step in range(TAIL, num_steps + 1):
            share = statistics.mean(right(run[step - TAIL : step]) for run in of_seeds)
            places.append(place(step / num_steps, share))
        parts.append(line(places, colour))
        parts.append(f'<text x="{MARGIN + 12}" y="{20 + 16 * number}" fill="{colour}">{name}</text>')
    return figure("step", parts)


if __name__ == "__main__":
    main()

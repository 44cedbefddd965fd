"""Time rollouts ahead of training against the synchronous loop, with an environment that is slow for some prompts.

    .venv/bin/python tools/bench/ahead.py

Trains the quickstart's model (launch/quickstart.sh makes it) on two ranks, one for the models and one for the engine,
in an environment whose step takes 1 to 3 seconds for one prompt in four: once with rollout.max_staleness 0, and once
with 4. A synchronous step waits for the slowest episode; ahead of training there is other work meanwhile.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

from child_run import run_child
from timed import Row, parser_of, report

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
SETTINGS = (
    *("placement.actor=0", "placement.critic=0", "placement.rollout=1"),
    *("actor.parallel.tensor=1", "critic.parallel.pipeline=1"),
    *("data.train_batch_size=128", "actor.ppo_mini_batch_size=128", "critic.ppo_mini_batch_size=128"),
    *(f"rollout.environment={HERE / 'slow_environment.py'}:Slow", "reward.function=null"),
    *("trainer.eval_interval=0", "trainer.save_interval=0", "trainer.export_hf=false", "trainer.keep_rollouts=0"),
)
FIRST_STEPS, STEPS = 6, 12
"""Steps until sampling runs ahead as far as it may, and further steps."""


def step_seconds(max_staleness: int) -> float:
    """Return the mean seconds of a step once sampling runs as far ahead as it may."""
    with tempfile.TemporaryDirectory() as folder:
        own = (f"trainer.total_steps={FIRST_STEPS + STEPS + max_staleness}", f"trainer.output_dir={folder}")
        command = [sys.executable, "-m", "megappo", "train", REPOSITORY / "configs" / "quickstart.yaml", *SETTINGS]
        command += [f"rollout.max_staleness={max_staleness}", *own]
        run_child(command, check=True, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
        steps = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    # The last steps draw no further prompts.
    return statistics.mean(metrics["timing_s/step"] for metrics in steps[FIRST_STEPS : FIRST_STEPS + STEPS])


def main() -> None:
    args = parser_of(__doc__, repeats=1).parse_args()
    ratios = []
    for _ in range(args.repeats):
        synchronous, ahead = step_seconds(0), step_seconds(4)
        ratios.append((synchronous / ahead, ahead))
    ratio, seconds = statistics.median_low(ratios)
    anchor = "rollout.max_staleness 0"
    report([Row("Episodes per second, rollout.max_staleness 4", ratio, "at least 1.8", anchor, seconds)], args.json)


if __name__ == "__main__":
    main()

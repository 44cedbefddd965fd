"""The run of whole_run.py with an engine that stays awake and samples ahead (rollout.max_staleness=1): sampling and
training overlap on one GPU.

python tests/gpu/stages/ahead.py
"""

from common import CUDA, report
from runs import figures, train
from whole_run import CONFIG, SMALL, new_run

from megappo.observe.metrics_file import read_metrics

MAX_STALENESS = 1
AHEAD = (
    *(f"rollout.max_staleness={MAX_STALENESS}", "rollout.sleep=never", "trainer.total_steps=6"),
    *("actor.offload=[]", "critic.offload=[]", "ref.offload=[]", "rollout.mem_fraction_static=0.3"),
)


def measure() -> dict:
    run, paths = new_run("ahead")
    train(CONFIG, [*paths, "model.layer_spec=torch", *AHEAD, *(() if CUDA else SMALL)])
    steps = read_metrics(run)
    later = steps[1:]  # the first step waits for its rollout
    difference = steps[0]["rollout/log_prob_diff/mean"]  # later tokens are of other weights than those that are trained
    assert difference < 0.05, difference
    # The sides' shares of the time add up to 1 at most where they take turns.
    busy = [2 - step["timing/engines_idle_frac"] - step["timing/trainers_idle_frac"] for step in later]
    if CUDA:
        assert min(busy) > 1, busy
    return {"stage": "ahead", "log_prob_diff": difference, "busy_shares": busy, **figures(run)}


if __name__ == "__main__":
    report(measure)

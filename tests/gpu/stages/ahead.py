"""The run of whole_run.py with an engine that stays awake and samples ahead (rollout.max_staleness=1): sampling and
training overlap on one GPU. in_flight.py checks the log-probs of tokens around a sync.

python tests/gpu/stages/ahead.py {continue,keep_cache,adapters}

In a sync, "continue" pauses responses, whose keys and values are computed again afterwards; "keep_cache" keeps them,
which GPUs refuse; "adapters" waits until responses have ended.
"""

import subprocess
import sys

from common import CUDA, report
from runs import figures, train
from whole_run import CONFIG, LORA, SMALL, new_run

from megappo.observe.metrics_file import read_metrics

MAX_STALENESS = 1
AHEAD = (
    *(f"rollout.max_staleness={MAX_STALENESS}", "rollout.sleep=never", "trainer.total_steps=6"),
    *("actor.offload=[]", "critic.offload=[]", "ref.offload=[]", "rollout.mem_fraction_static=0.3"),
    "model.layer_spec=torch",
)
MODES = {
    "continue": (),
    "keep_cache": ("rollout.recompute_cache=false",),
    "adapters": ("rollout.on_sync=finish", *LORA),
}
BOUND = 0.05


def check_refused(settings: list[str]) -> dict:
    """Check that a run on GPUs does not begin that would write weights while a forward pass reads them."""
    try:
        train(CONFIG, settings)
    except subprocess.CalledProcessError as error:
        assert error.returncode == 2, error
        return {"refused": "rollout.recompute_cache=false"}
    raise AssertionError("a run on GPUs with rollout.recompute_cache=false was not refused")


def measure() -> dict:
    mode = sys.argv[1]
    stage = f"ahead_{mode}"
    run, paths = new_run(stage)
    settings = [*paths, *AHEAD, *MODES[mode], *(() if CUDA else SMALL)]
    if CUDA and mode == "keep_cache":
        return {"stage": stage, **check_refused(settings)}
    train(CONFIG, settings)
    steps = read_metrics(run)
    later = steps[1:]  # the first step waits for its rollout
    # Of rows without a token of older weights, of which some steps have none.
    differences = [step.get("rollout/log_prob_diff/mean") for step in steps]
    assert all(difference is None or difference < BOUND for difference in differences), differences
    probes = [step["sync/log_prob_diff/mean"] for step in steps if "sync/log_prob_diff/mean" in step]
    assert probes and max(probes) < BOUND, probes
    # The sides' shares of the time add up to 1 at most where they take turns.
    busy = [2 - step["timing/engines_idle_frac"] - step["timing/trainers_idle_frac"] for step in later]
    if CUDA and mode == "continue":
        assert min(busy) > 1, busy
    found = {"stage": stage, "log_prob_diffs": differences, "probe_diffs": probes, "busy_shares": busy}
    return found | figures(run)


if __name__ == "__main__":
    report(measure)

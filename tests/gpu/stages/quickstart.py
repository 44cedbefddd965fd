"""The quickstart on one rank: actor, critic, reference and engine on one GPU; then its checkpoint resumed.

python tests/gpu/stages/quickstart.py
"""

import shutil
import sys

from common import CUDA, REPOSITORY, report, sized
from runs import figures, output_folder, run_command, train

from megappo.observe.metrics_file import read_metrics

STEPS, FURTHER_STEPS = sized((20, 2), (2, 1))
DATA = REPOSITORY / "outputs" / "quickstart"
ON_GPU = (
    *("model.dtype=bf16", "rollout.sync.probe_tolerance=0.05"),  # SGLang's norm takes no fp32 (sglang-kernel 0.4.10)
    "rollout.server_args.attention_backend=triton",  # the model's heads are too small for FlashAttention
)
CONFIG = REPOSITORY / "configs" / "quickstart.yaml"


def measure() -> dict:
    if not (DATA / "model").exists():
        run_command([sys.executable, "tools/make_quickstart.py", "--output", DATA, "--force"])
    run = output_folder("quickstart")
    shutil.rmtree(run, ignore_errors=True)
    settings = [f"trainer.output_dir={run}", "trainer.export_hf=false", *(ON_GPU if CUDA else ())]
    train(CONFIG, [*settings, f"trainer.total_steps={STEPS}"])
    before, *steps = read_metrics(run)
    found = figures(run)
    train(CONFIG, [*settings, f"trainer.total_steps={STEPS + FURTHER_STEPS}"])
    resumed = [step["step"] for step in read_metrics(run)]
    assert resumed == list(range(STEPS + FURTHER_STEPS + 1)), resumed
    rewards = [step["reward/score/mean"] for step in steps]
    difference = max(step["rollout/log_prob_diff/mean"] for step in steps)
    assert difference < sized(0.05, 1e-3), difference
    if CUDA:
        assert rewards[-1] > rewards[0] + 0.1, rewards
    return {
        "stage": "quickstart",
        "rewards": rewards,
        "before": before["val/val/score/mean"],
        "log_prob_diff": difference,
        **found,
    }


if __name__ == "__main__":
    report(measure)

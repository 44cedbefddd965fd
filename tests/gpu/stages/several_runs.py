"""Runs over two ranks, each on a GPU of its own, for kit/node.py.

python tests/gpu/stages/several_runs.py TRIAL
"""

import subprocess
import sys
import time
from pathlib import Path

import psutil
from common import CUDA, report, sized
from engines import CHANGES
from quickstart import CONFIG as QUICKSTART
from quickstart import DATA, ON_GPU
from runs import figures, output_folder, process_settings, run_command, train, train_command
from whole_run import BOUND, CONFIG, SMALL, new_run

from megappo.observe.metrics_file import read_metrics

RANKS, STEPS = 2, 3
BOTH = ("placement.actor=0-1", "placement.critic=0-1")
TRIALS: dict[str, tuple[str, tuple[str, ...]]] = {
    "layout": ("qwen3", (*BOTH, "actor.parallel.tensor=2", "critic.parallel.pipeline=2")),
    "engine_tp2": ("qwen3", (*BOTH, "placement.rollout=0-1", "rollout.tensor_parallel=2", "actor.parallel.tensor=2")),
    "broadcast": (
        "qwen3",
        ("placement.actor=0", "placement.critic=0", "placement.rollout=1", "rollout.sync.transport=broadcast"),
    ),
    "context": ("qwen3", (*BOTH, "actor.parallel.context=2", "critic.parallel.context=2")),
    "experts": ("qwen3_moe", (*BOTH, "actor.parallel.expert=2", "critic.parallel.expert=2")),
}
"""Name -> model type and keys of a run of whole_run.yaml."""
OTHER_LAYOUT = (*BOTH, "actor.parallel.pipeline=2", "critic.parallel.tensor=2")
WAIT_SECONDS = 200


def new_settings(name: str, model_type: str = "qwen3") -> tuple[Path, list[str]]:
    run, paths = new_run(f"several_{name}", model_type, **CHANGES[model_type])
    return run, [*paths, *(() if CUDA else SMALL)]


def check(run: Path, num_steps: int) -> dict:
    """Check that all steps were made and that the engine had the actor's weights; return the figures."""
    steps = read_metrics(run)
    assert [step["step"] for step in steps] == list(range(1, num_steps + 1)), steps
    differences = [step["rollout/log_prob_diff/mean"] for step in steps]
    assert max(differences) < BOUND, differences
    restarts = sum(step["rollout/engine_restarts"] for step in steps)
    return {"log_prob_diffs": differences, "engine_restarts": restarts, **figures(run)}


def one_run(name: str) -> dict:
    model_type, keys = TRIALS[name]
    run, settings = new_settings(name, model_type)
    train(CONFIG, [*settings, *keys], RANKS)
    return check(run, STEPS)


def quickstart(name: str) -> dict:
    """Run the quickstart as it is: the actor over two tensor-parallel ranks, the critic over two stages."""
    if not (DATA / "model").exists():
        run_command([sys.executable, "tools/make_quickstart.py", "--output", DATA, "--force"])
    run, steps = output_folder(f"several_{name}"), sized(20, 2)
    settings = [f"trainer.output_dir={run}", "trainer.export_hf=false", f"trainer.total_steps={steps}"]
    train(QUICKSTART, [*settings, *(ON_GPU if CUDA else ())], RANKS)
    found = read_metrics(run)[1:]
    rewards = [step["reward/score/mean"] for step in found]
    assert len(rewards) == steps and (not CUDA or rewards[-1] > rewards[0] + 0.1), rewards
    return {"rewards": rewards, **figures(run)}


def resumed(name: str) -> dict:
    """Resume a checkpoint of two steps in another layout."""
    run, settings = new_settings(name)
    settings += ["trainer.save_interval=1"]
    for keys, num_steps in ((TRIALS["layout"][1], 2), (OTHER_LAYOUT, STEPS)):
        train(CONFIG, [*settings, *keys, f"trainer.total_steps={num_steps}"], RANKS)
    return check(run, STEPS)


def killed_engine(name: str) -> dict:
    """Kill an engine's rank in a rollout by SIGKILL: the run restarts the engine and ends as others do."""
    run, settings = new_settings(name)
    keys = TRIALS["engine_tp2"][1]
    with subprocess.Popen(train_command(CONFIG, [*settings, *keys], RANKS), **process_settings(RANKS)) as process:
        deadline = time.monotonic() + WAIT_SECONDS
        while not (run / "metrics.jsonl").exists() or not read_metrics(run):
            assert process.poll() is None, f"the run ended with {process.returncode} before its first step"
            assert time.monotonic() < deadline, "no step"
            time.sleep(0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        schedulers = [child for child in children if "scheduler" in child.name()]
        assert schedulers, [child.name() for child in children]
        schedulers[-1].kill()
        assert process.wait(WAIT_SECONDS) == 0
    found = check(run, STEPS)
    assert found["engine_restarts"] == 1, found
    return found


def measure() -> dict:
    name = sys.argv[1]
    special = {"quickstart": quickstart, "resumed": resumed, "killed_engine": killed_engine}
    return {"stage": f"several_{name}", **special.get(name, one_run)(name)}


if __name__ == "__main__":
    report(measure)

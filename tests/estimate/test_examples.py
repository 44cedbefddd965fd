"""Estimates of runs on examples, which start no engines."""

import pytest

from megappo.architecture.model_folder import SHAPES
from megappo.config.schema import Config
from megappo.lab.estimate.gpu_memory import Cluster, MemoryEstimate
from megappo.lab.estimate.seconds import TimeEstimate
from megappo.lab.estimate.suggest import suggestions
from megappo.placement.run_plan import plan_run
from megappo.runtime.gpus import GPUS

MODEL = str(SHAPES / "qwen2.5-7b")


@pytest.mark.parametrize(("kind", "name"), [("sft", "actor"), ("reward_model", "reward_model"), ("critic", "critic")])
def test_an_update_is_all_that_a_step_takes(kind: str, name: str):
    values = {
        "model": {"path": MODEL},
        name: {"parallel": {"tensor": 2}, "max_tokens_per_micro_batch": 4096},
        "data": {"train_files": "train.jsonl", "train_batch_size": 64, "max_length": 2048},
        "trainer": {"kind": kind, "output_dir": "out"},
    }
    of_ppo = Config.model_validate(values | {"rollout": {"n": 4}})  # as a base for PPO may have it
    assert of_ppo.rows_per_prompt == 1 + (kind == "reward_model")
    if kind == "critic":
        values[name]["ppo_mini_batch_size"] = 64
    plan, gpu = plan_run(Config.model_validate(values), 8), GPUS["h100"]
    cluster = Cluster(gpu.memory)
    memory = MemoryEstimate(plan, cluster)
    values_before = ["values"] if kind == "critic" else []
    assert list(TimeEstimate(memory, gpu).seconds) == [*values_before, f"update_{name}"]
    assert memory.fullest.peak[1] == f"update_{name}"
    rows = 2 if kind == "reward_model" else 1
    assert plan.batch_splits[name].trajectories == 64 * rows
    assert plan.batch_splits[name].micro_batches[1] == 16 // 2 * rows
    assert f"\n  {name}:\n    parallel:" in suggestions(plan, cluster, gpu)

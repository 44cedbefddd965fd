"""launch/rlhf.sh from a clone to its end: the bars of its models, and what the KL penalty is for."""

import json
import os
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
from clone import clone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[float]]]:
    """The metrics of each run of the script: name -> values in the order of steps."""
    folder = tmp_path_factory.mktemp("clone")
    clone(folder)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("MEGAPPO_")}
    subprocess.run(["bash", "launch/rlhf.sh"], cwd=folder, env=variables, stdin=subprocess.DEVNULL, check=True)
    assert (folder / "outputs" / "rlhf" / "proxy.svg").read_text().count("<polyline") == 2
    runs: dict[str, dict[str, list[float]]] = {}
    for file in sorted(Path(folder, "outputs", "rlhf").glob("*/metrics.jsonl")):
        values = runs[file.parent.name] = defaultdict(list)
        for line in map(json.loads, file.read_text().splitlines()):
            for name, value in line.items():
                values[name].append(value)
    return runs


def test_the_reward_model_orders_held_out_pairs(metrics):
    assert metrics["reward_model"]["val/preferences_val/accuracy"][-1] > 0.9


def test_ppo_raises_the_score_of_the_hidden_rule(metrics):
    first, *_, last = metrics["ppo"]["val/truth/score/mean"]
    assert first < 0.5 and last > 0.85


def test_without_a_kl_penalty_ppo_exploits_the_reward_model(metrics):
    *_, with_penalty = metrics["ppo"]["val/truth/score/mean"]
    *_, without = metrics["ppo_without_kl"]["val/truth/score/mean"]
    assert without < with_penalty - 0.05

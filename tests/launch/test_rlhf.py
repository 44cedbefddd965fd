"""launch/rlhf.sh from a clone to its end: the bars of its models, and what the KL penalty is for."""

import os
import subprocess
from collections.abc import Callable

import pytest
from clone import clone

from megappo.observe.metrics_file import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], list[float]]:
    """The values of a metric in a run of the script, in the order of steps."""
    folder = tmp_path_factory.mktemp("clone")
    clone(folder)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("MEGAPPO_")}
    subprocess.run(["bash", "launch/rlhf.sh"], cwd=folder, env=variables, stdin=subprocess.DEVNULL, check=True)
    runs = folder / "outputs" / "rlhf"
    assert (runs / "proxy.svg").read_text().count("<polyline") == 2
    return lambda run, metric: [step[metric] for step in read_metrics(runs / run) if metric in step]


def test_the_reward_model_orders_held_out_pairs(values):
    assert values("reward_model", "val/preferences_val/accuracy")[-1] > 0.9


def test_ppo_raises_the_score_of_the_hidden_rule(values):
    first, *_, last = values("ppo", "val/truth/score/mean")
    assert first < 0.5 and last > 0.85


def test_without_a_kl_penalty_ppo_exploits_the_reward_model(values):
    *_, with_penalty = values("ppo", "val/truth/score/mean")
    *_, without = values("ppo_without_kl", "val/truth/score/mean")
    assert without < with_penalty - 0.05

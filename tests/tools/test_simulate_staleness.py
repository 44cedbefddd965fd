"""Simulated steps in which the engines run ahead: against sums by hand, and the plan's own estimate."""

import contextlib
import re
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pyarrow
import pytest
from planning import REPOSITORY, run_here
from published_models import published_folders
from pyarrow import parquet

from megappo.config.loading import load_config
from megappo.lab.estimate.gpu_memory import Cluster, MemoryEstimate
from megappo.lab.estimate.seconds import TimeEstimate
from megappo.placement.run_plan import plan_run
from megappo.runtime.gpus import GPUS
from megappo_tools.simulate_staleness import Engine, Simulation, main, mean_step, simulation_of

CONFIG = REPOSITORY / "configs" / "qwen2.5_7b_gsm8k_8gpu.yaml"
TRAINING, SYNC = 3, 1


@pytest.fixture(autouse=True)
def published(tmp_path: Path) -> Iterator[None]:
    with contextlib.chdir(published_folders(tmp_path)):
        yield


def simulation(max_staleness: int, lengths: Iterator[int], *, batch: int = 1, most: int = 99, finishes: bool = False):
    """Return a run with one engine, in which a token takes a second, the models 3 and a sync 1."""
    return Simulation(
        max_staleness,
        batch,
        1,
        [Engine(lambda running: 1.0, most)],
        lambda count: np.array([next(lengths) for _ in range(count)]),
        lambda tokens: TRAINING,
        SYNC,
        99,
        finishes,
    )


def test_steps_by_hand() -> None:
    """Responses of 10 tokens. With k = 1 the third begins at 14 s, with step 2, has 3 tokens at 17 s, waits
    until 18 s for the sync, and ends at 25 s, where step 3, begun at 18 s, has waited for 7 s."""
    synchronous = simulation(0, repeat(10))
    assert [synchronous.step() for _ in range(3)] == [(14, 10, 3, 0, 0, 0, 0)] * 3
    ahead = simulation(1, repeat(10))
    steps = [ahead.step() for _ in range(4)]
    assert [step.seconds for step in steps] == [10 + 3 + 1, 3 + 1, 7 + 3 + 1, 3 + 1]
    assert [step.trainers_idle for step in steps] == [10, 0, 7, 0]
    assert [step.engines_idle for step in steps] == [3, 0, 0, 0]
    assert [step.queue for step in steps] == [1, 0, 1, 0]
    assert [step.age for step in steps] == [0, 1, 1, 1]
    assert [step.token_age for step in steps] == pytest.approx([0, 1, 0.3, 1])


def test_responses_are_finished_before_a_sync_by_hand() -> None:
    """From step 2 on, the response that begins with a step ends 10 s later, and the sync follows."""
    ahead = simulation(1, repeat(10), finishes=True)
    steps = [ahead.step() for _ in range(3)]
    assert [step.seconds for step in steps] == [14, 10 + 1, 10 + 1]
    assert [step.trainers_idle for step in steps] == [10, 7, 7] and [step.token_age for step in steps] == [0, 1, 1]


def test_a_slow_response_delays_its_own_step_alone() -> None:
    """The second of the first two prompts takes 30 s. The step trains on no later one instead."""
    ahead = simulation(1, chain([2, 30, 2, 2], repeat(2)), batch=2)
    steps = [ahead.step() for _ in range(3)]
    assert [step.seconds for step in steps] == [30 + 4, 4, 4]
    assert [step.oldest for step in steps] == [0, 1, 1] and [step.queue for step in steps] == [2, 2, 2]


def test_an_engine_takes_as_many_at_once_as_it_has_room_for() -> None:
    synchronous = simulation(0, repeat(5), batch=3, most=2)
    assert synchronous.step().trainers_idle == 5 + 5


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("finishes", [False, True])
def test_nothing_is_older_than_allowed(max_staleness: int, finishes: bool) -> None:
    random = np.random.default_rng(0)
    lengths = iter(lambda: int(random.lognormal(2, 1.5)) + 1, 0)
    run = simulation(max_staleness, lengths, batch=4, most=7, finishes=finishes)
    steps = [run.step() for _ in range(60)]
    assert max(step.oldest for step in steps) == max_staleness
    assert all(0 <= step.age <= max_staleness for step in steps)
    assert all(-1e-9 < step.token_age < max_staleness + 1e-9 for step in steps)
    assert max(step.queue for step in steps) <= max_staleness * 4


def estimate(max_staleness: int, models: str, engines: str, on_sync: str, tokens: int) -> TimeEstimate:
    """Return the estimate of 240 responses a step on eight GPUs."""
    overrides = (f"actor={models}", f"critic={models}", f"rollout={engines}")
    batch = (
        "rollout.n=1",
        "data.train_batch_size=240",
        "actor.ppo_mini_batch_size=240",
        "critic.ppo_mini_batch_size=240",
    )
    rollout = (
        f"max_staleness={max_staleness}",
        f"on_sync={on_sync}",
        f"max_response_length={tokens}",
        "tensor_parallel=1",
    )
    keys = [*(f"placement.{key}" for key in overrides), *batch, *(f"rollout.{key}" for key in rollout)]
    layouts = [f"{model}.parallel={{tensor: 1, pipeline: 1, sequence: false}}" for model in ("actor", "critic")]
    config = load_config(CONFIG, [*keys, *layouts])
    return TimeEstimate(MemoryEstimate(plan_run(config, 8), Cluster(GPUS["h100"].memory)), GPUS["h100"])


@pytest.mark.parametrize(
    ("max_staleness", "models", "engines", "on_sync", "tokens"),
    [
        *((k, "0-3", "4-7", "continue", 512) for k in (0, 1, 4)),  # the engines wait
        *((k, "0-5", "6-7", "continue", 7000) for k in (0, 1, 2, 4)),  # the models wait
        *((k, "0-5", "6-7", "finish", 7000) for k in (1, 2)),
    ],
)
def test_equal_lengths_take_as_long_as_the_plan_estimates(
    max_staleness: int, models: str, engines: str, on_sync: str, tokens: int
) -> None:
    planned = estimate(max_staleness, models, engines, on_sync, tokens)
    run = simulation_of(planned, max_staleness, lambda count: np.full(count, tokens))
    mean = mean_step(run, 60)
    assert mean.seconds == pytest.approx(planned.step, rel=0.05)
    if planned.overlap:
        assert mean.trainers_idle == pytest.approx(planned.overlap.trainers_wait, abs=0.05 * planned.step)
        assert mean.engines_idle == pytest.approx(planned.overlap.engines_wait, abs=0.05 * planned.step)
    else:
        assert planned.step == sum(planned.seconds.values())


APART = ("placement.actor=0-5", "placement.critic=0-5", "placement.rollout=6-7", "actor.parallel.tensor=1",
         "actor.parallel.sequence=false", "data.train_batch_size=48", "actor.ppo_mini_batch_size=48",
         "critic.ppo_mini_batch_size=48")  # fmt: skip


def test_the_command_prints_a_table_and_draws_it(tmp_path: Path) -> None:
    lengths = [[1] * number for number in range(1, 200)]
    parquet.write_table(pyarrow.table({"tokens": lengths}), tmp_path / "step_00000001.parquet")
    words = ("--gpu", "h100", "--steps", "8", "--staleness", "0", "2", "--lengths", ".", "--output", "drawn")
    done = run_here(main, tmp_path, str(CONFIG), *APART, *words)
    assert done.returncode == 0, done.stderr
    assert re.search(r"responses: 100 tokens, one in ten above 1(79|80|81)\b", done.stdout)
    rows = [line.split() for line in done.stdout.splitlines()[-2:]]
    assert [row[0] for row in rows] == ["0", "2"] and float(rows[1][1]) < float(rows[0][1])
    text = (tmp_path / "drawn" / "staleness.svg").read_text()
    assert len(ElementTree.fromstring(text).findall(".//{*}rect")) == 1 + 2 * 2 + 2
    assert "prefers-color-scheme: dark" in text and re.search(r">k = 2<", text)


def test_engines_on_the_models_gpus_are_refused(tmp_path: Path) -> None:
    done = run_here(main, tmp_path, str(CONFIG), "--gpu", "h100")
    assert done.returncode == 2 and "placement.rollout shares GPUs with the models" in done.stderr

"""Faults at exact points of a step: the run resumes from the newest checkpoint that it has reported as saved, and ends
with bitwise the same numbers as an undisturbed run.

The runs train on recorded rollouts, without engines: test_engines.py has the points that need them.
"""

import re

import pytest
from commands import tensors_of
from faults import Point, Series

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STORE = "megappo.checkpoint.store"
STEP = "megappo.models.train_engine"
POINTS: dict[str, dict[str, Point]] = {
    "to the advantages": {
        "step": Point("megappo.recipes.ppo:ppo_step"),
        "replay": Point("megappo.rollouts.record:Replay.score"),
        "scatter": Point("megappo.trainer.models:Models.scatter", after=True),
        "old_log_probs": Point("megappo.trainer.component_batch:ComponentBatch.forward"),
        "values": Point("megappo.trainer.component_batch:ComponentBatch.forward", call=2),
        "gather": Point("megappo.trainer.models:Models.gather"),
        "advantages": Point("megappo.recipes.ppo:add_advantages", rank=0),
        "scatter_fields": Point("megappo.trainer.models:Models.scatter_fields"),
    },
    "from the updates to the log": {
        "update_critic": Point(f"{STEP}:TrainedEngine.train_batch"),
        "a backward pass is done": Point(f"{STEP}:clipped_step", call=2),
        "an optimizer step is done": Point(f"{STEP}:clipped_step", call=2, rank=0, after=True),
        "the next epoch": Point(f"{STEP}:TrainedEngine.train_batch", call=3),
        "update_actor": Point(f"{STEP}:TrainedEngine.train_batch", call=5),
        "gather_metrics": Point("megappo.trainer.progress:Experience.add"),
        "the step is done": Point("megappo.trainer.progress:Progress.finish", after=True),
        "the step is being logged": Point("megappo.observe.metrics_file:MetricsFile.on_step", rank=0, after=True),
    },
    "in a save": {
        "an old one is half removed": Point("shutil:rmtree", rank=0),  # first: later ones clear up what a kill has left
        "save": Point("megappo.trainer.run:Run.save"),
        "a file is written, but not on the disk": Point("os:fsync"),
        "between components": Point(f"{STORE}:_begin_writing", call=2),
        "before state.json": Point("megappo.trainer.progress:dump_config", rank=0),
        "before SHA256SUMS": Point(f"{STORE}:write_sums"),
        "before it gets its name": Point(f"{STORE}:sync", rank=0),
        "before `latest`": Point(f"{STORE}:write_durably", rank=0),
        "after `latest`": Point(f"{STORE}:write_durably", rank=0, after=True),
    },
}
"""Points before the call of a function, except those with `after`; `rank` is a rank that calls it."""
FOR_SIGNALS = ("values", "the next epoch", "gather_metrics", "between components", "before `latest`")


def named(*names: str) -> list[Point]:
    every = {name: point for points in POINTS.values() for name, point in points.items()}
    return [every[name] for name in names]


@pytest.mark.parametrize("fault", ["kill rank", "kill launcher", "kill all"])
@pytest.mark.parametrize("part", POINTS)
def test_killed(part: str, fault: str, series: Series, whole):
    series.begin(whole, 4)
    for point in POINTS[part].values():
        output = series.harm(point, fault)
        reported = f"error: rank {point.rank} (pid " in output and "was ended by SIGKILL" in output
        assert reported == (fault == "kill rank"), output
    series.finish(whole)


@pytest.mark.parametrize("fault", ["SIGTERM", "SIGUSR1"])
def test_asked_to_save_and_end(fault: str, series: Series, whole):
    """It saves everything that is known, the half of a step as well."""
    series.begin(whole, 2)
    for point in named(*FOR_SIGNALS):
        before = series.latest
        output = series.harm(point, fault)
        assert "; nothing is lost. To resume: " in output
        assert series.latest > before, "nothing that was done is done again"
    series.finish(whole)


def test_ended_by_ctrl_c(series: Series, whole):
    """At once, without a save."""
    series.begin(whole, 2)
    for point in named(*FOR_SIGNALS):
        last = series.harm(point, "SIGINT").splitlines()[-1]
        place, lost = r"(after step \d+|in the middle of step \d+)", r"(nothing is|\d steps?) lost"
        assert re.fullmatch(rf"ended by SIGINT: resumes {place}; {lost}\. To resume: .* -m megappo\.train .*", last)
    series.finish(whole)


@pytest.mark.parametrize("fault", ["sleep", "stop"])
def test_a_rank_that_sleeps_for_ever(fault: str, series: Series, whole):
    series.begin(whole, 2)
    for point in named("update_critic", "before SHA256SUMS"):
        output = series.harm(point, fault, "trainer.hang_timeout_seconds=15")
        assert "for 15 s (trainer.hang_timeout_seconds): check rank 1 first" in output
    series.finish(whole)


LOSS = "megappo.trainer.objectives:ActorLoss.__call__"


def test_a_loss_that_is_nan_on_one_rank_until_the_run_ends(series: Series, whole):
    """After trainer.max_bad_steps; no weight has been changed by it."""
    series.begin(whole, 2)
    output = series.harm(Point(LOSS, call=3, after=True, again=True), "nan")
    assert output.count("WARNING (rank 1): ") == 3 and "the loss of an optimizer step is not finite" in output
    assert "error (rank 1): " in output and "trainer.max_bad_steps is 3" in output
    series.finish(whole)


def test_a_loss_that_is_nan_on_one_rank_once(series: Series, whole):
    """That update is skipped, on all ranks."""
    series.begin(whole, 2)
    output = series.harm(Point(LOSS, call=3, after=True), "nan", code=0)
    [warning] = [line for line in output.splitlines() if line.startswith("WARNING")]
    assert warning.startswith("WARNING (rank 1): the loss of an optimizer step is not finite")
    assert warning.endswith("the actor's update 2 of step 3 is skipped")
    [kept] = (series.out / "bad_steps").iterdir()
    assert kept.name.startswith("step_00000003_actor_0002_")
    assert all(tensor.isfinite().all() for tensor in tensors_of(series.out / "hf_actor").values())

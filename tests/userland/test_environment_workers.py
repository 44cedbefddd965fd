"""The workers of a run for training and for each held-out data set."""

from contextlib import ExitStack

import psutil

from megappo.config.eval_sets import TRAINING, played_tasks
from megappo.config.schema import Config
from megappo.userland.environments import start_workers


def make_config(environments, **trainer: bool | int) -> Config:
    counts, plain = (f"{environments}:{name}" for name in ("Counts", "Plain"))
    datasets = {
        "as_training": {},
        "same": {"environment": counts, "reward": "gsm8k"},
        "other": {"environment": plain, "reward": "none"},
        "other_too": {"environment": plain, "reward": {"gsm8k": 1}},
        "single": {"environment": "none"},
    }
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train_files": ["f"]},
            "rollout": {"environment": counts, "num_environment_workers": 2},
            "trainer": {"output_dir": "o", **trainer},
            "eval": {"datasets": {name: {"files": ["f"], **own} for name, own in datasets.items()}},
        }
    )


def test_what_is_the_same_is_shared_and_what_nobody_uses_is_not_started(environments):
    before = set(psutil.Process().children(recursive=True))
    with ExitStack() as ending:
        found = start_workers(played_tasks(make_config(environments)), ending)
        started = set(psutil.Process().children(recursive=True)) - before
        training, same, other = found[TRAINING], found["same"], found["other"]
        assert found["as_training"] == training
        assert same.environments is training.environments and same.rewards is not training.rewards
        assert other.rewards is None and other.environments not in (None, training.environments)
        assert found["other_too"].environments is other.environments and found["other_too"].rewards is same.rewards
        assert found["single"].environments is None and found["single"].rewards is training.rewards
        assert [found[name].takes.raw_prompts for name in ("other", "single")] == [True, False]
        assert [found[name].takes.needed for name in ("other", "single")] == [("number",), ()]
    assert started and not any(process.is_running() for process in started)
    with ExitStack() as ending:
        found = start_workers(played_tasks(make_config(environments, eval_only=True, eval_interval=0)), ending)
        assert TRAINING not in found and found["as_training"].environments is found["same"].environments is not None


def test_a_run_that_never_evaluates_starts_no_workers_of_data_sets(environments):
    for never in ({"eval_interval": 0}, {"rollout_only": True, "eval_interval": 1}):
        assert list(played_tasks(make_config(environments, **never))) == [TRAINING]

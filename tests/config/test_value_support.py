"""The range of a value head's classes, by the keys of the rewards, and the keys that leave it open."""

import pytest

from megappo.config.checks import config_errors
from megappo.config.methods import ValueSupport
from megappo.config.schema import Config
from megappo.config.value_support import SCORE_BOUNDS, value_support
from megappo.userland.spec import BUILTIN

REWARDS = {
    "exact_match": ({}, [0.0, 0.5, 1.0]),
    "scaled": ({"function": "repetition", "scale": 4}, [-4.0, -2.0, 0.0]),
    "several": ({"function": {"gsm8k": 1, "think_answer": -0.5}}, [-0.5, 0.25, 1.0]),
    "clipped": ({"function": "http", "clip": 3}, [-3.0, 0.0, 3.0]),
    "clipped on one side": ({"function": "gsm8k", "scale": 10, "clip": 4}, [0.0, 2.0, 4.0]),
    "of a known and a clipped function": ({"function": {"math": 1, "http": -1}, "clip": 2}, [-2.0, 0.0, 2.0]),
}


def make_config(reward: dict, kl: bool = False, **critic: object) -> Config:
    sections = {"model": {"path": "m"}, "data": {"train_files": ["f"]}, "trainer": {"output_dir": "o"}}
    own = {"critic": {"value_loss": "two_hot", "value_bins": 3, **critic}, "algorithm": {"use_kl_in_reward": kl}}
    return Config.model_validate(sections | own | {"reward": reward})


@pytest.mark.parametrize("name", REWARDS)
def test_the_range_of_the_classes_follows_from_the_rewards(name: str) -> None:
    reward, centers = REWARDS[name]
    assert value_support(make_config(reward)) == ValueSupport(3, tuple(centers))
    assert not [error for error in config_errors(make_config(reward)) if "value_range" in error]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (make_config({}, kl=True), "algorithm.use_kl_in_reward true"),
        (make_config({"normalize": "batch"}), "reward.normalize batch"),
        (make_config({"length_penalty": "linear"}), "reward.length_penalty linear"),
        (make_config({"function": {"math": 1, "http": 1}}), "reward.function http"),
    ],
)
def test_a_range_that_the_keys_leave_open_must_be_set(config: Config, why: str) -> None:
    (error,) = (error for error in config_errors(config) if "value_range" in error)
    assert error == (
        f"critic.value_loss two_hot needs the range of the returns, which is unknown with {why}: set "
        "critic.value_range, such as [-0.1, 1.1] for scores from 0 to 1"
    )
    known = config.changed("critic.value_range", (-1.0, 3.0))
    assert value_support(known).centers == (-1.0, 1.0, 3.0)
    assert not [error for error in config_errors(known) if "value_range" in error]


def test_other_heads_need_no_range() -> None:
    assert value_support(make_config({}, kl=True, value_loss="quantile")) == ValueSupport(3)
    assert value_support(make_config({}, kl=True, value_loss="huber")) is None
    (error,) = make_config({}, value_range=(1.0, 0.0)).critic.contradictions()
    assert error == "critic.value_range [1.0, 0.0]: the first value must be below the last: exchange them"


def test_only_built_in_functions_have_known_bounds() -> None:
    assert SCORE_BOUNDS.keys() <= BUILTIN.keys()

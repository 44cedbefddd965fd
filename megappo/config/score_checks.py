"""Keys that do not go together with how and when responses get their scores."""

from collections.abc import Collection, Iterator

from megappo.config.config_error import Errors
from megappo.config.schema import Config


def shapings(config: Config) -> Iterator[str]:
    """Yield each key, with its value, that changes the score of a response and so cannot apply to parts of it."""
    reward = config.reward
    if reward.clip is not None:
        yield f"reward.clip {reward.clip}"
    if reward.normalize != "none":
        yield f"reward.normalize {reward.normalize}"


def num_scores_errors(config: Config, num_scores: int) -> list[str]:
    """Return an error if the method needs more scores of each response than reward.function returns."""
    if num_scores + config.has_reward_model > 1 or not config.algorithm.method.needs_score_components:
        return []
    return [
        f"reward.function {config.reward.function} returned one score per response, and algorithm.adv_estimator "
        f"{config.algorithm.adv_estimator} needs several: return a list of two or more for each response, or choose "
        "another estimator, such as grpo"
    ]


def metric_errors(config: Config, names: Collection[str]) -> list[str]:
    """Return an error if groups are filtered by a number that reward.function does not return beside a score."""
    groups = config.algorithm.filter_groups
    if not groups.enable or groups.metric in ("score", *names):
        return []
    return [
        f"algorithm.filter_groups.metric {groups.metric}: reward.function {config.reward.function} returns no such "
        f"number of a response: set one of {', '.join(['score', *names])}"
    ]


def step_scores_errors(config: Config, model: str = "") -> list[str]:
    """Return the keys that do not apply to the scores of steps, which reward.function returns, or a reward model."""
    giver = f"reward_model.model_path {model} gives: drop it"
    if not model:
        giver = f"reward.function {config.reward.function} gives (step_scores): drop it, and do it in the function"
    return [
        f"{shaping} changes the score of a response, not the scores of its steps, which {giver}"
        for shaping in shapings(config)
    ]


def late_scores_errors(config: Config, *, waits_for_all: bool) -> list[str]:
    """Return an error if a rollout is to end by its scores, and the function gives them when all is written."""
    over_samples = config.data.gen_batch_size is not None and config.algorithm.filter_groups.enable
    if not over_samples or not waits_for_all or config.rollout.runs_ahead:
        return []
    return [
        f"data.gen_batch_size {config.data.gen_batch_size} ends a rollout by the scores of the responses written so "
        f"far, but reward.function {config.reward.function} is called when all are written: set reward.batch_size, "
        "such as 1"
    ]


def reward_model_errors(config: Config) -> Errors:
    """Yield what needs scores before the reward model's forward pass, which is one of the whole step."""
    if not config.has_reward_model:
        return
    early = (
        ("algorithm.filter_groups.enable true chooses groups by their scores", config.algorithm.filter_groups.enable),
        (
            f"algorithm.adv_estimator {config.algorithm.adv_estimator} scores greedy responses, too",
            config.algorithm.method.needs_greedy_baseline,
        ),
        ("rollout.environment, tools and agents make episodes of several turns", config.rollout.has_episodes),
    )
    for reason, needs_scores in early:
        if needs_scores:
            yield (
                f"reward_model.model_path scores whole responses once per step, but {reason}: change it, or serve the "
                "reward model and set reward.function to engine"
            )

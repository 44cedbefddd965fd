"""The outputs of a run's value head, and the values that its classes stand for."""

from math import inf

from megappo.config.config_error import Errors
from megappo.config.methods import ValueSupport
from megappo.config.schema import Config

Bounds = tuple[float, float]

_GRADERS = ("exact_match", "regex_match", "multiple_choice", "gsm8k", "math", "think_answer", "code")
SCORE_BOUNDS: dict[str, Bounds] = dict.fromkeys(_GRADERS, (0.0, 1.0)) | {"repetition": (-1.0, 0.0)}
"""Built-in reward function -> its lowest and highest score."""
UNBOUNDED = (-inf, inf)


def value_support(config: Config) -> ValueSupport | None:
    """Return the outputs of the run's value head; None if it gives one number per token, the value."""
    critic = config.critic
    outputs = critic.method.outputs
    if not config.has_values or outputs == "value":
        return None
    if outputs == "quantiles":
        return ValueSupport(critic.value_bins)
    bounds = critic.value_range or return_bounds(config)
    if isinstance(bounds, str):  # reported by `value_range_errors`
        return None
    low, high = bounds
    last = critic.value_bins - 1
    centers = (low * (1 - i / last) + high * (i / last) for i in range(critic.value_bins))
    return ValueSupport(critic.value_bins, tuple(centers))


def return_bounds(config: Config) -> Bounds | str:
    """Return the lowest and the highest return of a response, or the keys that leave them open."""
    reward = config.reward
    are_given = not config.recipe.has_rollouts
    unknown = [name for name in reward.weights if name not in SCORE_BOUNDS and not are_given]
    open_keys = {
        "scores that files give": are_given and reward.clip is None,
        "algorithm.use_kl_in_reward true": config.penalizes_kl,
        "distillation.signal reward": config.distilled_at == "reward",
        "an environment or agent": config.rollout.has_episodes,
        f"reward.normalize {reward.normalize}": reward.normalize != "none",
        f"reward.length_penalty {reward.length_penalty}": reward.length_penalty != "none",
        "a reward model": config.has_reward_model and reward.clip is None,
        f"reward.function {', '.join(unknown)}": unknown and reward.clip is None,
    }
    if found := [key for key, leaves_open in open_keys.items() if leaves_open]:
        return " and ".join(found)
    # 0 is a return, too: far from the reward, with algorithm.gamma below 1.
    low, high = UNBOUNDED if are_given or config.has_reward_model else (0.0, 0.0)
    for name, weight in reward.weights.items():
        bounds = [reward.scale * weight * bound for bound in SCORE_BOUNDS.get(name, UNBOUNDED)]
        low, high = low + min(bounds), high + max(bounds)
    limit = inf if reward.clip is None else reward.clip
    return max(low, -limit), min(high, limit)


def value_range_errors(config: Config) -> Errors:
    """Yield an error if the critic's classes need a range that the config does not give."""
    critic = config.critic
    if critic.value_range is not None or critic.method.outputs != "classes" or not config.has_values:
        return
    bounds = return_bounds(config)
    if isinstance(bounds, str):
        yield (
            f"critic.value_loss {critic.value_loss} needs the range of the returns, which is unknown with {bounds}: "
            "set critic.value_range, such as [-0.1, 1.1] for scores from 0 to 1"
        )

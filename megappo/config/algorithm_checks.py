"""Keys of the method that contradict each other, or that the rest of the config leaves without effect."""

from collections.abc import Collection, Iterator

from megappo.config.describe import show
from megappo.config.errors import shorten
from megappo.config.eval_sets import eval_sets, tasks
from megappo.config.schema import Config


def algorithm_errors(config: Config) -> list[str]:
    """Every contradiction, one line each, naming the keys, their values and the remedy."""
    return [
        *_clipping(config),
        *_early_stop(config),
        *_groups(config),
        *_warmup(config),
        *_rewards(config),
        *_kl_controller(config),
        *_unbiased_kl(config),
        *_full_kl(config),
        *_correction(config),
        *_turns(config),
    ]


def _turns(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.gae_level == "turn" and not config.rollout.has_environment:
        yield "algorithm.gae_level turn needs several turns: name a rollout.environment or rollout.tools, or set token"
    if algorithm.mask_truncated and algorithm.bootstrap_truncated:
        yield "algorithm.mask_truncated and algorithm.bootstrap_truncated are both true: drop one"


def _clipping(config: Config) -> Iterator[str]:
    actor = config.actor
    key = "clip_ratio" if actor.clip_ratio_low is None else "clip_ratio_low"
    if actor.method.clips_below and getattr(actor, key) >= 1:
        yield f"actor.{key} {getattr(actor, key)} must be below 1: lower it, as the ratio is clipped to 1 - {key}"
    if "clip_cov_lb" in actor.method.reads and actor.clip_cov_lb >= actor.clip_cov_ub:
        yield f"actor.clip_cov_lb {actor.clip_cov_lb} must be below actor.clip_cov_ub {actor.clip_cov_ub}: lower it"


def _early_stop(config: Config) -> Iterator[str]:
    actor = config.actor
    num_steps = actor.ppo_epochs * actor.num_mini_batches(config.data.train_batch_size)
    if actor.target_kl is not None and num_steps == 1:
        yield (
            f"actor.target_kl {actor.target_kl} has nothing to skip: a step has one optimizer step only; drop "
            "it, or raise actor.ppo_epochs or lower actor.ppo_mini_batch_size"
        )


def _groups(config: Config) -> Iterator[str]:
    """What the responses to a prompt are compared for."""
    algorithm, reward = config.algorithm, config.reward
    estimator, normalize = f"algorithm.adv_estimator {algorithm.adv_estimator}", f"reward.normalize {reward.normalize}"
    for what, compares in ((estimator, algorithm.method.compares_responses), (normalize, reward.normalize == "group")):
        if compares and config.rollout.n < 2:
            found = f"rollout.n must be at least 2, found {config.rollout.n}"
            yield f"{what} compares the responses to a prompt: {found}"
    if algorithm.filter_groups.enable:
        yield from _filtered(config)
    if algorithm.method.needs_greedy_baseline and reward.normalize != "none":
        yield f"{normalize} would hide the greedy baseline that {estimator} subtracts: set it to none"
    if algorithm.method.needs_score_components and algorithm.use_kl_in_reward:
        yield (
            f"algorithm.use_kl_in_reward true has no effect, as {estimator} takes the scores one by one, not their "
            "sum: set it to false (actor.use_kl_loss true is the KL beside it)"
        )


def _filtered(config: Config) -> Iterator[str]:
    """What groups cannot be chosen of."""
    found, trainer = "algorithm.filter_groups.enable true", config.trainer
    if config.rollout.n < 2:
        yield f"{found} needs several responses to a prompt: set rollout.n to at least 2, found {config.rollout.n}"
    if config.algorithm.method.needs_greedy_baseline:
        estimator = config.algorithm.adv_estimator
        yield f"{found} has no greedy baselines, which algorithm.adv_estimator {estimator} needs: choose another one"
    if trainer.replay_rollouts is not None:
        yield f"{found} has no effect on trainer.replay_rollouts, whose groups were chosen before: drop it"


def num_scores_errors(config: Config, num_scores: int) -> list[str]:
    """Why the method cannot do with so many scores of each response; found once reward.function has been called."""
    if num_scores > 1 or not config.algorithm.method.needs_score_components:
        return []
    return [
        f"reward.function {config.reward.function} returned one score per response, and algorithm.adv_estimator "
        f"{config.algorithm.adv_estimator} needs several: return a list of two or more for each response, or choose "
        "another estimator, such as grpo"
    ]


def metric_errors(config: Config, names: Collection[str]) -> list[str]:
    """Why groups cannot be filtered by the numbers that reward.function, once called, returned beside a score."""
    groups = config.algorithm.filter_groups
    if not groups.enable or groups.metric in ("score", *names):
        return []
    return [
        f"algorithm.filter_groups.metric {groups.metric}: reward.function {config.reward.function} returns no such "
        f"number of a response: set one of {', '.join(['score', *names])}"
    ]


def step_scores_errors(config: Config) -> list[str]:
    """Why scores of steps do not go with the config; found once reward.function has been called."""
    return [
        f"{key} changes the score of a response, not those of its steps, which reward.function "
        f"{config.reward.function} gives (step_scores): drop it, and have the function do it"
        for key in _of_sums(config)
    ]


def _of_sums(config: Config) -> Iterator[str]:
    """What is set that changes a score, and so cannot be told of rewards of tokens that are part of it."""
    reward = config.reward
    for key in ("clip", "normalize"):
        if (value := getattr(reward, key)) != type(reward).model_fields[key].default:
            yield f"reward.{key} {show(value)}"


def late_scores_errors(config: Config, *, waits_for_all: bool) -> list[str]:
    """Why a rollout cannot end by its scores, which there are only when all is written; found once reward.function has
    been loaded."""
    over_samples = config.data.gen_batch_size is not None and config.algorithm.filter_groups.enable
    if not over_samples or not waits_for_all:
        return []
    return [
        f"data.gen_batch_size {config.data.gen_batch_size} ends a rollout by the scores of the responses written so "
        f"far, but reward.function {config.reward.function} is called when all are written: set reward.batch_size, "
        "such as 1"
    ]


def _warmup(config: Config) -> Iterator[str]:
    warmup, total = config.critic.warmup_steps, config.trainer.total_steps
    if config.has_critic and warmup >= total:
        yield (
            f"critic.warmup_steps {warmup} must be below trainer.total_steps {total}: lower it, else the actor never "
            "trains"
        )


def _rewards(config: Config) -> Iterator[str]:
    reward, limit = config.reward, config.rollout.max_response_length
    yield from _unscored(config)
    if reward.function is not None and not reward.weights:
        yield f"reward.function {reward.function} has no function of a weight but 0: name one"
    of_sets = (name for one in eval_sets(config).values() for name in one.reward.weights)
    for function in sorted(set(reward.options) - set(reward.weights) - set(of_sets)):
        named = ", ".join(reward.weights)
        yield f"reward.options are of {shorten(repr(function))}, which reward.function does not name: it names {named}"
    if config.rollout.environment is not None:
        for key in _of_sums(config):
            yield (
                f"{key} changes the sum of an episode's rewards, not those of its turns, which rollout.environment "
                "gives: drop it, and have the environment do it"
            )
    if reward.length_penalty == "overlong" and reward.overlong_buffer > limit:
        yield (
            f"reward.overlong_buffer {reward.overlong_buffer} is longer than rollout.max_response_length {limit}: "
            "shorten it"
        )


def _unscored(config: Config) -> Iterator[str]:
    """Where neither a function nor an environment gives a score; tools give none."""
    unscored = [one for one in tasks(config).values() if one.reward.function is None and not one.rollout.environment]
    own = [one for one in unscored if one.reward is not config.reward or one.rollout is not config.rollout]
    if len(own) < len(unscored):
        yield "reward.function null leaves responses without a score: name one, or a rollout.environment"
    for one in own:
        yield (
            f"{one.reward_key} and {one.environment_key} leave responses without a score: name a function, or an "
            "environment"
        )


def _kl_controller(config: Config) -> Iterator[str]:
    control = config.algorithm.kl_ctrl
    if control.type == "adaptive" and not control.kl_coef:
        yield "algorithm.kl_ctrl.kl_coef 0 stays 0 however adaptive multiplies it: start above 0"


def _unbiased_kl(config: Config) -> Iterator[str]:
    """The ratio corrects the gradient of an unbiased estimate that has not been corrected otherwise."""
    actor = config.actor
    if not actor.use_kl_loss or not actor.kl_loss_unbiased:
        return
    if actor.kl_loss_type not in ("k1", "k3", "kl", "low_var_kl"):
        yield f"actor.kl_loss_unbiased true needs actor.kl_loss_type k1 or k3, found {actor.kl_loss_type}: choose k3"
    if config.algorithm.preset == "nemo_rl":
        yield "actor.kl_loss_unbiased true and algorithm.preset nemo_rl both correct the KL's gradient: drop one"


def _full_kl(config: Config) -> Iterator[str]:
    """The reference's distribution is looked at by the actor's ranks, a micro-batch at a time."""
    if "full" not in config.kl_kinds:
        return
    in_reward = config.algorithm.use_kl_in_reward and config.algorithm.kl_penalty == "full"
    key = "algorithm.kl_penalty" if in_reward else "actor.kl_loss_type"
    if config.actor.parallel.pipeline > 1:
        yield (
            f"{key} full needs actor.parallel.pipeline 1, found {config.actor.parallel.pipeline}: the reference's "
            "logits must be where the actor's are; choose k3, or tensor instead of pipeline parallelism"
        )
    for other in ("parallel", "max_tokens_per_micro_batch"):
        if getattr(config.ref, other) not in (None, getattr(config.actor, other)):
            yield f"{key} full needs the reference laid out as the actor: drop ref.{other}"
    if config.placement.ref not in (None, config.placement.actor):
        yield f"{key} full needs the reference on the actor's ranks: drop placement.ref"


def _correction(config: Config) -> Iterator[str]:
    correction, section = config.algorithm.rollout_correction, "algorithm.rollout_correction"
    bounds = correction.reject_geometric
    if bounds is not None and not bounds[0] < 1 < bounds[1]:
        yield f"{section}.reject_geometric {list(bounds)} must enclose 1: set such as [0.999, 1.001]"
    for name, bound in correction.reject.items():
        low, high = bound if isinstance(bound, tuple) else (1 / bound, bound)
        if not name.endswith("k1") and isinstance(bound, tuple):
            yield f"{section}.reject {name} {list(bound)} must be one number, the largest {name[-2:]}: drop the lower"
        elif name.endswith("k1") and low > high:
            yield f"{section}.reject {name} {show(bound)} leaves no ratio: set two ascending bounds, or one above 1"
    lower, upper = correction.threshold_lower, correction.threshold
    if correction.level == "none":
        return
    if lower is not None and lower >= upper:
        yield f"{section}.threshold_lower {lower} must be below {section}.threshold {upper}: lower it"
    if correction.mode == "mask" and lower is None and upper <= 1:
        yield f"{section}.threshold {upper} must be above 1: raise it, as with mode mask the lower one is 1 / threshold"

"""Keys of a run's models that contradict each other: log-probs, layouts, adapters, and which of them are trained."""

from megappo.config.config_error import Errors, show
from megappo.config.methods import TRANSPORTS
from megappo.config.schema import Config
from megappo.config.value_support import value_range_errors


def model_errors(config: Config) -> Errors:
    """Yield the contradictions, a line each, with the keys, their values and the remedy."""
    yield from _old_log_probs_errors(config)
    yield from _kl_errors(config)
    yield from _teacher_errors(config)
    yield from critic_errors(config)
    yield from value_range_errors(config)
    yield from _adapter_errors(config)


def _old_log_probs_errors(config: Config) -> Errors:
    """Yield what needs other old log-probs than algorithm.old_log_probs names."""
    algorithm = config.algorithm
    actor = config.actor
    if algorithm.old_log_probs == "trainer":
        if actor.method.needs_engine_log_probs:
            yield (
                f"actor.policy_loss {actor.policy_loss} weights tokens by the ratio to the engine's log-probs, but "
                "algorithm.old_log_probs is trainer: set it to engine"
            )
        return
    needing = (
        ("KL kind full (algorithm.kl_penalty or distillation.kl_type)", config.has_full_kl, "choose k3"),
        ("algorithm.shared_backbone true", algorithm.shared_backbone, "set it to false"),
        ("rollout.sync.probe_interval 0", not config.rollout.sync.probe_interval and not config.replays, "set it to 1"),
    )
    for key, needs_pass, remedy in needing:
        if needs_pass:
            yield (
                f"{key} needs the actor's forward pass over the rollouts, which algorithm.old_log_probs engine leaves "
                f"out: {remedy}, or set algorithm.old_log_probs to trainer"
            )


def _kl_errors(config: Config) -> Errors:
    """Yield KL estimates that exclude each other, or the layout."""
    actor = config.actor
    if actor.use_kl_loss and actor.kl_loss_unbiased and config.algorithm.preset == "nemo_rl":
        yield "actor.kl_loss_unbiased true and algorithm.preset nemo_rl both correct the KL's gradient: drop one"
    section = config.full_kl_model
    if section is None:
        return
    other = config.value_at(section)
    ranks = "placement.ref" if section == "ref" else f"{section}.placement"
    kinds = "algorithm.kl_penalty or actor.kl_loss_type" if section == "ref" else "distillation.kl_type"
    same_layout = other.parallel in (None, actor.parallel) and actor.parallel.pipeline == 1
    same_batches = other.max_tokens_per_micro_batch in (None, actor.max_tokens_per_micro_batch)
    same_ranks = config.value_at(ranks) in (None, config.placement.actor)
    if not (same_layout and same_batches and same_ranks):
        yield (
            f"KL kind full ({kinds}) needs the logits of {section} where the actor's are: set actor.parallel.pipeline "
            f"to 1, and drop {ranks}, {section}.parallel and {section}.max_tokens_per_micro_batch, or choose k3"
        )


def _teacher_errors(config: Config) -> Errors:
    """Yield what a reference or teachers lack, or do not go together with."""
    frozen = {f"teachers.{name}": one for name, one in config.teachers.items()}
    for section, one in ({"ref": config.ref} | frozen).items():
        if one.adapter and one.dist_checkpointing_path:
            yield f"{section}.adapter and {section}.dist_checkpointing_path are both set: drop one"
    names = list(config.teachers)
    for name, teacher in config.teachers.items():
        if not teacher.when and name != names[-1]:
            yield f"teachers.{name} has no `when`, so that teachers after it have no row: put it last"
        if not teacher.url:
            continue
        if keys := teacher.model_dump(exclude_defaults=True).keys() - {"url", "when"}:
            yield f"teachers.{name}.url: the model is its server's: drop {' and '.join(sorted(keys))}"
        if config.rollout.temperature != 1:  # SGLang 0.5.23 divides the logits of sampled tokens alone
            yield f"teachers.{name}.url: servers return log-probs at temperature 1: set rollout.temperature to 1"
        if config.distillation.kl_kind == "full":
            yield (
                f"teachers.{name}.url: servers return log-probs of given tokens alone, but distillation.kl_type full "
                "compares the whole vocabulary: set it to k1 (for the loss k1+) or k3, or model_path in place of url"
            )
    if not names:
        return
    settings = config.distillation
    method = config.algorithm.method
    if settings.kl_kind == "full" and (len(names) > 1 or "full" in config.kl_kinds):
        yield (
            "distillation.kl_type full compares the actor's logits with one model's: keep one of teachers, and choose "
            "other kinds than full for algorithm.kl_penalty and actor.kl_loss_type, or set it to k3"
        )
    if settings.signal != "reward" and config.recipe.trains == "critic":
        yield (
            f"distillation.signal {settings.signal} teaches the actor, which trainer.train [critic] leaves as it is: "
            "set it to reward"
        )
    if settings.signal == "reward" and config.algorithm.gae_level == "turn" and method.needs_values:
        yield (
            "distillation.signal reward is a reward of each token, but with algorithm.gae_level turn a turn has one "
            "reward: set algorithm.gae_level to token, or distillation.signal to advantage"
        )
    if not settings.task_reward:
        yield from _uses_of_scores(config)
    takes_scores = method.needs_score_components and (settings.signal == "reward" or not settings.task_reward)
    if takes_scores or (method.needs_greedy_baseline and not settings.task_reward):
        yield (
            f"algorithm.adv_estimator {config.algorithm.adv_estimator} takes scores of the reward section, not rewards "
            "of tokens: set distillation.signal to advantage or loss and distillation.task_reward to true, or choose "
            "gae or reinforce_plus_plus"
        )
    has_scores = config.reward.function is not None or config.rollout.has_episodes or config.has_reward_model
    needing = {
        "distillation.without_teacher reward": settings.without_teacher == "reward",
        "algorithm.filter_groups.enable true": config.algorithm.filter_groups.enable,
    }
    for key, needs_scores in needing.items():
        if needs_scores and not has_scores:
            yield f"{key} needs scores, but reward.function is null: name a function, or drop it"


def _uses_of_scores(config: Config) -> Errors:
    """Yield the keys by which scores matter that distillation.task_reward false only logs."""
    uses = {
        "algorithm.filter_groups.enable true": config.algorithm.filter_groups.enable,
        f"actor.positive_nll_coef {config.actor.positive_nll_coef}": config.actor.positive_nll_coef,
        f"reward.normalize {config.reward.normalize}": config.reward.normalize in ("running", "batch"),
    }
    for key, is_used in uses.items():
        if is_used:
            yield (
                f"{key} uses the scores of all rows, which distillation.task_reward false only logs: drop it, or set "
                "distillation.task_reward to true"
            )


def critic_errors(config: Config) -> Errors:
    """Yield what a run that trains a critic alone lacks."""
    if config.recipe.trains != "critic":
        return
    if config.has_full_kl:
        yield (
            "a KL of kind full (algorithm.kl_penalty or distillation.kl_type) needs the actor's forward pass, which a "
            "run that trains a critic alone leaves out: choose k1 or k3"
        )
    trainer = config.trainer
    algorithm = config.algorithm
    if not config.has_critic:
        yield (
            f"algorithm.adv_estimator {algorithm.adv_estimator} and algorithm.shared_backbone "
            f"{show(algorithm.shared_backbone)} leave this run, which trains a critic alone, without one: set them to "
            "gae and false"
        )
    if trainer.replay_held_out is not None and not config.replays:
        yield "trainer.replay_held_out needs trainer.replay_rollouts, as engines sample held-out prompts: drop it"
    samples_held_out = bool(config.data.val_files) and not config.replays
    if config.critic.gate is not None and not (config.eval_interval and (samples_held_out or trainer.replay_held_out)):
        yield (
            "critic.gate is checked on held-out rollouts: name data.val_files (with trainer.replay_rollouts: "
            "trainer.replay_held_out), and set trainer.eval_interval above 0"
        )
    if config.recipe.has_rollouts:
        return
    yield from value_range_errors(config)
    if config.reward.normalize == "group":
        yield (
            "reward.normalize group compares the responses to a prompt, but each trajectory of data.train_files is "
            "taken alone: set it to running, batch or none"
        )


def _adapter_errors(config: Config) -> Errors:
    """Yield what engines do not support of the actor's adapters.

    Source: SGLang 0.5.23, lora/lora.py: the adapters of q, k and v become one, and the adapters of gate and up; only
        the adapters of k and of up may be missing.
    """
    lora = config.sent_lora
    sync = config.rollout.sync
    if lora is None or config.trainer.replay_rollouts is not None:
        return
    given = set(lora.modules)
    lacks_attention = given & {"q_proj", "k_proj", "v_proj"} and not given >= {"q_proj", "v_proj"}
    if lacks_attention or ("up_proj" in given and "gate_proj" not in given):
        yield (
            f"actor.lora.target_modules {', '.join(lora.modules)}: SGLang serves q_proj and v_proj together only, "
            "k_proj with these only, and up_proj with gate_proj only: name them, too"
        )
    if sync.transport in TRANSPORTS and TRANSPORTS[sync.transport].adapters is None:
        yield f"rollout.sync.transport {sync.transport} sends whole models, not actor.lora's adapters: set it to auto"
    if sync.bucket_bytes is not None:
        yield f"rollout.sync.bucket_bytes {sync.bucket_bytes} has no effect on adapters, sent at once: drop it"

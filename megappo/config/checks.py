"""Keys that contradict each other or that nothing reads, found without a world size and without opening a file.

Contradictions within one section stand beside its keys, as do the conditions under which a key is read.
"""

import re
from collections.abc import Iterator, Sequence
from operator import attrgetter

from megappo.config.config_error import Errors, shorten, show
from megappo.config.eval_sets import TRAINING, Task, context_errors, eval_sets, tasks, training_task
from megappo.config.kind_checks import example_errors, hang_errors, offload_errors, size_errors
from megappo.config.model_checks import critic_errors, model_errors
from megappo.config.recipes import RECIPES
from megappo.config.schema import Config
from megappo.config.score_checks import reward_model_errors, shapings
from megappo.config.values import LARGEST_PORT, TABLE_NAME, ReadIf, Section

ADDRESS = re.compile(r"https?://(?:[\w.-]+|\[[\da-fA-F:.]+\]):\d{1,5}", re.ASCII)
USUAL = {
    "actor.optim.lr": (0, 0.01, "Adam takes 1e-7 to 1e-4 for a language model"),
    "critic.optim.lr": (0, 0.01, "Adam takes 1e-7 to 1e-4 for a language model"),
    "actor.entropy_coeff": (0, 0.1, "the bonus makes responses random"),
    "actor.kl_loss_coef": (0, 1, "the KL loss outweighs the policy's"),
    "algorithm.kl_ctrl.kl_coef": (0, 1, "the penalty outweighs scores of 0 to 1"),
    "algorithm.gamma": (0.9, 1, "a reward is forgotten within some tokens"),
    "rollout.temperature": (0.1, 2, "responses are sampled at about 1"),
    "rollout.top_p": (0.5, 1, "most of the policy's distribution is never sampled"),
}
"""Key -> lowest and highest usual value, and the reason to doubt others."""


def config_errors(config: Config) -> list[str]:
    """Return every contradiction, one line each, with the keys, their values and the remedy."""
    unread = [f"{key} {shorten(show(value))} {reason}" for key, value, reason in unread_keys(config)]
    errors = [*_section_errors(config), *unread, *hang_errors(config), *size_errors(config)]
    errors += [*offload_errors(config), *_name_errors(config)]
    if not config.recipe.has_rollouts:
        return [*errors, *example_errors(config), *critic_errors(config)]
    errors += [
        *_group_errors(config),
        *model_errors(config),
        *_run_errors(config),
        *_engine_errors(config),
        *_ahead_errors(config),
        *_reward_errors(config),
        *reward_model_errors(config),
    ]
    for name, task in tasks(config).items():
        errors += _task_errors(task)
        if name != TRAINING:
            errors += _greedy_errors(name, task)
    return list(dict.fromkeys(errors))  # tasks may share keys


def config_warnings(config: Config) -> Iterator[str]:
    """Yield a line for each value that is most probably a mistake; the dry run prints them."""
    for key, (low, high, reason) in USUAL.items():
        value = attrgetter(key)(config)
        if not low <= value <= high:
            yield f"{key} {value} is unusual: {reason}"
    tolerance = config.rollout.sync.probe_tolerance
    if config.model.dtype == "bf16" and tolerance < 0.005:
        yield (
            f"rollout.sync.probe_tolerance {tolerance} is unusual: in bf16 engine and trainer differ by about 0.01 to "
            "0.05 on average, so that the run may stop at its first probe; 1e-3 is for model.dtype fp32"
        )
    algorithm = config.algorithm
    compares = algorithm.rollout_correction.is_on or algorithm.old_log_probs == "engine"
    for name, whole in {"top_p": 1.0, "top_k": -1}.items():
        value = getattr(config.rollout, name)
        if value != whole and compares:
            yield (
                f"rollout.{name} {value} is unusual with the engine's log-probs (algorithm.rollout_correction, "
                "algorithm.old_log_probs engine): they are of the whole distribution, but tokens are drawn from a part "
                f"of it, so that ratios of trainer and engine are off; set it to {whole:g}"
            )
    if config.actor.use_kl_loss and config.algorithm.use_kl_in_reward:
        yield (
            "actor.use_kl_loss true is unusual: the KL to the reference is in the rewards already; set "
            "algorithm.use_kl_in_reward to false to count it once"
        )


def _section_errors(section: Section) -> Errors:
    """Yield the contradictions within a section, and within the sections in it."""
    yield from section.contradictions()
    for _, value in section:
        if isinstance(value, Section):
            yield from _section_errors(value)


def unread_keys(config: Config) -> Iterator[tuple[str, object, str]]:
    """Yield each key that is not at its default and that nothing reads, its value, and the reason with its remedy.

    A base may hold keys of a method that the file above it, or the command line, does not choose.
    """
    yield from _unread(config, config, "", ())


def _unread(
    config: Config,
    section: Section,
    path: str,
    above: tuple[ReadIf, ...],
    is_optional: bool = False,
) -> Iterator[tuple[str, object, str]]:
    """Yield the unread keys of a section; of a section that is null by default, only keys that were written."""
    for name, field in type(section).model_fields.items():
        key = path + name
        value = getattr(section, name)
        own = tuple(item for item in field.metadata if isinstance(item, ReadIf))
        conditions = (*above, *_method_conditions(section, path, name), *own)
        is_set = name in section.model_fields_set if is_optional else value != field.default
        if isinstance(value, Section) and (field.default is not None or value.model_fields_set):
            yield from _unread(config, value, f"{key}.", conditions, is_optional or field.default is None)
        elif is_set:
            if not _is_named(key, config):
                conditions = (ReadIf("trainer.kind", lambda _: False),)
            unmet = next((one for one in conditions if _is_unread(config, key, one)), None)
            if unmet is not None:
                switch = unmet.switch
                reason = unmet.reason.format(switch, show(attrgetter(switch)(config)).strip('"'))
                yield key, value, f"has no effect, as {reason}: drop it, or change {switch}"


def _is_named(key: str, config: Config) -> bool:
    """Return whether the run's recipe names a key, or none does."""
    return config.recipe.names(key) or not any(recipe.names(key) for recipe in RECIPES.values())


def _is_unread(config: Config, key: str, condition: ReadIf) -> bool:
    """Return whether a condition keeps a key from being read; a base that sets the key is excused (`overrides`)."""
    if condition.is_read(config) or not set(condition.always).isdisjoint(key.split(".")):
        return False
    return not config.overrides(key, (condition.switch, *condition.others))


def _method_conditions(section: Section, path: str, name: str) -> tuple[ReadIf, ...]:
    """Return the condition that the chosen method reads a key, if only some methods of the section do."""
    if not any(name in method.reads for method in section.methods.values()):
        return ()
    chosen = section.methods[getattr(section, section.method_key)]
    return (ReadIf(path + section.method_key, lambda config: name in chosen.reads, "{} {} does not read it"),)


def _group_errors(config: Config) -> Errors:
    """Yield what the comparison of the responses to a prompt, or of a response with a greedy one, does not allow."""
    algorithm = config.algorithm
    normalize = config.reward.normalize
    filters = algorithm.filter_groups.enable
    estimator = f"algorithm.adv_estimator {algorithm.adv_estimator}"
    comparing = (
        (estimator, algorithm.method.compares_responses),
        ("reward.normalize group", normalize == "group"),
        ("algorithm.filter_groups.enable true", filters),
    )
    for key, compares in comparing:
        if compares and config.rollout.n == 1:
            yield f"{key} compares the responses to a prompt: rollout.n must be at least 2, found 1"
    if algorithm.method.needs_greedy_baseline and (filters or normalize != "none"):
        yield (
            f"{estimator} subtracts greedy baselines, which reward.normalize {normalize} or "
            "algorithm.filter_groups.enable would hide: set them to none and false"
        )
    by_turn = {
        "algorithm.gae_level turn": (algorithm.gae_level == "turn", "token"),
        f"actor.policy_loss {config.actor.policy_loss}": (config.actor.method.needs_turns, "clip"),
    }
    for key, (is_set, other) in by_turn.items():
        if is_set and not config.rollout.has_episodes:
            named = "a rollout.environment, rollout.tools or a rollout.agent"
            yield f"{key} needs several turns: name {named}, or set {other}"


def _run_errors(config: Config) -> Errors:
    trainer = config.trainer
    actor = config.actor
    warmup = config.critic.warmup_steps
    if actor.target_kl is not None and actor.num_updates(config.data.train_batch_size) == 1:
        yield (
            f"actor.target_kl {actor.target_kl} has nothing to skip: a step has one optimizer step only; drop it, or "
            "raise actor.ppo_epochs or lower actor.ppo_mini_batch_size"
        )
    ensemble = config.critic.ensemble
    if config.has_critic and ensemble > config.rollout.n:
        yield (
            f"critic.ensemble {ensemble} critics divide the responses to each prompt, of which there are "
            f"{config.rollout.n}: raise rollout.n to {ensemble} or more, or lower critic.ensemble"
        )
    buffer = config.reward.overlong_buffer
    length = config.rollout.max_response_length
    if config.reward.length_penalty == "overlong" and buffer > length:
        yield f"reward.overlong_buffer {buffer} is longer than rollout.max_response_length {length}: shorten it"
    if config.has_critic and config.trains_actor and warmup >= trainer.total_steps:
        yield (
            f"critic.warmup_steps {warmup} must be below trainer.total_steps {trainer.total_steps}: lower it, or set "
            "trainer.train to [critic] to train a critic alone"
        )
    if config.eval_interval > 0 and config.replays and trainer.replay_held_out is None:
        yield (
            "trainer.replay_rollouts starts no engines, which the evaluation on data.val_files needs: set "
            "trainer.eval_interval to 0"
        )
    has_held_out = config.held_out_names or trainer.replay_held_out is not None
    if (trainer.eval_interval or not config.recipe.has_steps) and not has_held_out:
        key = "eval_interval" if config.recipe.has_steps else "eval_only"
        yield f"trainer.{key} needs data.val_files or eval.datasets, found none: name some, or drop it"


def _engine_errors(config: Config) -> Errors:
    rollout = config.rollout
    if rollout.max_total_tokens is not None:
        yield from context_errors(config, "rollout.max_total_tokens", rollout.max_total_tokens)
    yield from _address_errors("rollout.engines", rollout.engines, "MEGAPPO_ENGINE_API_KEY")
    for name, teacher in config.teachers.items():
        yield from _address_errors(f"teachers.{name}.url", teacher.url, "MEGAPPO_TEACHER_API_KEY")


def _address_errors(key: str, urls: Sequence[str], variable: str) -> Errors:
    """Yield what is no address of a server, or stands twice; `variable` of the environment has the servers' key."""
    servers = [url.lower() for url in urls]
    for url in dict.fromkeys(servers):
        if not ADDRESS.fullmatch(url) or not 0 < int(url.rpartition(":")[2]) <= LARGEST_PORT:
            yield (
                f"{key}: {shorten(re.sub('//.*@', '//', url))} is not an address such as "
                "http://10.0.0.7:30000: write scheme, host and port alone, and put a key into the environment variable "
                f"{variable}"
            )
        elif servers.count(url) > 1:
            yield f"{key} names {url} {servers.count(url)} times: drop the others, or correct them"


def _ahead_errors(config: Config) -> Errors:
    """Yield what does not go together with sampling while the models train."""
    if not config.rollout.runs_ahead:
        return
    ahead = f"rollout.max_staleness {config.rollout.max_staleness}"
    if not config.recipe.trains and config.recipe.has_steps:
        yield f"trainer.rollout_only trains no weights that {ahead} could run ahead of: set it to 0"
    if config.sent_lora is not None and config.rollout.on_sync == "continue":
        yield (
            f"{ahead} with actor.lora: an engine does not take an adapter while it uses the one before: set "
            "rollout.on_sync to finish, or rollout.sync.merge_adapters to true"
        )


def _name_errors(config: Config) -> Errors:
    """Yield held-out data sets that could not be reported under a name of their own."""
    names = config.data.val_names
    if len(set(names)) < len(names):
        yield f"data.val_files: each is reported under its own name, so rename or merge equal ones: {', '.join(names)}"
    for name in config.eval.datasets:
        if not TABLE_NAME.fullmatch(name) or name in names:
            yield (
                f"eval.datasets: {shorten(repr(name))} is not a valid name, or is taken by one of data.val_files: "
                "choose another, of letters, digits, _ and - alone"
            )


def _reward_errors(config: Config) -> Errors:
    every_task = (training_task(config), *eval_sets(config).values())
    functions = {function for one in every_task for function in one.reward.weights}
    for function in sorted(config.reward.options.keys() - functions):
        yield (
            f"reward.options names {shorten(repr(function))}, but reward.function does not (it names "
            f"{', '.join(sorted(functions))}): correct the name, or drop it"
        )
    if config.rollout.environment is not None or config.rollout.has_agent:
        for shaping in shapings(config):
            yield (
                f"{shaping} changes the sum of an episode's rewards, not the rewards of its turns, which an "
                "environment or an agent gives: drop it, and do it there"
            )


def _task_errors(task: Task) -> Errors:
    """Yield contradictions between the keys of training, or of a held-out data set."""
    section = task.environment_key.rpartition(".")[0]
    rollout = task.rollout
    reward = task.reward
    data = task.data
    if len(rollout.players) > 1:
        keys = " and ".join(f"{section}.{player}" for player in rollout.players)
        yield f"{keys} are both set: keep one; an environment or an agent makes its own calls"
    if rollout.tools and rollout.tool_call_parser is None:
        yield f"{section}.tools needs rollout.tool_call_parser: name SGLang's for the model, such as qwen25"
    if rollout.has_episodes and data.too_long == "truncate_left":
        yield "data.too_long truncate_left would cut an episode's first messages: set it to skip"
    gives_rewards = rollout.environment is not None or rollout.has_agent
    if reward.function is None and not (gives_rewards or task.has_reward_model or task.has_teachers):
        keys = f"{task.reward_key} and {task.environment_key}"
        yield f"{keys} leave responses without a score: name a function, an environment or an agent"
    if reward.function is not None and not reward.weights:
        yield f"{task.reward_key} {reward.function} names no function with a weight other than 0: name one"
    if data.prompt_key == data.label_key:
        keys = f"{task.section}.prompt_key and {task.section}.label_key"
        yield f"{keys} are both '{data.label_key}': name two different fields"


def _greedy_errors(name: str, task: Task) -> Errors:
    rollout = task.rollout
    if rollout.n > 1 and (rollout.temperature == 0 or rollout.top_k == 1):
        key = "rollout.val_n" if task.section == "data" else f"{task.section}.n"
        yield (
            f"{key} {rollout.n} requests the same response to each prompt of {name} as many times, with temperature "
            f"{rollout.temperature:g} and top_k {rollout.top_k}: raise rollout.val_temperature (or the one of the data "
            f"set), or set {key} to 1"
        )

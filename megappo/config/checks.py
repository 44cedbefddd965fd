"""Keys of different sections that contradict each other, found without a world size and without opening a file.

Rules within one section stand beside its keys, as do the conditions under which a key is read.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from megappo.config.config_error import shorten, show
from megappo.config.data_section import NONE
from megappo.config.eval_sets import EvalSet, context_errors, deciding_key, eval_sets, tasks
from megappo.config.schema import Config
from megappo.config.section import KeyRule, ReadIf, Section, Usual
from megappo.config.transports import TRANSPORTS
from megappo.config.values import LARGEST_PORT

ADDRESS = re.compile(r"https?://(?:[\w.-]+|\[[\da-fA-F:.]+\]):(\d{1,5})", re.ASCII)
DATASET_NAME = re.compile(r"[A-Za-z0-9_-]+")
"""Name in eval.datasets: a part of keys and of metrics."""
FULL_KL = "KL kind full (algorithm.kl_penalty or actor.kl_loss_type) needs"

RULES: tuple[KeyRule[Config], ...] = (
    KeyRule(
        lambda run: run.algorithm.gae_level == "turn" and not run.rollout.has_environment,
        "algorithm.gae_level turn needs several turns: name a rollout.environment or rollout.tools, or set token",
    ),
    KeyRule(
        lambda run: run.algorithm.method.compares_responses and run.rollout.n < 2,
        "algorithm.adv_estimator {algorithm.adv_estimator} compares the responses to a prompt: rollout.n must be at "
        "least 2, found {rollout.n}",
    ),
    KeyRule(
        lambda run: run.reward.normalize == "group" and run.rollout.n < 2,
        "reward.normalize group compares the responses to a prompt: rollout.n must be at least 2, found {rollout.n}",
    ),
    KeyRule(
        lambda run: run.algorithm.method.needs_greedy_baseline and run.reward.normalize != "none",
        "reward.normalize {reward.normalize} would hide the greedy baseline that algorithm.adv_estimator "
        "{algorithm.adv_estimator} subtracts: set it to none",
    ),
    KeyRule(
        lambda run: run.algorithm.filter_groups.enable and run.rollout.n < 2,
        "algorithm.filter_groups.enable true needs several responses to a prompt: set rollout.n to at least 2, found "
        "{rollout.n}",
    ),
    KeyRule(
        lambda run: run.algorithm.filter_groups.enable and run.algorithm.method.needs_greedy_baseline,
        "algorithm.filter_groups.enable true has no greedy baselines, which algorithm.adv_estimator "
        "{algorithm.adv_estimator} needs: choose another one",
    ),
    KeyRule(
        lambda run: run.algorithm.filter_groups.enable and run.trainer.replay_rollouts is not None,
        "algorithm.filter_groups.enable true has no effect on trainer.replay_rollouts, whose groups were chosen "
        "before: drop it",
    ),
    KeyRule(
        lambda run: run.actor.use_kl_loss and run.actor.kl_loss_unbiased and run.algorithm.preset == "nemo_rl",
        "actor.kl_loss_unbiased true and algorithm.preset nemo_rl both correct the KL's gradient: drop one",
    ),
    KeyRule(
        lambda run: (
            run.actor.target_kl is not None
            and run.actor.ppo_epochs * run.actor.num_mini_batches(run.data.train_batch_size) == 1
        ),
        "actor.target_kl {actor.target_kl} has nothing to skip: a step has one optimizer step only; drop it, or raise "
        "actor.ppo_epochs or lower actor.ppo_mini_batch_size",
    ),
    KeyRule(
        lambda run: run.has_critic and run.critic.warmup_steps >= run.trainer.total_steps,
        "critic.warmup_steps {critic.warmup_steps} must be below trainer.total_steps {trainer.total_steps}: lower it, "
        "else the actor never trains",
    ),
    KeyRule(
        lambda run: (
            run.reward.length_penalty == "overlong" and run.reward.overlong_buffer > run.rollout.max_response_length
        ),
        "reward.overlong_buffer {reward.overlong_buffer} is longer than rollout.max_response_length "
        "{rollout.max_response_length}: shorten it",
    ),
    KeyRule(
        lambda run: "full" in run.kl_kinds and run.actor.parallel.pipeline > 1,
        f"{FULL_KL} actor.parallel.pipeline 1, found {{actor.parallel.pipeline}}: the reference's logits must be where "
        "the actor's are; choose k3, or tensor instead of pipeline parallelism",
    ),
    KeyRule(
        lambda run: "full" in run.kl_kinds and run.ref.parallel not in (None, run.actor.parallel),
        f"{FULL_KL} the reference laid out as the actor: drop ref.parallel",
    ),
    KeyRule(
        lambda run: (
            "full" in run.kl_kinds
            and run.ref.max_tokens_per_micro_batch not in (None, run.actor.max_tokens_per_micro_batch)
        ),
        f"{FULL_KL} the actor's micro-batches: drop ref.max_tokens_per_micro_batch",
    ),
    KeyRule(
        lambda run: "full" in run.kl_kinds and run.placement.ref not in (None, run.placement.actor),
        f"{FULL_KL} the reference on the actor's ranks: drop placement.ref",
    ),
    KeyRule(
        lambda run: run.actor.lora is not None and run.model.layer_spec != "torch",
        "actor.lora needs model.layer_spec torch, found {model.layer_spec}: set it, as the inputs of "
        "TransformerEngine's layers are not visible outside",
    ),
    KeyRule(
        lambda run: run.has_critic and run.critic.lora is not None and run.model.layer_spec != "torch",
        "critic.lora needs model.layer_spec torch, found {model.layer_spec}: set it, as the inputs of "
        "TransformerEngine's layers are not visible outside",
    ),
    KeyRule(
        lambda run: run.data.gen_batch_size is not None and run.replays,
        "data.gen_batch_size {data.gen_batch_size} has no effect on trainer.replay_rollouts, whose groups were chosen "
        "before: drop it",
    ),
    KeyRule(
        lambda run: run.eval_interval > 0 and run.replays,
        "trainer.replay_rollouts starts no engines, which the evaluation on data.val_files needs: set "
        "trainer.eval_interval to 0",
    ),
    KeyRule(
        lambda run: bool(run.trainer.eval_interval) and not run.held_out_names,
        "trainer.eval_interval {trainer.eval_interval} needs data.val_files, found none: name some, or set "
        "trainer.eval_interval to null",
    ),
    KeyRule(
        lambda run: run.trainer.eval_only and not run.held_out_names,
        "trainer.eval_only needs data.val_files or eval.datasets, found none: name some",
    ),
    KeyRule(
        lambda run: run.hang_timeout_seconds >= run.trainer.process_group_timeout_seconds,
        "trainer.hang_timeout_seconds {trainer.hang_timeout_seconds:g} must be below "
        "trainer.process_group_timeout_seconds {trainer.process_group_timeout_seconds:g}, which would end a run that "
        "hangs before its ranks have logged their stacks: lower it, or raise that",
    ),
)
"""Contradictions, whatever the method."""

WARNINGS: tuple[KeyRule[Config], ...] = (
    KeyRule(
        lambda run: run.model.dtype == "bf16" and run.rollout.sync.probe_tolerance < 0.005,
        "rollout.sync.probe_tolerance {rollout.sync.probe_tolerance} is unusual: in bf16 engine and trainer differ by "
        "about 0.01 to 0.05 on average, so that the run may stop at its first probe; 1e-3 is for model.dtype fp32",
    ),
    KeyRule(
        lambda run: run.actor.use_kl_loss and run.algorithm.use_kl_in_reward,
        "actor.use_kl_loss True is unusual: the KL to the reference is in the rewards already; set "
        "algorithm.use_kl_in_reward to false to count it once",
    ),
)
"""Values that are allowed and most probably a mistake."""


def config_errors(config: Config) -> list[str]:
    """Return every contradiction, one line each, with the keys, their values and the remedy."""
    return [
        *_broken(RULES, config),
        *_broken_in(config),
        *unread_errors(config),
        *_rewards(config),
        *_episodes(config),
        *_engines(config),
        *_engine_adapters(config),
        *_evaluations(config),
    ]


def config_warnings(config: Config) -> Iterator[str]:
    """Yield a line for each value that is most probably a mistake; the dry run prints them."""
    yield from _broken(WARNINGS, config)
    for set_key in _set_keys(config):
        for item in set_key.metadata:
            if isinstance(item, Usual) and not item.low <= set_key.value <= item.high:
                yield f"{set_key.key} {set_key.value} is unusual: {item.reason}"


def unread_errors(config: Config) -> Iterator[str]:
    """Yield an error for each key that is not at its default and that nothing reads.

    A base may hold keys of a method that the file above it, or the command line, does not choose.
    """
    for set_key in _set_keys(config):
        name = set_key.key.rpartition(".")[2]
        for condition in set_key.conditions:
            is_read = condition.holds(config) or name in condition.always
            if not is_read and not config.is_below(set_key.key, condition.switches):
                switch = condition.switches[0]
                reason = condition.reason.format(switch, show(attrgetter(switch)(config)).strip('"'))
                shown = shorten(show(set_key.value))
                yield f"{set_key.key} {shown} has no effect, as {reason}: drop it, or change {switch}"
                break


@dataclass(frozen=True)
class SetKey:
    """A key that is not at its default, and the conditions under which it is read."""

    key: str
    value: Any
    metadata: list[Any]
    conditions: tuple[ReadIf, ...]


def _set_keys(section: Section, path: str = "", above: tuple[ReadIf, ...] = ()) -> Iterator[SetKey]:
    for name, field in type(section).model_fields.items():
        key, value = path + name, getattr(section, name)
        own = tuple(item for item in field.metadata if isinstance(item, ReadIf))
        conditions = above + _method_conditions(section, path, name) + own
        if isinstance(value, Section) and field.default is not None:
            yield from _set_keys(value, f"{key}.", conditions)
        elif value != field.default:
            yield SetKey(key, value, field.metadata, conditions)


def _method_conditions(section: Section, path: str, name: str) -> tuple[ReadIf, ...]:
    """Return the condition that the chosen method reads a key, if only some methods of the section do."""
    if not any(name in method.reads for method in section.methods.values()):
        return ()
    chosen = section.methods[getattr(section, section.method_key)]
    return (ReadIf((path + section.method_key,), lambda run: name in chosen.reads, "{} {} does not read it"),)


def _broken(rules: tuple[KeyRule[Config], ...], config: Config) -> Iterator[str]:
    for rule in rules:
        yield from rule.errors(config)


def _broken_in(section: Section) -> Iterator[str]:
    """Yield the errors of the rules that stand beside the keys of a section, and of the sections in it."""
    for rule in section.rules:
        yield from rule.errors(section)
    for _, value in section:
        if isinstance(value, Section):
            yield from _broken_in(value)


def _rewards(config: Config) -> Iterator[str]:
    reward = config.reward
    unscored = [one for one in tasks(config).values() if one.reward.function is None and not one.rollout.environment]
    for keys in dict.fromkeys((one.reward_key, one.environment_key) for one in unscored):
        yield f"{' and '.join(keys)} leave responses without a score: name a function, or an environment"
    of_sets = [name for one in eval_sets(config).values() for name in one.reward.weights]
    for function in sorted(set(reward.options) - set(reward.weights) - set(of_sets)):
        named = ", ".join(reward.weights)
        yield f"reward.options are of {shorten(repr(function))}, which reward.function does not name: it names {named}"


def _shapings(config: Config) -> Iterator[str]:
    """Yield each key, with its value, that changes the score of a response and so cannot apply to parts of it."""
    reward = config.reward
    if reward.clip is not None:
        yield f"reward.clip {reward.clip}"
    if reward.normalize != "none":
        yield f"reward.normalize {show(reward.normalize)}"


def _episodes(config: Config) -> Iterator[str]:
    found = tasks(config).values()
    with_tools = [one.environment_key for one in found if one.rollout.tools]
    if with_tools and config.rollout.tool_call_parser is None:
        yield f"{with_tools[0]} needs rollout.tool_call_parser: name SGLang's for the model, such as qwen25"
    if any(one.rollout.has_environment for one in found) and config.data.too_long == "truncate_left":
        yield "data.too_long truncate_left would cut an episode's first messages: set it to skip"
    if config.rollout.environment is not None:
        for shaping in _shapings(config):
            yield (
                f"{shaping} changes the sum of an episode's rewards, not those of its turns, which rollout.environment "
                "gives: drop it, and have the environment do it"
            )


def _engines(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.max_total_tokens is not None:
        yield from context_errors(config, "rollout.max_total_tokens", rollout.max_total_tokens, "raise it")
    for url in rollout.engines:
        parts = ADDRESS.fullmatch(url)
        if parts is None or not 0 < int(parts[1]) <= LARGEST_PORT:
            shown = shorten(repr(re.sub("//.*@", "//...@", url)))
            yield (
                f"rollout.engines: {shown} is not the address of a server: write one such as http://10.0.0.7:30000, "
                "and put a key into the environment variable MEGAPPO_ENGINE_API_KEY"
            )
    urls = [url.lower() for url in rollout.engines]
    for url in sorted({url for url in urls if urls.count(url) > 1}):
        yield f"rollout.engines names {url} twice: name it once"


def _engine_adapters(config: Config) -> Iterator[str]:
    """Yield what engines do not support of the actor's adapters.

    Source: SGLang 0.5.23, lora/lora.py: the adapters of q, k and v become one, and those of gate and up; of these only
    k and up may be missing.
    """
    lora, sync = config.actor.lora, config.rollout.sync
    if lora is None or config.trainer.replay_rollouts is not None:
        return
    given = set(lora.modules)
    for needed, others in ((("q_proj", "v_proj"), ("k_proj",)), (("gate_proj",), ("up_proj",))):
        missing = [name for name in needed if name not in given]
        found = [name for name in needed + others if name in given]
        if missing and found:
            yield (
                f"actor.lora.target_modules: SGLang cannot serve {' and '.join(found)} alone: name "
                f"{' and '.join(missing)}, too"
            )
    if sync.transport in TRANSPORTS and TRANSPORTS[sync.transport].adapters is None:
        yield f"rollout.sync.transport {sync.transport} sends whole models, not actor.lora's adapters: set it to auto"
    if sync.bucket_bytes is not None:
        yield f"rollout.sync.bucket_bytes {sync.bucket_bytes} has no effect on adapters, sent at once: drop it"


def _evaluations(config: Config) -> Iterator[str]:
    names = config.data.val_names
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"data.val_files: several are called {name!r}, under which each would be reported: rename or merge them"
    for name in config.eval.datasets:
        if not DATASET_NAME.fullmatch(name):
            yield f"eval.datasets: {shorten(repr(name))} is no name: write it with letters, digits, _ and - alone"
        if name in names:
            yield f"eval.datasets.{name}: one of data.val_files is called {name!r}, too: rename it, or drop one of them"
    for name, one in eval_sets(config).items():
        yield from _evaluation(config, name, one)


def _evaluation(config: Config, name: str, one: EvalSet) -> Iterator[str]:
    if one.n > 1 and (one.temperature == 0 or one.top_k == 1):
        n, temperature = deciding_key(config, name, "n"), deciding_key(config, name, "temperature")
        yield (
            f"{n} {one.n} requests the same response to each prompt of {name} as many times, as {temperature} is "
            f"{one.temperature:g} and top_k {one.top_k}: raise {temperature}, or set {n} to 1"
        )
    own = config.eval.datasets.get(name)
    if own is None:
        return
    if own.environment is not None and own.tools:
        yield f"{one.section}.environment and {one.section}.tools are both set: drop one"
    if own.reward not in (None, NONE) and not one.reward.weights:
        yield f"{one.section}.reward {own.reward} names no function with a weight other than 0: name one"
    if one.data.prompt_key == one.data.label_key != config.data.prompt_key:
        found = repr(one.data.prompt_key)
        yield f"{one.section}.prompt_key and {one.section}.label_key are both {found}: name two different fields"


def num_scores_errors(config: Config, num_scores: int) -> list[str]:
    """Return an error if the method needs more scores of each response than reward.function returns."""
    if num_scores > 1 or not config.algorithm.method.needs_score_components:
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


def step_scores_errors(config: Config) -> list[str]:
    """Return the keys that do not apply to the scores of steps, which reward.function returns."""
    return [
        f"{shaping} changes the score of a response, not those of its steps, which reward.function "
        f"{config.reward.function} gives (step_scores): drop it, and have the function do it"
        for shaping in _shapings(config)
    ]


def late_scores_errors(config: Config, *, waits_for_all: bool) -> list[str]:
    """Return an error if a rollout is to end by its scores, and the function gives them when all is written."""
    over_samples = config.data.gen_batch_size is not None and config.algorithm.filter_groups.enable
    if not over_samples or not waits_for_all:
        return []
    return [
        f"data.gen_batch_size {config.data.gen_batch_size} ends a rollout by the scores of the responses written so "
        f"far, but reward.function {config.reward.function} is called when all are written: set reward.batch_size, "
        "such as 1"
    ]

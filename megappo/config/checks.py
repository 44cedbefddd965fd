"""Keys that contradict each other: what can be told without a world size and without opening a file."""

import math
import re
from collections.abc import Iterator
from operator import itemgetter

from megappo.config.algorithm_checks import algorithm_errors
from megappo.config.errors import shorten
from megappo.config.eval_checks import evaluation_errors
from megappo.config.eval_sets import eval_sets, tasks
from megappo.config.kinds import LARGEST_PORT
from megappo.config.schema import Config, Rollout
from megappo.config.transports import TRANSPORTS
from megappo.config.unread import unread_errors

ADDRESS = re.compile(r"https?://(?:[\w.-]+|\[[\da-fA-F:.]+\]):(\d{1,5})", re.ASCII)
MOST_DIVISORS_TRIED = 10**6


def config_errors(config: Config) -> list[str]:
    """Every contradiction, one line each, naming the keys, their values and the remedy."""
    return [
        *algorithm_errors(config),
        *unread_errors(config),
        *_adapters(config),
        *_rollout(config),
        *_engines_adapters(config),
        *_data(config),
        *evaluation_errors(config),
        *_record(config),
        *_trainer(config),
    ]


def longest_row(config: Config) -> int:
    """Tokens a prompt and its response may have together."""
    return config.data.max_prompt_length + config.rollout.max_response_length


def context_errors(config: Config, key: str, limit: int, remedy: str) -> Iterator[str]:
    """An error if `limit` tokens, set by `key`, are too few for an engine: it would cut responses or refuse prompts.

    Source: SGLang 0.5.23, scheduler.py and tp_worker.py: a response gets at most limit - prompt - 2 tokens, and prompts
    of limit - 6 tokens or more are refused.
    """
    for (prompt_key, prompt), (response_key, response), is_episode in requests(config):
        longest, prompts = prompt, "the prompt"
        if is_episode:
            longest, prompts = prompt + response - 1, "what precedes an episode's last token"
        needed = max(prompt + response + 2, longest + 7)
        if limit < needed:
            yield (
                f"{key} {limit} is below the {needed} tokens that an engine needs for {prompt_key} {prompt} and "
                f"{response_key} {response} (their sum + 2, and {prompts} + 7): {remedy}"
            )


Length = tuple[str, int]
"""A key, and its tokens."""


def requests(config: Config) -> Iterator[tuple[Length, Length, bool]]:
    """How long the prompts and responses may be that engines are asked for, and whether these are episodes: of rollouts
    and, where more may be needed, of evaluations. Episodes of evaluations have room for segments with a prompt as long
    as training's."""
    prompt = ("data.max_prompt_length", config.data.max_prompt_length)
    response = ("rollout.max_response_length", config.rollout.max_response_length)
    yield prompt, response, config.rollout.has_environment
    for name, one in eval_sets(config).items():
        own_prompt = (f"eval.datasets.{name}.max_prompt_length", one.data.max_prompt_length)
        own_response = (f"eval.datasets.{name}.max_response_length", one.max_response_length)
        is_episode = one.rollout.has_environment
        if own_prompt[1] > prompt[1] or own_response[1] > response[1] or is_episode > config.rollout.has_environment:
            longest = max(prompt, own_prompt, key=itemgetter(1)) if is_episode else own_prompt
            yield longest, own_response, is_episode


def longest_request(config: Config) -> int:
    """Tokens of the longest prompt and response that an engine may be asked for."""
    return max(prompt + response for (_, prompt), (_, response), _ in requests(config))


def nearest_divisors(number: int, size: int) -> str:
    """The divisors of `number` just below and above `size`, for advice; of huge numbers, among those quickly found."""
    small = [divisor for divisor in range(1, min(math.isqrt(number), MOST_DIVISORS_TRIED) + 1) if number % divisor == 0]
    divisors = sorted({*small, *(number // divisor for divisor in small)})
    below = [divisor for divisor in divisors if divisor < size][-1:]
    above = [divisor for divisor in divisors if divisor > size][:1]
    return " or ".join(map(str, below + above))


def _adapters(config: Config) -> Iterator[str]:
    for name, lora in (("actor", config.actor.lora), ("critic", config.has_critic and config.critic.lora)):
        if lora and config.model.layer_spec != "torch":
            yield (
                f"{name}.lora needs model.layer_spec torch, found {config.model.layer_spec}: set that, as what "
                "TransformerEngine's layers read is not seen outside of them"
            )


def _rollout(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.top_k == 0:
        yield "rollout.top_k 0 keeps no token: set -1 (off) or at least 1"
    if rollout.max_total_tokens is not None:
        yield from context_errors(config, "rollout.max_total_tokens", rollout.max_total_tokens, "raise it")
    if any(not text for text in rollout.stop):
        yield "rollout.stop holds an empty string, which would end every response at once: remove it"
    if rollout.engines:
        yield from _engines(rollout)
    yield from _environment(config)


def _environment(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.environment is not None and rollout.tools:
        yield "rollout.environment and rollout.tools are both set: drop one; an environment makes its own calls"
    found = tasks(config).values()
    with_tools = [one.environment_key for one in found if one.rollout.tools]
    if with_tools and rollout.tool_call_parser is None:
        yield f"{with_tools[0]} needs rollout.tool_call_parser: name SGLang's for the model, such as qwen25"
    if any(one.rollout.has_environment for one in found) and config.data.too_long == "truncate_left":
        yield "data.too_long truncate_left would cut an episode's first messages: set it to skip"


def _engines(rollout: Rollout) -> Iterator[str]:
    """Of servers that run already."""
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
    if rollout.sync.transport == "ipc":
        yield "rollout.sync.transport ipc reaches no server of rollout.engines: set it to auto"


def _engines_adapters(config: Config) -> Iterator[str]:
    """What engines cannot have of the actor's adapters.

    Source: SGLang 0.5.23, lora/lora.py: the adapters of q, k and v become one, and those of gate and up; of these k and
    up alone may be lacking.
    """
    lora, sync = config.actor.lora, config.rollout.sync
    if lora is None or config.trainer.replay_rollouts is not None:
        return
    given, key = set(lora.modules), "actor.lora.target_modules"
    for needed, others in ((("q_proj", "v_proj"), ("k_proj",)), (("gate_proj",), ("up_proj",))):
        lacking = [name for name in needed if name not in given]
        if lacking and not given.isdisjoint(needed + others):
            found = " and ".join(name for name in needed + others if name in given)
            yield f"{key}: SGLang cannot serve {found} alone: name {' and '.join(lacking)}, too"
    if sync.transport in TRANSPORTS and TRANSPORTS[sync.transport].adapters is None:
        yield f"rollout.sync.transport {sync.transport} sends whole models, not actor.lora's adapters: set it to auto"
    if sync.bucket_bytes is not None:
        yield f"rollout.sync.bucket_bytes {sync.bucket_bytes} has no effect on adapters, sent at once: drop it"


def _data(config: Config) -> Iterator[str]:
    if not config.data.files:
        yield "data.train_files: every weight is 0: raise one"
    if config.data.draw_size < config.data.train_batch_size:
        yield (
            f"data.gen_batch_size {config.data.gen_batch_size} is below data.train_batch_size "
            f"{config.data.train_batch_size}, the prompts that a step trains on: raise it, or drop it"
        )
    if config.data.order_by in ("", "-"):
        yield f"data.order_by {config.data.order_by!r} names no field: name one, or set it to null"
    if config.data.prompt_key == config.data.label_key:
        yield f"data.prompt_key and data.label_key are both {config.data.prompt_key!r}: name two different fields"


def _record(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if trainer.eval_only:
        return  # which has no steps
    if trainer.rollout_only and trainer.record_rollouts is None:
        yield "trainer.rollout_only without trainer.record_rollouts keeps nothing: name a folder for the rollouts"
    if trainer.replay_rollouts is None:
        return
    if config.data.gen_batch_size is not None:
        yield (
            f"data.gen_batch_size {config.data.gen_batch_size} has no effect on trainer.replay_rollouts, whose groups "
            "were chosen before: drop it"
        )
    for key in ("record_rollouts", "rollout_only"):
        if getattr(trainer, key):
            yield f"trainer.{key} writes rollouts, which trainer.replay_rollouts only reads: drop one of them"
    if config.eval_interval:
        yield (
            "trainer.replay_rollouts starts no engines, which the evaluation on data.val_files needs: set "
            "trainer.eval_interval to 0"
        )


def _trainer(config: Config) -> Iterator[str]:
    hang, wait = config.hang_timeout_seconds, config.trainer.process_group_timeout_seconds
    if hang >= wait:
        yield (
            f"trainer.hang_timeout_seconds {hang:g} must be below trainer.process_group_timeout_seconds {wait:g}, "
            "which would end a run that hangs before its ranks have said where they are: lower it, or raise that"
        )
    limit, grace = config.trainer.time_limit, config.trainer.grace_seconds
    if limit is not None and limit <= grace:
        yield (
            f"trainer.time_limit {limit:g} is not above trainer.grace_seconds {grace:g}, so that no step would begin: "
            "raise it, or lower that"
        )

"""Held-out data of a run: data.val_files and eval.datasets as one table, with the defaults filled in; and how the
responses of training, and of each of these data sets, are played and scored, and how long they may be."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from megappo.config.data_section import NONE, Data, EvalDataset, Reward
from megappo.config.rollout_section import Rollout
from megappo.config.schema import Config

TRAINING = ""
"""Stands for training among the names of `tasks`: no data set has this name."""
FALLBACKS: Mapping[str, str] = {
    "n": "rollout.val_n",
    "temperature": "rollout.val_temperature",
    "top_p": "rollout.val_top_p",
    "top_k": "rollout.val_top_k",
    "max_response_length": "rollout.max_response_length",
    "pass_threshold": "rollout.val_pass_threshold",
}
"""Key of a data set -> the key that counts where it is null."""
OF_DATA = ("prompt_key", "label_key", "max_prompt_length")


@dataclass(frozen=True, kw_only=True)
class Task:
    """Environment and reward of the responses to some prompts.

    Attributes:
        rollout: with the prompts' own environment or tools. environment_key: the key that names these.
        reward: with the prompts' own function. reward_key: the key that names it.
    """

    rollout: Rollout
    environment_key: str
    reward: Reward
    reward_key: str


@dataclass(frozen=True, kw_only=True)
class EvalSet(Task):
    """A held-out data set.

    Attributes:
        section: of the config, with its own keys.
        key: names its files.
        n, temperature, top_p, top_k, max_response_length: of its responses.
        data: how its files are read.
        pass_threshold: the smallest score with which a response passes.
    """

    section: str
    key: str
    files: tuple[str, ...]
    n: int
    temperature: float
    top_p: float
    top_k: int
    max_response_length: int
    data: Data
    pass_threshold: float


def eval_sets(config: Config) -> dict[str, EvalSet]:
    """Return the held-out data sets by the name under which each is reported."""
    files = zip(config.data.val_names, config.data.val_files, strict=True)
    found = {name: _filled(config, EvalDataset(files=(file,)), "data", "data.val_files") for name, file in files}
    for name, own in config.eval.datasets.items():
        found[name] = _filled(config, own, f"eval.datasets.{name}", f"eval.datasets.{name}.files")
    return found


def tasks(config: Config) -> dict[str, Task]:
    """Return the task of training, if the run trains, and those of `eval_sets`."""
    of_training = {} if config.trainer.eval_only else {TRAINING: training_task(config)}
    return of_training | eval_sets(config)


def played_tasks(config: Config) -> dict[str, Task]:
    """Return the tasks that the run plays: none of data sets if it never evaluates."""
    return {name: one for name, one in tasks(config).items() if name == TRAINING or config.evaluates}


def training_task(config: Config) -> Task:
    """Return the task of training, which also holds for data sets without one of their own."""
    return Task(
        rollout=config.rollout,
        environment_key=_environment_key("rollout", config.rollout),
        reward=config.reward,
        reward_key="reward.function",
    )


def deciding_key(config: Config, name: str, key: str) -> str:
    """Return the key that decides about `key` of a data set: its own, or where that is null its fallback."""
    own = config.eval.datasets.get(name)
    return FALLBACKS[key] if own is None or getattr(own, key) is None else f"eval.datasets.{name}.{key}"


def longest_row(config: Config) -> int:
    """Return the most tokens of a training prompt and its response together."""
    return config.data.max_prompt_length + config.rollout.max_response_length


@dataclass(frozen=True)
class LongestRequest:
    """The longest prompt and response that engines are sent for one purpose, each with the key that limits it."""

    prompt_key: str
    prompt: int
    response_key: str
    response: int
    is_episode: bool

    @property
    def tokens(self) -> int:
        return self.prompt + self.response

    @property
    def context(self) -> int:
        """Tokens that an engine must have room for; with fewer it would cut responses or refuse prompts.

        Source: SGLang 0.5.23, scheduler.py and tp_worker.py: a response gets at most limit - prompt - 2 tokens, and
        prompts of limit - 6 tokens or more are refused. All but the last token of an episode may be a prompt.
        """
        longest_prompt = self.tokens - 1 if self.is_episode else self.prompt
        return max(self.tokens + 2, longest_prompt + 7)


def requests(config: Config) -> list[LongestRequest]:
    """Return the longest request of training, then that of each held-out data set.

    Episodes of evaluations have room for segments with a prompt as long as training's.
    """
    prompt_key, prompt = "data.max_prompt_length", config.data.max_prompt_length
    response_key, response = "rollout.max_response_length", config.rollout.max_response_length
    found = [LongestRequest(prompt_key, prompt, response_key, response, config.rollout.has_environment)]
    for one in eval_sets(config).values():
        own_prompt_key, own_prompt = f"{one.section}.max_prompt_length", one.data.max_prompt_length
        if one.rollout.has_environment and own_prompt <= prompt:
            own_prompt_key, own_prompt = prompt_key, prompt
        own_response_key = f"{one.section}.max_response_length"
        is_episode = one.rollout.has_environment
        found.append(LongestRequest(own_prompt_key, own_prompt, own_response_key, one.max_response_length, is_episode))
    return found


def longest_request(config: Config) -> LongestRequest:
    """Return the request with the most tokens."""
    return max(requests(config), key=attrgetter("tokens"))


def context_errors(config: Config, key: str, limit: int, remedy: str) -> Iterator[str]:
    """Yield an error if `limit` tokens, set by `key`, are too few for the requests that engines are sent."""
    request = max(requests(config), key=attrgetter("context"))
    if limit < request.context:
        prompts = "what precedes an episode's last token" if request.is_episode else "the prompt"
        lengths = f"{request.prompt_key} {request.prompt} and {request.response_key} {request.response}"
        yield (
            f"{key} {limit} is below the {request.context} tokens that an engine needs for {lengths} (their sum + 2, "
            f"and {prompts} + 7): {remedy}"
        )


def _filled(config: Config, own: EvalDataset, section: str, key: str) -> EvalSet:
    values: dict[str, Any] = vars(training_task(config)) | _own_task(config, own, section)
    for name, fallback in FALLBACKS.items():
        value = getattr(own, name)
        values[name] = attrgetter(fallback)(config) if value is None else value
    changes = {name: getattr(own, name) for name in OF_DATA if getattr(own, name) is not None}
    data = config.data.model_copy(update=changes)
    return EvalSet(**values, section=section, key=key, files=own.files, data=data)


def _own_task(config: Config, own: EvalDataset, section: str) -> dict[str, Any]:
    """Return the parts of its `Task` that a data set sets itself."""
    found: dict[str, Any] = {}
    if own.environment is not None or own.tools:
        environment = None if own.environment == NONE else own.environment
        rollout = config.rollout.model_copy(update={"environment": environment, "tools": own.tools})
        found |= {"rollout": rollout, "environment_key": _environment_key(section, rollout)}
    if own.reward is not None:
        function = None if own.reward == NONE else own.reward
        reward = config.reward.model_copy(update={"function": function})
        found |= {"reward": reward, "reward_key": f"{section}.reward"}
    return found


def _environment_key(section: str, rollout: Rollout) -> str:
    return f"{section}.{'tools' if rollout.tools else 'environment'}"

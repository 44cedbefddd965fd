"""Tasks of a run: training, and each held-out data set of data.val_files and eval.datasets, with the defaults filled
in: how prompts are read, how responses are sampled, played and scored, and how long they may be."""

from dataclasses import dataclass, replace
from operator import attrgetter

from megappo.config.config_error import Errors
from megappo.config.schema import Config
from megappo.config.sections import NONE, PLAYERS, Data, EvalDataset, Reward, Rollout

TRAINING = ""
"""Stands for training among the names of `tasks`: no data set has this name."""
OF_EVALUATIONS = ("n", "temperature", "top_p", "top_k")
"""Keys of the rollout section that have another default, val_*, for data sets."""
OWN_KEYS = {
    "n": "rollout.n",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "max_response_length": "rollout.max_response_length",
    "pass_threshold": "rollout.val_pass_threshold",
    "environment": "rollout.environment",
    "tools": "rollout.tools",
    "agent": "rollout.agent",
    "reward": "reward.function",
    "prompt_key": "data.prompt_key",
    "label_key": "data.label_key",
    "image_key": "data.image_key",
    "max_prompt_length": "data.max_prompt_length",
}
"""Key of a data set -> the key of the whole run that it replaces."""


@dataclass(frozen=True)
class Task:
    """Prompts of training or of a held-out data set.

    Attributes:
        section: section of the config with the task's own keys.
        key: names its files.
        data: how its files are read.
        rollout: how its responses are sampled and played, with its own values.
        reward: reward section with the task's own function.
        environment_key, reward_key: the keys that name environment, tools or agent, and the function.
        has_reward_model: the reward model scores it, too: it has neither an environment nor a function of its own.
        has_teachers: teachers train on it, so that it needs no scores.
    """

    section: str
    key: str
    files: tuple[str, ...]
    data: Data
    rollout: Rollout
    reward: Reward
    environment_key: str
    reward_key: str
    has_reward_model: bool = False
    has_teachers: bool = False

    @property
    def has_labels(self) -> bool:
        """True if something reads the labels of its prompts: a reward function, or an environment."""
        return bool(self.reward.weights) or self.rollout.has_episodes


def training_task(config: Config) -> Task:
    """Return the task of training."""
    task = _task(config, EvalDataset.model_construct(files=config.data.files), "data", "data.train_files")
    return replace(task, has_teachers=bool(config.teachers))


def eval_sets(config: Config) -> dict[str, Task]:
    """Return the held-out data sets by the name under which each is reported."""
    for name in OF_EVALUATIONS:
        config = config.changed(f"rollout.{name}", getattr(config.rollout, f"val_{name}"))
    eval_tasks = {}
    for name, file in zip(config.data.val_names, config.data.val_files, strict=True):
        eval_tasks[name] = _task(config, EvalDataset(files=(file,)), "data", "data.val_files")
    for name, own in config.eval.datasets.items():
        eval_tasks[name] = _task(config, own, f"eval.datasets.{name}", f"eval.datasets.{name}.files")
    return eval_tasks


def _task(config: Config, own: EvalDataset, section: str, key: str) -> Task:
    """Return a task with its own values, and the config's values where it has none."""
    environment_section = "rollout"
    if own.environment is not None or own.tools or own.agent:
        environment_section = section
        for player in config.rollout.players:
            config = config.changed(f"rollout.{player}", () if player == "tools" else None)
    for name, replaced in OWN_KEYS.items():
        value = getattr(own, name)
        if value not in (None, ()):
            has_none = value == NONE and name in ("environment", "reward")
            config = config.changed(replaced, None if has_none else value)
    [player, *_] = [*config.rollout.players, PLAYERS[0]]
    reward_key = "reward.function" if own.reward is None else f"{section}.reward"
    environment_key = f"{environment_section}.{player}"
    has_own = config.rollout.has_episodes or own.reward not in (None, NONE)
    return Task(
        *(section, key, own.files, config.data, config.rollout, config.reward, environment_key, reward_key),
        has_reward_model=config.has_reward_model and not has_own,
    )


def tasks(config: Config) -> dict[str, Task]:
    """Return the task of training, if the run trains, and the tasks of `eval_sets`."""
    of_training = {TRAINING: training_task(config)} if config.recipe.has_steps else {}
    return of_training | eval_sets(config)


def played_tasks(config: Config) -> dict[str, Task]:
    """Return the tasks that the run samples; without held-out sets if it never evaluates."""
    return {name: one for name, one in tasks(config).items() if name == TRAINING or config.evaluates}


def longest_row(config: Config) -> int:
    """Return the most tokens of a training prompt and its response together, or of an example."""
    if not config.recipe.has_rollouts:
        return config.data.max_length
    return config.data.max_prompt_length + config.rollout.max_response_length


def longest_unit(config: Config) -> int:
    """Return the most tokens that must be in one micro-batch: of a row, or of the two of a pair."""
    return longest_row(config) * config.rows_together


def longest_response(config: Config) -> int:
    """Return the most tokens of a row that can have a loss."""
    return config.rollout.max_response_length if config.recipe.has_rollouts else config.data.max_length


@dataclass(frozen=True)
class LongestRequest:
    """The longest prompt and response that engines are sent for one task.

    Attributes:
        lengths: names of both lengths, for an error.
        tokens: tokens of prompt and response together.
        context: tokens that an engine must have room for; with fewer it would cut responses or refuse prompts.
    """

    lengths: str
    tokens: int
    context: int


def requests(config: Config) -> list[LongestRequest]:
    """Return the longest request of training, then the longest request of each held-out data set.

    Episodes of evaluations have room for segments with a prompt as long as training's.

    Source: SGLang 0.5.23, scheduler.py and tp_worker.py: a response gets at most limit - prompt - 2 tokens, and
    prompts of limit - 6 tokens or more are refused. All but the last token of an episode may be a prompt.
    """
    longest = []
    for task in (training_task(config), *eval_sets(config).values()):
        prompt = task.data.max_prompt_length
        response = task.rollout.max_response_length
        longest_prompt = prompt
        if task.rollout.has_episodes:
            prompt = max(prompt, config.data.max_prompt_length)
            longest_prompt = prompt + response - 1
        lengths = f"prompts of {prompt} and responses of {response} tokens ({task.key})"
        context = max(prompt + response + 2, longest_prompt + 7)
        longest.append(LongestRequest(lengths, prompt + response, context))
    return longest


def longest_request(config: Config) -> LongestRequest:
    """Return the request with the most tokens."""
    return max(requests(config), key=attrgetter("tokens"))


def context_errors(config: Config, key: str, limit: int, *, is_fixed: bool = False) -> Errors:
    """Yield an error if `limit` tokens, set by `key`, are too few for the requests that engines are sent.

    Args:
        is_fixed: the limit cannot be raised.
    """
    request = max(requests(config), key=attrgetter("context"))
    if limit < request.context:
        yield (
            f"{key} {limit} is below the {request.context} tokens that an engine needs for {request.lengths}: "
            f"{'lower' if is_fixed else 'raise it, or lower'} max_prompt_length or max_response_length"
        )

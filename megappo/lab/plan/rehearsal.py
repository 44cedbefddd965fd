"""Try what a run does at its start without starting it: read the tokenizer and prompts, call each reward function and
each environment once."""

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from megappo.architecture.parsing import read_architecture
from megappo.config.config_error import ConfigError
from megappo.config.eval_sets import TRAINING, played_tasks
from megappo.config.schema import Config
from megappo.config.score_checks import late_scores_errors, metric_errors, num_scores_errors, step_scores_errors
from megappo.data.chat import chat_end_warnings
from megappo.data.conversations import Conversations
from megappo.data.image_files import image_reader
from megappo.data.preferences import open_examples
from megappo.data.prompt_images import PromptImages
from megappo.data.prompts import Prompt, open_datasets
from megappo.data.record_dataset import RecordDataset
from megappo.data.tokenizer import check_vocabularies, load_tokenizer, stop_token_ids
from megappo.placement.components import policy_folders, shared_vocabulary
from megappo.userland import user_code
from megappo.userland.agent_sessions import AgentPool, Finished, TurnRequest
from megappo.userland.environments import EnvironmentPool, row_of, start_workers
from megappo.userland.episode_pool import EnvironmentFault, EpisodeLost
from megappo.userland.grades import Grade
from megappo.userland.rewards import RewardError, RewardPool
from megappo.userland.signatures import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWER_FORMS = (
    *("={}", "#### {}", "\\boxed{{{}}}", "<answer>{}</answer>"),
    "<think>A thought.</think> <answer>{}</answer>",
)
"""Forms of the right answer in which a reward function may expect it."""
SAMPLE = 1000
"""Number of records checked from a file's beginning on, and of records spread over all of it."""


@dataclass
class Findings:
    """Errors, warnings and parts that were checked, one line each."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)

    @contextmanager
    def noting(self, key: str = "") -> Iterator[None]:
        """Note the block's error and continue after the block.

        Args:
            key: key of the reward function or environment that the block calls.
        """
        try:
            yield
        except ConfigError as error:
            self.errors += error.errors
        except (RewardError, EnvironmentFault) as error:
            self.errors.append(f"{key}: {_in_a_line(error)}")
        except EpisodeLost as error:
            self.errors.append(f"{key}: {error}: fix it, or raise rollout.environment_timeout_seconds")


def rehearse(config: Config, *, everything: bool) -> Findings:
    """Try the tokenizer, prompts, reward functions and environments of a config without errors.

    Args:
        everything: check all prompts, not a sample of each file.
    """
    findings = Findings()
    with findings.noting(), ExitStack() as cleanup:
        tokenizer = load_tokenizer(config.model.path)
        findings.checked.append(f"tokenizer of {config.model.path}")
        if not config.recipe.has_rollouts:
            _rehearse_examples(config, tokenizer, findings, everything=everything)
            return findings
        with findings.noting():
            ends = stop_token_ids(config.model.path, config.rollout.stop, tokenizer)
            findings.warnings += chat_end_warnings(tokenizer, ends)
        if folders := policy_folders(config):
            with findings.noting():
                check_vocabularies(tokenizer, folders)
                findings.checked.append(f"the vocabularies of {', '.join(dict.fromkeys(folders.values()))}")
        if config.has_reward_model:
            with findings.noting():
                folder = str(config.reward_model.model_path)
                Conversations(config, read_architecture(folder, head="value"), tokenizer)
                findings.checked.append(f"tokenizer and chat template of {folder}")
        single = config.changed("reward.num_workers", 1).changed("rollout.num_environment_workers", 1)
        tasks = played_tasks(single.changed("reward.on_error", "raise"))
        if not tokenizer.chat_template and any(one.rollout.has_agent for one in tasks.values()):
            findings.errors.append(
                "rollout.agent: the tokenizer of model.path has no chat template, so requests of an agent cannot be "
                "rendered: add a chat_template.jinja to the folder, or use a model that has one"
            )
        workers = start_workers(tasks, cleanup, findings.noting)
        rewards = workers[TRAINING].rewards if TRAINING in workers else None
        waits_for_all = rewards is not None and rewards.waits_for_all
        findings.errors += late_scores_errors(config, waits_for_all=waits_for_all)
        taken = {name: of_task.takes for name, of_task in workers.items()}
        reader = image_reader(config, tokenizer)
        train, val = open_datasets(config, tokenizer, taken, images=reader)
        datasets = val if train is None else {TRAINING: train} | val
        for dataset in datasets.values():
            _check_records(dataset, shared_vocabulary(config), findings, everything=everything)
        findings.errors += train.batch_errors() if train else []  # none is an error of its own
        findings.checked += _passes(config, train) if train else []
        tried: set[RewardPool | EnvironmentPool | None] = set()
        for name, task in tasks.items():
            try:
                [prompt] = datasets[name].at(datasets[name].kept[:1])
                if reader is not None:
                    scratch = cleanup.enter_context(TemporaryDirectory())
                    images = PromptImages(reader, [train, *val.values()], scratch)
                    prompt = replace(prompt, columns=images.columns(prompt))
            except ValueError:  # it is among the errors, or was not checked
                continue
            rewards, environments = workers[name].rewards, workers[name].environments
            with findings.noting(task.reward_key):
                if rewards is not None and rewards not in tried:
                    _try_rewards(config, rewards, prompt, findings, is_training=name == TRAINING)
            with findings.noting(task.environment_key):
                if environments is not None and environments not in tried:
                    begin = _first_request if isinstance(environments, AgentPool) else _reset
                    shown = asyncio.run(begin(environments, prompt))
                    findings.checked.append(f"{environments.spec}: {shown}")
            tried |= {rewards, environments}
    return findings


def _rehearse_examples(
    config: Config, tokenizer: "PreTrainedTokenizerBase", findings: Findings, *, everything: bool
) -> None:
    """Check the examples of a run that starts no engines."""
    ends = stop_token_ids(config.model.path, config.rollout.stop, tokenizer)
    train, val = open_examples(config, tokenizer, ends)
    for dataset in (train, *val.values()):
        _check_records(dataset, shared_vocabulary(config), findings, everything=everything)
    findings.errors += train.batch_errors()
    findings.checked += _passes(config, train)


def _passes(config: Config, dataset: RecordDataset[Any]) -> list[str]:
    """Return how often a run sees its records; nothing if its files have weights, and so epochs of their own."""
    taken = config.trainer.total_steps * config.data.train_batch_size
    if config.data.shares or not len(dataset):
        return []
    return [f"{taken:,} {dataset.noun} in {config.trainer.total_steps:,} steps: {taken / len(dataset):.3g} epochs"]


def _check_records(dataset: RecordDataset[Any], vocab_size: int, findings: Findings, *, everything: bool) -> None:
    parts = dataset.check(vocab_size, range if everything else _sample)
    findings.errors += dataset.errors([parts])
    findings.warnings += dataset.warnings([parts])
    for file, part in zip(dataset.files, parts, strict=True):
        of_all = f"all {part.num_checked:,}"
        if part.num_checked < len(file):
            of_all = f"{part.num_checked:,} of {len(file):,} (with --all: every one)"
        findings.checked.append(f"{dataset.noun} of {file.path}: {of_all}")
    findings.checked += dataset.leave_out([parts])


def _sample(size: int) -> Sequence[int]:
    return sorted({*range(min(size, SAMPLE)), *range(0, size, max(1, size // SAMPLE))})


def _try_rewards(config: Config, rewards: RewardPool, prompt: Prompt, findings: Findings, *, is_training: bool) -> None:
    """Score a response to a prompt: the prompt's own label if that is a text or a number; then an empty one, which
    models write."""
    response = str(prompt.label) if isinstance(prompt.label, str | int | float) else ""
    grade = _score(rewards, prompt, response)
    scores = " + ".join(f"{score:g}" for score in grade.scores)
    given = f", given {', '.join(prompt.columns)}" if prompt.columns else ""
    findings.checked.append(f"{rewards.spec}: the response {response!r:.40} to the first prompt scores {scores}{given}")
    more = grade.parts | {"loss_weight": grade.loss_weight, "step_scores": grade.steps}
    findings.checked += [f"{rewards.spec}: returned {name} {value!s:.80}" for name, value in more.items() if value]
    if is_training:
        num_scores = len(grade.scores) + config.rollout.has_episodes  # whose rewards are one more
        findings.errors += num_scores_errors(config, num_scores)
        findings.errors += step_scores_errors(config) if any(grade.steps) else []
        if not config.rollout.has_episodes:  # which may return further numbers
            findings.errors += metric_errors(config, grade.parts)
    tried = {response: sum(grade.scores)}
    if config.reward.on_error == "raise":
        try:
            tried[""] = sum(_score(rewards, prompt, "").scores)
        except RewardError as error:
            first, *_ = str(error).splitlines()
            findings.warnings.append(f"for an empty response, which models write, the {first}")
    if is_training and response and not config.rollout.has_episodes and not findings.errors:
        findings.warnings += _equal_warnings(rewards, prompt, response, tried)


def _equal_warnings(rewards: RewardPool, prompt: Prompt, label: str, tried: dict[str, float]) -> list[str]:
    """Return a warning if right answers in several forms, and wrong ones, all have the same score. Most functions
    distinguish the responses that were tried already, and are not called again."""
    responses = [*(form.format(label) for form in ANSWER_FORMS), "0", "I do not know."]
    if len({*tried.values()}) == 1:
        rows = [Row(prompt.text, response, prompt.label, prompt.columns) for response in responses]
        try:
            grades = rewards.score(rows)
        except RewardError:  # it wants another form
            return []
        tried |= zip(responses, (sum(grade.scores) for grade in grades), strict=True)
    if len({*tried.values()}) > 1:
        return []
    return [
        f"{rewards.spec}: every response tried for the first prompt has score {tried[label]:g}: "
        f"{', '.join(map(repr, tried))}: check that it finds the answer in a response; where all scores are equal, "
        "nothing can be learned"
    ]


def _score(rewards: RewardPool, prompt: Prompt, response: str) -> Grade:
    """Score a response twice in one call."""
    grade, _ = rewards.score([Row(prompt.text, response, prompt.label, prompt.columns)] * 2)
    return grade


async def _reset(environments: EnvironmentPool, prompt: Prompt) -> str:
    """Return the first messages of an environment, as a line for people."""
    async with environments.session() as environment:
        messages = await environment.reset(row_of(prompt.columns, prompt.label))
    return f"reset for the first prompt, {messages!r:.200}"


async def _first_request(agents: AgentPool, prompt: Prompt) -> str:
    """Run an agent up to its first request; return that, as a line for people."""
    async with agents.session() as session:
        await session.begin(row_of(prompt.columns, prompt.label))
        while True:
            for event in await session.next_events():
                if isinstance(event, TurnRequest):
                    return f"first request for the first prompt, {event.messages!r:.200}"
                if isinstance(event, Finished):
                    raise agents.fault(event.error or "ended without a request for the first prompt")


def _in_a_line(error: Exception) -> str:
    """Return an error, its place in the user's code and the remedy, without the rest of the traceback."""
    first, *rest = str(error).splitlines()
    frames = [line.strip() for line in rest if line.strip().startswith('File "')]
    places = [frame for frame in frames if not any(f'"{folder}{os.sep}' in frame for folder in user_code.OWN_FOLDERS)]
    own = [frame for frame in places if "site-packages" not in frame]  # else the code of a library that it calls
    where = f" ({(own or places)[-1]})" if places else ""
    return f"{first}{where}: {rest[-1].partition(', or, if few')[0]}" if rest else first  # a first call must not fail

"""Try what a run does at its start without starting it: read the tokenizer and prompts, call each reward function and
each environment once."""

import asyncio
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from megappo.config.checks import late_scores_errors, metric_errors, num_scores_errors, step_scores_errors
from megappo.config.config_error import ConfigError
from megappo.config.eval_sets import TRAINING, Task, played_tasks
from megappo.config.schema import Config
from megappo.data.prompts import Prompt, PromptDataset, batch_errors, open_datasets
from megappo.data.tokenizer import load_tokenizer, stop_token_ids
from megappo.placement.components import shared_vocabulary
from megappo.rollouts.episodes import row_of
from megappo.userland import user_code
from megappo.userland.environments import EnvironmentFault, EnvironmentPool, EpisodeLost
from megappo.userland.grades import Graded
from megappo.userland.rewards import RewardError, RewardPool
from megappo.userland.task_workers import TaskWorkers, start_workers

SAMPLE = 1000
"""Number of records checked from a file's beginning on, and of records spread over all of it."""
TRACE_LINE = re.compile(r'^ *File "(?P<file>.*)", (?P<line>line \d+)', re.MULTILINE)


@dataclass
class Findings:
    """Errors, warnings and parts that were checked, one line each; and the workers that were tried."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    tried: set[RewardPool | EnvironmentPool | None] = field(default_factory=set)

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


def rehearse(config: Config, *, everything: bool) -> Findings:
    """Try the tokenizer, prompts, reward functions and environments of a config without errors.

    Args:
        everything: check all prompts, not a sample of each file.
    """
    findings = Findings()
    with findings.noting(), ExitStack() as ending:
        tokenizer = load_tokenizer(config.model.path)
        findings.checked.append(f"tokenizer of {config.model.path}")
        with findings.noting():
            stop_token_ids(config.model.path, config.rollout.stop, tokenizer)
        single = config.changed("reward.num_workers", 1).changed("rollout.num_environment_workers", 1)
        found = played_tasks(single.changed("reward.on_error", "raise"))
        workers = start_workers(found, ending, findings.noting)
        rewards = workers[TRAINING].rewards if TRAINING in workers else None
        waits_for_all = rewards is not None and rewards.waits_for_all
        findings.errors += late_scores_errors(config, waits_for_all=waits_for_all)
        takes = {name: of_task.takes for name, of_task in workers.items()}
        train, val = open_datasets(config, tokenizer, takes)
        vocab_size = shared_vocabulary(config)
        datasets = val if train is None else {TRAINING: train} | val
        for dataset in datasets.values():
            _check_prompts(dataset, vocab_size, findings, everything=everything)
        findings.errors += batch_errors(train)
        for name, task in found.items():
            try:
                [prompt] = datasets[name].at(datasets[name].kept[:1])
            except ValueError:  # it is among the errors, or was not checked
                continue
            graded = _try(config, task, workers[name], prompt, findings)
            if name == TRAINING and graded is not None:
                num_scores = len(graded.scores) + config.rollout.has_environment  # whose rewards are one more
                findings.errors += num_scores_errors(config, num_scores)
                findings.errors += step_scores_errors(config) if any(graded.steps) else []
                if not config.rollout.has_environment:  # which may return further numbers
                    findings.errors += metric_errors(config, graded.parts)
    return findings


def _check_prompts(dataset: PromptDataset, vocab_size: int, findings: Findings, *, everything: bool) -> None:
    parts = dataset.check(vocab_size, range if everything else _sample)
    findings.errors += dataset.errors([parts])
    findings.warnings += dataset.warnings([parts])
    left_out = dataset.leave_out([parts])
    for file, part in zip(dataset.files, parts, strict=True):
        of_all = f"all {part.num_checked:,}"
        if part.num_checked < len(file.records):
            of_all = f"{part.num_checked:,} of {len(file.records):,} (with --all: every one)"
        findings.checked.append(f"prompts of {file.path}: {of_all}")
    findings.checked += left_out


def _sample(size: int) -> Sequence[int]:
    return sorted({*range(min(size, SAMPLE)), *range(0, size, max(1, size // SAMPLE))})


def _try(config: Config, task: Task, workers: TaskWorkers, prompt: Prompt, findings: Findings) -> Graded | None:
    """Score a response to a prompt and begin an episode with it, with workers that were not tried before. Return the
    grade."""
    rewards, environments, graded = workers.rewards, workers.environments, None
    if rewards is not None and rewards not in findings.tried:
        with findings.noting(task.reward_key):
            graded = _score(rewards, prompt, findings)
            if config.reward.on_error == "raise":
                _score_empty(rewards, prompt, findings)
    if environments is not None and environments not in findings.tried:
        with findings.noting(task.environment_key):
            messages = f"{_reset(environments, prompt)!r:.200}"
            findings.checked.append(f"{environments.spec}: reset for the first prompt, {messages}")
    findings.tried |= {rewards, environments}
    return graded


def _score(pool: RewardPool, prompt: Prompt, findings: Findings) -> Graded:
    """Score a response twice in one call: the prompt's own label if that is a text or a number. Return the grade."""
    response = str(prompt.label) if isinstance(prompt.label, str | int | float) else ""
    graded, _ = pool.score([prompt.text] * 2, [response] * 2, [prompt.label] * 2, [prompt.columns] * 2)
    numbers = graded.parts | ({} if graded.loss_weight is None else {"loss_weight": graded.loss_weight})
    scores = " + ".join(f"{score:g}" for score in graded.scores)
    shown = ", ".join([scores, *(f"{name} {number:g}" for name, number in numbers.items())])
    shown += f", step_scores {[list(step) for step in chain(*graded.steps)]!s:.80}" if any(graded.steps) else ""
    given = f", given {', '.join(prompt.columns)}" if prompt.columns else ""
    findings.checked.append(f"{pool.spec}: scored {response!r:.40} for the first prompt{given}, {shown}")
    return graded


def _score_empty(pool: RewardPool, prompt: Prompt, findings: Findings) -> None:
    """Warn if the reward function fails on an empty response, which models write; a failure closes it."""
    try:
        pool.score([prompt.text] * 2, [""] * 2, [prompt.label] * 2, [prompt.columns] * 2)
    except RewardError as error:
        first, *_ = str(error).splitlines()
        findings.checked.append(f"WARNING: of an empty response, which models write: {first}")


def _reset(environments: EnvironmentPool, prompt: Prompt) -> list[dict[str, str]]:
    """Return the first messages of an environment."""

    async def reset() -> list[dict[str, str]]:
        async with environments.environment() as environment:
            return await environment.reset(row_of(prompt))

    try:
        return asyncio.run(reset())
    except EpisodeLost as lost:
        remedy = "mend it, or raise rollout.environment_timeout_seconds"
        raise EnvironmentFault(f"environment {environments.spec}: {lost}\n{remedy}") from lost


def _in_a_line(error: Exception) -> str:
    """Return an error, its place in the user's code and the remedy, without the rest of the traceback."""
    first, *rest = str(error).splitlines()
    own = Path(user_code.__file__).parent
    places = [match.groups() for match in TRACE_LINE.finditer("\n".join(rest)) if Path(match["file"]).parent != own]
    where = f" ({' '.join(places[-1])})" if places else ""
    return f"{first}{where}: {rest[-1]}" if rest else first

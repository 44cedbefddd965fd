"""Rollouts on record: each step's scored rows in a file, to look at, and to train on again without engines."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

from megappo.batch.exchange import Exchange
from megappo.batch.files import RowsFile, RowsFileError, write_rows
from megappo.batch.folders import rows_file
from megappo.batch.rows import Rows
from megappo.batch.step_batch import Batch
from megappo.checkpoint.durable import put_durably
from megappo.config.algorithm_checks import step_scores_errors
from megappo.config.describe import show
from megappo.config.errors import ConfigError
from megappo.config.schema import Config
from megappo.data.prompts import Prompt, PromptDataset
from megappo.userland.builtin import BUILTIN
from megappo.userland.spec import parse_spec

SAMPLING = (
    *("data.train_batch_size", "rollout.n", "rollout.temperature", "rollout.top_p", "rollout.top_k"),
    "rollout.max_response_length",
)
"""What a run that replays a record must have as the run that wrote it: log-probs and mini-batches depend on it."""
NEEDED = {"baselines": "needs_greedy_baseline", "score_components": "needs_score_components"}
"""Fields of the rollout that some estimators need."""


class Record:
    """Writes every step's rows into a folder."""

    def __init__(self, folder: Path, config: Config, exchange: Exchange):
        self.folder = folder
        self.config = config
        self.exchange = exchange
        # An edit from here on is the next run's.
        self._reward_file = _digest(spec for spec in config.reward.weights if spec not in BUILTIN)
        self._environment_file = _digest(filter(None, (config.rollout.environment, *config.rollout.tools)))

    def write(
        self, step: int, batch: Batch, prompts: Sequence[Prompt], num_tokens: int, num_drawn: int | None = None
    ) -> None:
        """Write a step's rows, from wherever they are; all ranks together.

        Args:
            num_drawn: prompts that the steps so far have drawn; None: a batch for each.

        Labels are kept to be shown; the other fields that the reward function takes, which may be large, are where the
        prompts' numbers lead to in the data.
        A run that goes on from a checkpoint writes the steps after it anew.

        Raises:
            OSError, OtherRankError: the file cannot be written.
        """
        rows = batch.at_rank_0(self.exchange)
        facts = {
            **self._facts(step, [prompt.index for prompt in prompts]),
            "num_tokens": num_tokens,
            "prompts_drawn": step * self.config.data.draw_size if num_drawn is None else num_drawn,
            "labels": [prompt.label for prompt in prompts],
            "compared": self.config.compares_responses or not self.config.algorithm.mask_truncated,
        }
        self.exchange.on_rank_0(lambda: self._put(rows_file(self.folder, step), rows, facts))

    def going_on(self, prompts: PromptDataset) -> tuple[int, list[str]]:
        """How many steps, from the first on, it has as a run of this config would write them, and what the next one, if
        it is there, depends on that has changed since; all ranks together."""

        def look() -> tuple[int, list[str]]:
            num_drawn = 0
            for step in range(1, self.config.trainer.total_steps + 1):
                found = self._found(step)
                first, num_drawn = num_drawn, self._num_drawn(found, step)
                places = range(first, num_drawn, self.config.data.draw_size)
                drawn = list(chain.from_iterable(map(prompts.indices, places)))
                facts = self._facts(step, self._as_chosen(found.get("prompts", []), drawn))
                # What a record of an earlier version does not tell counts as unchanged.
                changed = [name for name, value in facts.items() if found.get(name, value) != value]
                if changed or not found:
                    return step - 1, changed
            return self.config.trainer.total_steps, []

        return self.exchange.on_rank_0(look)

    def num_drawn(self, step: int) -> int:
        """How many prompts the steps to this one, which it has, have drawn; all ranks together."""
        return self.exchange.on_rank_0(lambda: self._num_drawn(self._found(step), step))

    def _num_drawn(self, found: dict[str, Any], step: int) -> int:
        """By a step's facts, which have batches if they are of an earlier version: as large as now, or the step is
        written anew."""
        return found.get("prompts_drawn", found.get("num_drawn", step) * self.config.data.draw_size)

    def _as_chosen(self, found: list[int], drawn: list[int]) -> list[int]:
        """A step's prompts: all that it has drawn, or those found on record, where they may be a choice of these."""
        is_choice = self._facts(0, [])["choice"] != [None, None]
        return found if is_choice and set(found) <= set(drawn) else drawn

    def _found(self, step: int) -> dict[str, Any]:
        """A step's facts; none where it is missing or damaged."""
        try:
            with RowsFile(rows_file(self.folder, step)) as file:
                return file.facts
        except (FileNotFoundError, RowsFileError):
            return {}

    def _facts(self, step: int, indices: Sequence[int]) -> dict[str, Any]:
        """What a step's rollouts depend on; `indices` are of its prompts."""
        data, groups = self.config.data, self.config.algorithm.filter_groups
        return {
            "step": step,
            "weights_step": 0 if self.config.trainer.rollout_only else step - 1,
            "model": self.config.model.path,
            "sampling": _sampling(self.config),
            "choice": [data.gen_batch_size, groups.model_dump() if groups.enable else None],
            "stop": list(self.config.rollout.stop),
            "reward": self.config.reward.function,
            "reward_file": self._reward_file,
            "prompts": list(indices),
            **_of_episodes(self.config),
            "environment_file": self._environment_file,
            "chat": [data.apply_chat_template, data.system_prompt, data.chat_template_kwargs],
            "cut_to_tokens": data.max_prompt_length if data.too_long == "truncate_left" else None,
        }

    def _put(self, path: Path, rows: Rows, facts: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        put_durably(path, lambda partial: write_rows(partial, rows, facts))


class Replay:
    """Rollouts read from a folder instead of asked for: by any number of ranks, whatever number wrote them.

    Args:
        vocab_size: tokens below it are known to every model.
    """

    def __init__(self, folder: Path, config: Config, vocab_size: int, exchange: Exchange):
        self.folder = folder
        self.config = config
        self.vocab_size = vocab_size
        self.exchange = exchange
        self.num_drawn = 0
        """As of `SampledBatches`: a batch for each step."""

    def sample(self, step: int, phase: Callable[[str], AbstractContextManager[None]]) -> Any:
        """Return nothing: the record has the step's responses with their scores."""

    def score(
        self, step: int, responses: object, phase: Callable[[str], AbstractContextManager[None]]
    ) -> tuple[Batch, dict[str, Any]]:
        """Return a step's rows at their owners, each of which reads its own, and metrics.

        Raises:
            ConfigError: they were sampled otherwise, or lack what this run needs.
            RowsFileError: the file is damaged.
        """
        self.num_drawn = step * self.config.data.draw_size
        with phase("replay"), RowsFile(rows_file(self.folder, step)) as file:
            if errors := self._errors(file):
                raise ConfigError(*errors)
            batch = Batch.read(file, self.exchange)
            self._check_known(batch.rows, file.path)
            return batch, {"rollout/num_tokens": file.facts["num_tokens"]}

    def _check_known(self, rows: Rows, path: Path) -> None:
        highest = int(rows.input_ids.max()) if len(rows) else 0
        if highest >= self.vocab_size:
            raise ConfigError(
                f"trainer.replay_rollouts: {path} holds token {highest}, but this run's models know only those below "
                f"{self.vocab_size}: name the record of a run of the same model"
            )

    def _errors(self, file: RowsFile) -> list[str]:
        recorded, ours = file.facts["sampling"], _sampling(self.config)
        errors = [
            f"trainer.replay_rollouts: {file.path} was sampled with {key} {recorded.get(key)}, but here it is {value}: "
            "set it as it was"
            for key, value in ours.items()
            if recorded.get(key) != value
        ]
        errors += [
            f"trainer.replay_rollouts: {file.path} is of a run with rollout.{key} {show(file.facts[key])}, but here "
            f"it is {show(value)}: set it as it was"
            for key, value in _of_episodes(self.config).items()
            if file.facts.get(key, value) != value
        ]
        if "turn_rewards" in file.names and (found := step_scores_errors(self.config)):
            errors += found if file.field("turn_rewards").any() else []
        if self.config.compares_responses and not file.facts.get("compared", True):
            errors.append(
                f"trainer.replay_rollouts: {file.path} may have prompts of whose responses algorithm.mask_truncated "
                "has left one alone, but this run compares them: record the rollouts of a run that does"
            )
        method = self.config.algorithm.method
        return errors + [
            f"trainer.replay_rollouts: {file.path} has no {field}, which algorithm.adv_estimator "
            f"{self.config.algorithm.adv_estimator} needs: record the rollouts of a run with that estimator"
            for field, need in NEEDED.items()
            if getattr(method, need) and field not in file.names
        ]


def _digest(specs: Iterable[str]) -> str:
    """Of the users' files that define these functions or classes; "" of none, and of what only an import can find."""
    files = (parse_spec(spec, builtin={}).file for spec in specs)
    return " ".join(hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files if file)


def _of_episodes(config: Config) -> dict[str, Any]:
    """What episodes depend on, by the keys of `rollout`."""
    rollout = config.rollout
    return {
        "environment": rollout.environment,
        "tools": list(rollout.tools),
        "tool_call_parser": rollout.tool_call_parser,
        "max_turns": rollout.max_turns,
    }


def _sampling(config: Config) -> dict[str, Any]:
    return {key: attrgetter(key)(config) for key in SAMPLING}

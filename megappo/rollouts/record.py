"""Recorded rollouts: each step's scored rows in a file, to inspect, and to train on again without engines."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from megappo.batch.exchange import Batch, Exchange
from megappo.batch.rows_file import RowsFile, write_rows
from megappo.config.config_error import ConfigError, show
from megappo.config.schema import Config
from megappo.config.score_checks import step_scores_errors
from megappo.data.prompts import Prompt, PromptDataset
from megappo.errors import ActionableError
from megappo.observe.files import rows_file
from megappo.rollouts.fingerprint import (
    EPISODE_KEYS,
    PROMPT_CONTENT,
    SAMPLING_KEYS,
    changed_settings,
    key_values,
    prompt_digest,
    rollout_settings,
)
from megappo.rollouts.served_teachers import with_served_log_probs
from megappo.rollouts.step_responses import Batches
from megappo.runtime.durable_files import put_durably

ESTIMATOR_FIELDS = {"baselines": "needs_greedy_baseline", "score_components": "needs_score_components"}
"""Fields that some estimators need."""


class Record:
    """Writes the rows of every step into a folder."""

    def __init__(self, folder: Path, config: Config, exchange: Exchange):
        self.folder = folder
        self._config = config
        self._exchange = exchange
        self._rollout_settings = rollout_settings(config)

    def write(
        self,
        step: int,
        batch: Batch,
        prompts: Sequence[Prompt],
        num_tokens: int,
        num_drawn: int,
    ) -> None:
        """Write a step's rows over what an earlier run left; all ranks together.

        Only the labels of the prompts' records are kept, to be shown: other fields may be large, and the prompts'
        indices lead to them.

        Args:
            num_drawn: prompts that the steps so far have drawn.
        Raises:
            OSError, OtherRankError: the file cannot be written.
        """
        rows = batch.at_rank_0(self._exchange)
        config = self._config
        settings = self._settings(step)
        facts = {
            "step": step,
            "weights_step": settings["weights_step"],
            "model": config.model.path,
            "sampling": key_values(config, SAMPLING_KEYS),
            "settings": settings,
            "prompts": [prompt.index for prompt in prompts],
            "prompt_digests": list(map(prompt_digest, prompts)),
            "labels": [prompt.label for prompt in prompts],
            "prompts_drawn": num_drawn,
            "num_tokens": num_tokens,
            "compared": config.compares_responses or not config.algorithm.mask_truncated,
            "teachers": _routes(config),
        }

        def put() -> None:
            path = rows_file(self.folder, step)
            path.parent.mkdir(parents=True, exist_ok=True)
            put_durably(path, lambda partial: write_rows(partial, rows, facts))

        self._exchange.on_rank_0(put)

    def valid_steps(self, prompts: PromptDataset) -> tuple[int, int, list[str]]:
        """Return how many steps, from the first on, are recorded as this run would write them; how many prompts they
        have drawn; and what has changed since the next step was recorded, if it was. All ranks together."""
        return self._exchange.on_rank_0(lambda: self._valid_steps(prompts))

    def _valid_steps(self, prompts: PromptDataset) -> tuple[int, int, list[str]]:
        config = self._config
        chooses = config.data.gen_batch_size is not None or config.algorithm.filter_groups.enable
        num_drawn = 0
        for step in range(1, self._config.trainer.total_steps + 1):
            try:
                with RowsFile(rows_file(self.folder, step)) as file:
                    facts = file.facts
            except (FileNotFoundError, ActionableError):
                return step - 1, num_drawn, []
            if "prompt_digests" not in facts:
                return step - 1, num_drawn, ["the version of megappo"]
            draws = range(num_drawn, facts["prompts_drawn"], self._config.data.draw_size)
            drawn = [prompt_digest(prompt) for prompt in chain.from_iterable(map(prompts.batch, draws))]
            changed = changed_settings(facts["settings"], self._settings(step))
            trained = facts["prompt_digests"]
            is_known = set(trained) <= set(drawn) if chooses else trained == drawn
            if not is_known:
                changed.append(PROMPT_CONTENT)
            if changed:
                return step - 1, num_drawn, changed
            num_drawn = facts["prompts_drawn"]
        return self._config.trainer.total_steps, num_drawn, []

    def _settings(self, step: int) -> dict[str, Any]:
        """Return everything that a step's rollouts depend on, except its prompts."""
        return self._rollout_settings | {"weights_step": step - 1 if self._config.recipe.trains else 0}


class Replay(Batches):
    """Recorded rows in place of sampled ones: any number of ranks reads what any number of ranks wrote.

    Args:
        vocab_size: tokens below it are known to every model.
        key: the config's key that names the folder; trainer.replay_held_out may have any number of prompts.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        vocab_size: int,
        exchange: Exchange,
        key: str = "trainer.replay_rollouts",
    ):
        self._folder = folder
        self._config = config
        self._key = key
        self._vocab_size = vocab_size
        self._exchange = exchange
        self._are_routed = any(one.when for one in config.teachers.values())

    def score(
        self,
        step: int,
        responses: None,
        phase: Callable[[str], AbstractContextManager[None]],
    ) -> tuple[Batch, dict[str, Any]]:
        """Return a step's rows at their owners, each of which reads its own, and metrics.

        Raises:
            ConfigError: this run does not fit the record.
            ActionableError: the file is damaged.
        """
        self.num_drawn = step * self._config.data.draw_size
        path = rows_file(self._folder, step)
        with phase("replay"), RowsFile(path) as file:
            if errors := self._errors(file):
                raise ConfigError(*(f"{self._key}: {path} {error}" for error in errors))
            batch = file.batch(self._exchange)
            if self._config.teachers and not self._are_routed:
                fields = batch.rows.fields | {"teacher": torch.ones(len(batch.rows))}
                batch = replace(batch, rows=replace(batch.rows, fields=fields))
            batch = replace(batch, rows=with_served_log_probs(self._config, batch.rows))
            highest = int(batch.rows.input_ids.max()) if len(batch.rows) else 0
            if highest >= self._vocab_size:
                raise ConfigError(
                    f"{self._key}: {path} holds token {highest}, but this run's models know only those "
                    f"below {self._vocab_size}: name the record of a run of the same model"
                )
            return batch, {"rollout/num_tokens": file.facts["num_tokens"]}

    def _errors(self, file: RowsFile) -> list[str]:
        config = self._config
        facts = file.facts
        if "settings" not in facts:
            return ["was written by another version of this program: record the rollouts again"]
        errors = []
        for key, value in key_values(config, SAMPLING_KEYS + EPISODE_KEYS).items():
            recorded = facts["settings"][key]
            is_free = key == "data.train_batch_size" and self._key == "trainer.replay_held_out"
            if recorded != value and not is_free:
                change = f"{key} {show(recorded)}, but here it is {show(value)}: set it to the record's value"
                errors.append(f"was sampled with {change}")
        if "turn_rewards" in file.names and file.field("turn_rewards").any():
            errors += [f"has scores of steps: {error}" for error in step_scores_errors(config)]
        if config.compares_responses and not facts["compared"]:
            errors.append(
                "may have prompts with a single response, as algorithm.mask_truncated has masked the others, but this "
                "run compares responses: record the rollouts of a run that does"
            )
        for field, need in ESTIMATOR_FIELDS.items():
            if getattr(config.algorithm.method, need) and field not in file.names:
                needed = f"which algorithm.adv_estimator {config.algorithm.adv_estimator} needs"
                errors.append(f"has no {field}, {needed}: record the rollouts of a run with that estimator")
        if self._are_routed and facts.get("teachers") != _routes(config):
            recorded = show(facts.get("teachers") or "none")
            errors.append(
                f"was recorded with other teachers, `when`, order or distillation.without_teacher ({recorded}), "
                "which decide which rows each has: set these to the record's, or record the rollouts again"
            )
        if "prompt_records" in file.names:
            errors.append("is of a model with vision, whose images a record does not hold: sample instead")
        if config.rollout.routing_replay and "expert_choices" not in file.names:
            errors.append("has no expert_choices, which rollout.routing_replay needs: record a run with it")
        return errors


def _routes(config: Config) -> list[Any]:
    """Return the name of each teacher with the fields of its rows, in the order of their numbers in rows, and, if there
    are any, what rows without a teacher are; as JSON has it."""
    routes = [[name, one.model_dump(mode="json")["when"]] for name, one in config.teachers.items()]
    return [*routes, config.distillation.without_teacher] if routes else []

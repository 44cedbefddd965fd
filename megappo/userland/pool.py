"""Scoring responses by reward functions in worker processes: user code can neither hang nor crash the trainer."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from megappo.config.schema import Reward
from megappo.userland.crew import Crew, RewardError, Settings
from megappo.userland.forms import Graded
from megappo.userland.process import Function
from megappo.userland.spec import parse_spec
from megappo.userland.work import Row, Scoring

__all__ = ["RewardError", "RewardPool", "load_configured", "load_reward"]


def load_reward(specs: str | Mapping[str, float], **settings: Any) -> "RewardPool":
    """Start the workers of a reward function, or of several, and wait until each has loaded them.

    Args:
        specs: a built-in's name, FILE.py:FUNCTION or package.module:FUNCTION, of one of `forms.FORMS`; gives for each
            response a finite number, or a list of as many as for all the others. Of several, each with the factor of
            its scores, a response has all their scores.
        settings: see `crew.Settings`.

    Raises:
        ValueError: the spec is malformed or names no file.
        RewardError: the file cannot be imported or has no such function.
    """
    return RewardPool({specs: 1.0} if isinstance(specs, str) else specs, Settings(**settings))


def load_configured(reward: Reward) -> "RewardPool":
    """`load_reward` as the config's section says."""
    return load_reward(
        reward.weights,
        num_workers=reward.num_workers,
        timeout_seconds=reward.timeout_seconds,
        memory_limit_gib=reward.memory_limit_gib,
        pass_env=reward.pass_env,
        on_error=reward.on_error,
        batch_size=reward.batch_size,
        options=reward.options,
    )


class RewardPool(AbstractContextManager):
    """Reward functions in worker processes; made by `load_reward`, usable as a context manager. After an error that is
    raised it is closed.

    Attributes:
        takes: what the functions take of a record besides prompt and label.
    """

    def __init__(self, weights: Mapping[str, float], settings: Settings):
        found = {spec: parse_spec(spec) for spec in weights}
        functions = {
            spec: Function(one.module or one.file, one.name, weights[spec], settings.options.get(spec, {}))
            for spec, one in found.items()
        }
        self.on_error = settings.on_error
        self._crew = Crew(functions, settings)
        self.spec, self.takes = self._crew.spec, self._crew.takes

    @property
    def waits_for_all(self) -> bool:
        """Whether there are no scores of any response before all have been written."""
        return self._crew.waits_for_all

    def begin(self) -> Scoring:
        """Responses to score, to be added as they come.

        Raises:
            RewardError: the pool is closed.
        """
        return self._crew.begin()

    def score(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        labels: Sequence[Any],
        columns: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Graded]:
        """The finite scores of each response, in order: one or more, as the function gives them.

        Of one call of a function there are as many for each; `Rollouts.score` sees that there are over all.

        Args:
            columns: what the function takes of each response's record, as JSON; None where that is nothing.
        Raises:
            RewardError: the function raised, hung, died, or did not return finite numbers, as many for each response.
        """
        columns = [{}] * len(responses) if columns is None else columns
        lists = {"prompts": prompts, "responses": responses, "labels": labels, "columns": columns}
        if len(set(map(len, lists.values()))) > 1:
            counts = ", ".join(f"{len(values)} {name}" for name, values in lists.items())
            raise ValueError(f"{counts}: not as many")
        scoring = self.begin()
        scoring.add([Row(*of_row) for of_row in zip(prompts, responses, labels, columns, strict=True)])
        return scoring.results()

    def close(self) -> None:
        """End all workers and what they started. May be called again."""
        self._crew.close()

    def __exit__(self, *error: object) -> None:
        self.close()

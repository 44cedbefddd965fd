"""Pools of reward functions whose code is in the test, and rows to score."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megappo.userland.grades import Grade
from megappo.userland.rewards import RewardPool, load_reward
from megappo.userland.signatures import Row


def load(
    folder: Path, body: str, num_workers: int = 1, timeout_seconds: float = 20.0, **settings: object
) -> RewardPool:
    """Return a pool for `f`, defined by a Python file."""
    (folder / "reward.py").write_text(textwrap.dedent(body))
    spec = f"{folder}/reward.py:f"
    return load_reward(spec, num_workers=num_workers, timeout_seconds=timeout_seconds, **settings)


def rows_of(
    prompts: Sequence[str],
    responses: Sequence[str],
    labels: Sequence[Any],
    columns: Sequence[Mapping[str, Any]] | None = None,
) -> list[Row]:
    columns = [{}] * len(responses) if columns is None else columns
    return [Row(*of_row) for of_row in zip(prompts, responses, labels, columns, strict=True)]


def score(pool: RewardPool, count: int = 3) -> list[float]:
    """Return the only score of each response."""
    return [only for [only] in scores(pool, count)]


def scores(pool: RewardPool, count: int = 3) -> list[list[float]]:
    rows = [f"p{i}" for i in range(count)], [f"r{i}" for i in range(count)], list(range(count))
    return scores_of(pool.score(rows_of(*rows)))


def scores_of(grades: Sequence[Grade]) -> list[list[float]]:
    """Return the scores of responses that have no other parts."""
    assert not any(one.parts for one in grades)
    return [one.scores for one in grades]

"""Scoring responses by a reward function in worker processes: user code can neither hang nor crash the trainer."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from megappo.config.schema import Reward
from megappo.observe.life import LIFE
from megappo.rewards.forms import Graded, Rows
from megappo.rewards.process import Worker, WorkerError
from megappo.rewards.spec import parse_spec

START_TIMEOUT_SECONDS = 60.0
"""How long a worker may take to import the user's file."""
CLOSE_TIMEOUT_SECONDS = 2.0
"""How long an idle worker may take to end by itself."""


class RewardError(RuntimeError):
    """The reward function failed; the message names it and says what to do. The workers are gone."""


def load_reward(
    specs: str | Mapping[str, float],
    *,
    num_workers: int,
    timeout_seconds: float,
    memory_limit_gib: float | None = None,
    pass_env: Collection[str] = (),
) -> "RewardPool":
    """Start the workers of a reward function, or of several, and wait until each has loaded them.

    Args:
        specs: a built-in's name, FILE.py:FUNCTION or package.module:FUNCTION, of one of `forms.FORMS`; gives for each
            response a finite number, or a list of as many as for all the others. Of several, each with the factor of
            its scores, a response has all their scores.
        num_workers: processes, each called with an equal share of the rows.
        timeout_seconds: how long one call may take.
        memory_limit_gib: memory that a process may take; None: any.
        pass_env: variables that the workers get although their names are those of secrets.

    Raises:
        ValueError: the spec is malformed or names no file.
        RewardError: the file cannot be imported or has no such function.
    """
    weights = {specs: 1.0} if isinstance(specs, str) else specs
    found = {spec: parse_spec(spec) for spec in weights}
    functions = [(one.module or one.file, one.name, weights[spec]) for spec, one in found.items()]
    workers = [Worker(functions, memory_limit_gib, pass_env) for _ in range(num_workers)]
    return RewardPool(" + ".join(weights), workers, timeout_seconds, memory_limit_gib)


def load_configured(reward: Reward, *, num_workers: int) -> "RewardPool":
    """`load_reward` as the config's section says."""
    return load_reward(
        reward.weights,
        num_workers=num_workers,
        timeout_seconds=reward.timeout_seconds,
        memory_limit_gib=reward.memory_limit_gib,
        pass_env=reward.pass_env,
    )


class RewardPool(AbstractContextManager):
    """A reward function spread over worker processes; made by `load_reward`, usable as a context manager.

    Keep it in the thread that made it: the kernel ends the workers together with that thread, so they never outlive the
    trainer, however it ends. After any error the workers are ended and the pool is closed.

    Attributes:
        takes: what the function takes of a record besides prompt and label.
    """

    def __init__(self, spec: str, workers: list[Worker], timeout_seconds: float, memory_limit_gib: float | None = None):
        self.spec = spec
        self.timeout_seconds = timeout_seconds
        self.memory_limit_gib = memory_limit_gib
        self._workers = workers
        self.takes, *_ = self._all([worker.wait_ready for worker in workers], START_TIMEOUT_SECONDS, "load")

    def score(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        labels: Sequence[Any],
        columns: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Graded]:
        """The finite scores of each response, in order: one or more, as the function gives them.

        Within a worker's share there are as many for each; `Rollouts.score` sees that there are over all.

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
        if not self._workers:
            raise RewardError(f"reward function {self.spec} is closed")
        count = min(len(self._workers), len(responses))
        calls = []
        for i, worker in enumerate(self._workers[:count]):
            part = slice(len(responses) * i // count, len(responses) * (i + 1) // count)
            rows = Rows(**{name: list(values[part]) for name, values in lists.items()})
            calls.append(partial(worker.grade, rows))
        parts = self._all(calls, self.timeout_seconds, "score its responses")
        return [graded for part in parts for graded in part]

    def _all(self, calls: Sequence[Callable[[float], Any]], timeout_seconds: float, task: str) -> list[Any]:
        """What the calls return, each of which has a worker of its own; the first error ends the pool."""
        if not calls:
            return []
        try:
            return self._together(calls, time.monotonic() + timeout_seconds)
        except TimeoutError as error:
            detail = f" ({error})" if str(error) else ""
            reason = f"took longer than {timeout_seconds:g} seconds to {task} and was stopped{detail}"
            raise self._error(reason) from error
        except WorkerError as error:
            raise self._error(str(error)) from error

    def _together(self, calls: Sequence[Callable[[float], Any]], deadline: float) -> list[Any]:
        with LIFE.waiting(), ThreadPoolExecutor(len(calls)) as threads:
            try:
                futures = [threads.submit(call, deadline) for call in calls]
                for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                    future.result()
                return [future.result() for future in futures]
            except BaseException:
                self.close(0.0)  # the other calls end with their workers
                raise

    def _error(self, reason: str) -> RewardError:
        remedy = "fix it, choose another reward.function, or (if it was slow) raise reward.timeout_seconds"
        if self.memory_limit_gib is not None:
            remedy += f", (if it lacked memory) reward.memory_limit_gib ({self.memory_limit_gib:g})"
        return RewardError(f"reward function {self.spec} {reason}\n{remedy}")

    def close(self, timeout_seconds: float = CLOSE_TIMEOUT_SECONDS) -> None:
        """End all workers and what they started. May be called again.

        Args:
            timeout_seconds: how long an idle one may take to end by itself.
        """
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.hang_up()
        for worker in workers:
            worker.end(timeout_seconds)

    def __exit__(self, *error: object) -> None:
        self.close()

"""A step's rows from the engines; `trainer.record` has them from a file."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import Any, Protocol

from megappo.data.prompts import Prompt, PromptDataset
from megappo.trainer.component import Batch
from megappo.trainer.record import Record
from megappo.trainer.rollouts import Rollouts


class Phase(Protocol):
    """Times a part of a step."""

    def __call__(self, phase: str) -> AbstractContextManager[None]: ...

    def seconds(self, phase: str) -> float: ...


class SampledBatches:
    """Rows that the engines write and the reward function scores. All ranks call together.

    Args:
        sleep: called once the engines have written all.
        record: gets each step's rows; None for none.
    """

    def __init__(
        self, prompts: PromptDataset, rollouts: Rollouts, sleep: Callable[[], None], record: Record | None = None
    ):
        self.prompts = prompts
        self.rollouts = rollouts
        self.sleep = sleep
        self.record = record
        self._thread = ThreadPoolExecutor(1)
        self._ahead: dict[int, list[Prompt]] = {}  # step -> this rank's share of its prompts

    def __call__(
        self, step: int, phase: Phase, when_sampled: Callable[[], None] = lambda: None
    ) -> tuple[Batch, dict[str, Any]]:
        """A step's rows at their owners, and metrics; `when_sampled` is called before the rewards, which may fail."""
        exchange = self.rollouts.exchange
        part_of = partial(self.prompts.batch, rank=exchange.rank, world_size=exchange.world_size)
        mine = self._ahead[step] if step in self._ahead else part_of(step - 1)
        prompts = list(chain.from_iterable(exchange.share(mine)))
        with phase("rollout"):
            ahead = self._thread.submit(part_of, step)  # the next step's, while the engines are at work
            responses = self.rollouts.respond(prompts)
            self.sleep()
            self._ahead = {step + 1: ahead.result()}  # here: tokenizers serve one thread at a time
        when_sampled()
        with phase("reward"):
            batch, metrics = self.rollouts.collect(responses, prompts)
        num_tokens = metrics["rollout/num_tokens"]
        if self.record is not None:
            with phase("record"):
                self.record.write(step, batch, prompts, num_tokens)
        return batch, metrics | {"rollout/tokens_per_second": num_tokens / phase.seconds("rollout")}

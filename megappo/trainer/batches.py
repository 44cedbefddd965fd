"""A step's rows from the engines; `trainer.record` has them from a file."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Protocol

from megappo.batch.step_batch import Batch
from megappo.data.prompts import Prompt, PromptDataset
from megappo.rollouts.record import Record
from megappo.trainer.filtering import Chosen, choose_finished, choose_groups
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
        num_drawn: prompts that steps before have drawn.
    Attributes:
        num_drawn: the same, with those that were drawn here.
    """

    def __init__(
        self,
        prompts: PromptDataset,
        rollouts: Rollouts,
        sleep: Callable[[], None],
        record: Record | None = None,
        *,
        num_drawn: int = 0,
    ):
        self.prompts = prompts
        self.rollouts = rollouts
        self.sleep = sleep
        self.record = record
        self.num_drawn = num_drawn
        self._thread = ThreadPoolExecutor(1)
        self._ahead: dict[int, Future[list[Prompt]]] = {}  # num_drawn before a batch -> this rank's share of it

    def sample(self, step: int, phase: Phase) -> Chosen:
        """Return this rank's responses to a step's prompts. The engines sleep afterwards."""
        chosen = self._chosen(phase)
        with phase("rollout"):
            self.sleep()
            wait(self._ahead.values())  # here: tokenizers serve one thread at a time
        return chosen

    def score(self, step: int, chosen: Chosen, phase: Phase) -> tuple[Batch, dict[str, Any]]:
        """Return the scored rows of a step at their owners, and metrics."""
        with phase("reward"):
            batch, metrics = self.rollouts.collect(chosen.responses, chosen.prompts)
        num_tokens = metrics["rollout/num_tokens"] + chosen.num_dropped_tokens
        metrics |= chosen.metrics | {"rollout/num_tokens": num_tokens}
        if self.record is not None:
            with phase("record"):
                self.record.write(step, batch, chosen.prompts, num_tokens, self.num_drawn)
        return batch, metrics | {"rollout/tokens_per_second": num_tokens / phase.seconds("rollout")}

    def _chosen(self, phase: Phase) -> Chosen:
        """Responses to a batch of prompts, or to what is chosen of several."""
        config = self.rollouts.config
        size, over_samples = config.data.train_batch_size, config.data.gen_batch_size is not None
        if config.algorithm.filter_groups.enable:
            settings = config.algorithm.filter_groups
            return choose_groups(self.rollouts, self._draw, settings, size, phase, over_samples=over_samples)
        with phase("rollout"):
            prompts = self._draw()
            if over_samples:
                chosen = choose_finished(self.rollouts, prompts, size)
            else:
                chosen = Chosen(self.rollouts.respond(prompts), prompts, 0, {})
            return replace(chosen, responses=self.rollouts.with_greedy(chosen.responses, chosen.prompts))

    def _draw(self) -> list[Prompt]:
        """The next batch of prompts; the one after it is prepared while the engines are at work."""
        exchange = self.rollouts.exchange
        part_of = partial(self.prompts.batch, rank=exchange.rank, world_size=exchange.world_size)
        ahead = self._ahead.get(self.num_drawn)
        mine = ahead.result() if ahead is not None else part_of(self.num_drawn)
        self.num_drawn += self.rollouts.config.data.draw_size
        self._ahead = {self.num_drawn: self._thread.submit(part_of, self.num_drawn)}
        return list(chain.from_iterable(exchange.share(mine)))

"""A run that only rolls out (`trainer.rollout_only`): engines and reward function, without any model of the trainer."""

from dataclasses import dataclass

from megappo.batch.exchange import Exchange
from megappo.observe.metrics import reduce_ranks
from megappo.observe.observer import NullObserver, Observer
from megappo.observe.timers import Timers
from megappo.trainer.batches import SampledBatches
from megappo.trainer.statistics import row_metrics


@dataclass
class RollingOut:
    """Writes the rollouts of every step on record, all by the weights of model.path."""

    total_steps: int
    exchange: Exchange
    batches: SampledBatches
    observer: Observer | NullObserver
    timers: Timers

    def run(self) -> None:
        """From the first step to the last; all ranks together."""
        self.timers.restart()
        for step in range(1, self.total_steps + 1):
            batch, metrics = self.batches(step, self.timers)
            metrics |= row_metrics(self.exchange, batch.rows)
            timings, memory = self.timers.lap()
            self.observer.log(step, metrics | timings | reduce_ranks(self.exchange.share(memory)))
        self.exchange.share(None)
        self.observer.finish()

"""A run that only rolls out (`trainer.rollout_only`): engines and reward function, without any model of the trainer."""

from dataclasses import dataclass

from megappo.batch.exchange import Exchange
from megappo.config.schema import Trainer
from megappo.observe.metrics import reduce_ranks
from megappo.observe.observer import NullObserver, Observer
from megappo.observe.timers import Timers
from megappo.runtime.interruption import INTERRUPTION, deadline
from megappo.trainer.batches import SampledBatches
from megappo.trainer.rollouts import raise_if_interrupted
from megappo.trainer.statistics import row_metrics


@dataclass
class RolloutOnly:
    """Writes the rollouts of every step on record, all by the weights of model.path.

    Attributes:
        num_written: steps that are on record already.
    """

    settings: Trainer
    num_written: int
    exchange: Exchange
    batches: SampledBatches
    observer: Observer | NullObserver
    timers: Timers

    def run(self) -> None:
        """From the first step that is not on record to the last; all ranks together.

        Raises:
            Interrupted: the run was asked to end, on any rank, or its time is over.
        """
        self.timers.restart()
        INTERRUPTION.begin_saving(deadline(self.settings.time_limit, self.settings.grace_seconds))
        for step in range(self.num_written + 1, self.settings.total_steps + 1):
            raise_if_interrupted(self.exchange)
            responses = self.batches.sample(step, self.timers)
            batch, metrics = self.batches.score(step, responses, self.timers)
            metrics |= row_metrics(self.exchange, batch.rows)
            metrics |= reduce_ranks(self.exchange.share(self.timers.memory()))
            self.observer.log(step, metrics | self.timers.lap())
        INTERRUPTION.end_saving()
        self.exchange.share(None)
        self.observer.finish()

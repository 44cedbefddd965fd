"""A run that only samples (`trainer.rollout_only`): engines and reward function, without any model of the trainer."""

from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from megappo.batch.exchange import Exchange
from megappo.engines.handle import EngineHandle
from megappo.observe.metrics import reduce_ranks
from megappo.observe.observer import open_observer
from megappo.observe.timers import Timers
from megappo.placement.run_plan import RunPlan
from megappo.rollouts.datasets import load_datasets
from megappo.rollouts.record import Record
from megappo.rollouts.rollouts import make_rollouts, raise_if_interrupted
from megappo.runtime.interruption import INTERRUPTION, deadline
from megappo.trainer.batches import SampledBatches
from megappo.trainer.progress import Progress
from megappo.trainer.statistics import row_metrics


def rollout_only(plan: RunPlan, own: EngineHandle, cleanup: ExitStack) -> None:
    """Record the rollouts of all steps that are not recorded yet, with the weights of model.path; all ranks together.

    Args:
        own, cleanup: see `execute`.
    Raises:
        Interrupted: a signal on any rank, or the time limit, ends the run.
    """
    config, exchange = plan.config, Exchange(dist.group.WORLD)
    settings = config.trainer
    datasets = load_datasets(config, own.workers, exchange)
    left_out = datasets.check(exchange)
    record = Record(Path(settings.record_rollouts), config, exchange)
    num_valid, num_drawn, changed = record.valid_steps(datasets.train)
    start = [Progress(plan.requested, exchange).describe()]
    if num_valid:
        start = [f"continuing after step {num_valid}, the last of {record.folder} that this run would write alike"]
    if changed:
        start.append(f"writing step {num_valid + 1} of {record.folder} again: {' and '.join(changed)} changed")
    lines = [*start, *config.absences, *left_out]
    observer = open_observer(config, lines, num_valid + 1 if num_valid else 0, exchange.rank, cleanup)
    own.wait_ready()
    rollouts = make_rollouts(plan, own, datasets, exchange, observer)
    batches = SampledBatches(datasets, rollouts, sleep=lambda: None, record=record, num_drawn=num_drawn)
    timers = Timers()
    INTERRUPTION.begin_saving(deadline(settings.time_limit, settings.grace_seconds))
    for step in range(num_valid + 1, settings.total_steps + 1):
        raise_if_interrupted(exchange)
        responses = batches.sample(step, timers)
        batch, metrics = batches.score(step, responses, timers)
        metrics |= row_metrics(exchange, batch.rows)
        metrics |= reduce_ranks(exchange.share(timers.memory()))
        observer.log(step, metrics | timers.lap())
    INTERRUPTION.end_saving()
    exchange.share(None)
    observer.finish()

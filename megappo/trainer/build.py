"""Building a run from its config."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from megappo.batch.exchange import Exchange
from megappo.config.schema import Config
from megappo.engines.handle import EngineHandle
from megappo.engines.restarts import EngineRestarts
from megappo.observe.observer import NullObserver, Observer
from megappo.placement.run_plan import RunPlan
from megappo.rollouts.datasets import load_datasets
from megappo.rollouts.record import Record, Replay
from megappo.rollouts.rollouts import Rollouts
from megappo.trainer.batches import SampledBatches
from megappo.trainer.inference import NoEngines, Probe, connect, start_engines
from megappo.trainer.models import build_models
from megappo.trainer.phases import Phases
from megappo.trainer.progress import Progress
from megappo.trainer.run import Run
from megappo.trainer.utilisation import Utilisation


def build_run(plan: RunPlan, own: EngineHandle, cleanup: ExitStack) -> Run:
    """Build everything a run needs on this rank; all ranks together, after the default process group exists.

    Args:
        own: has been started, unless the run replays rollouts.
        cleanup: what must be ended when the run ends, however it ends, is registered here.
    """
    exchange = Exchange(dist.group.WORLD)
    config = plan.config
    progress = Progress(plan.requested, exchange)
    replayed = config.trainer.replay_rollouts
    datasets = load_datasets(config, own.workers, exchange)
    left_out = datasets.check(exchange)
    is_new = progress.checkpoint is None and not config.rollout.engines  # servers that run already may hold anything
    started = None
    if replayed is None:
        started = start_engines(plan, own, exchange, as_loaded=config.proves_weights and is_new)
    models = build_models(plan, exchange)
    progress.restore(models)
    start = [progress.describe()]
    observer = make_observer(config, start, progress.start_step + 1 if progress.checkpoint else 0, exchange, cleanup)
    for line in (*left_out, *plan.decisions()):
        observer.message(line)
    phase = Phases(models)
    if started is not None:
        num_engines = plan.layouts["rollout"].data
        restarts = EngineRestarts(own, exchange, observer.message, config.rollout.max_engine_restarts)
        rollouts = Rollouts(config, datasets, restarts, exchange, observer, num_engines=num_engines)
        probe = Probe(config, datasets.train, datasets.stop_token_ids, restarts, models.actor, num_engines)
        engines = connect(plan, started, restarts, models, probe, phase)
        record = _record(config, exchange)
        batches = SampledBatches(datasets, rollouts, engines.sleep, record, num_drawn=progress.num_drawn)
    else:
        rollouts, engines = None, NoEngines()
        batches = Replay(Path(replayed), config, datasets.vocab_size, exchange)
    utilisation = Utilisation(config.model.dtype, models.components, models.specs, exchange)
    return Run(
        *(config, exchange, datasets, models, engines, rollouts, batches, progress, observer, phase, utilisation)
    )


def _record(config: Config, exchange: Exchange) -> Record | None:
    folder = config.trainer.record_rollouts
    return None if folder is None else Record(Path(folder), config, exchange)


def make_observer(
    config: Config, start: Sequence[str], resume_step: int, exchange: Exchange, cleanup: ExitStack
) -> Observer | NullObserver:
    """Rank 0's writes and prints; it begins with what kind of run this is.

    Args:
        start: lines to begin with, if they are not empty.
        resume_step: see `Observer`.
    """
    folder, total_steps = config.trainer.output_dir, config.trainer.total_steps
    observer = Observer(folder, total_steps, resume_step) if exchange.rank == 0 else NullObserver()
    cleanup.callback(observer.close)
    for line in (*filter(None, start), *config.absences):
        observer.message(line)
    return observer

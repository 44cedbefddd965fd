"""A run that has been checked: built, and run to its end. Imports megatron-core, which takes seconds."""

from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from megappo.batch.exchange import Exchange
from megappo.checkpoint.folders import write_durably
from megappo.config.loading import changes_since, dump_config
from megappo.config.schema import Config
from megappo.observe.files import CONFIG_FILE
from megappo.observe.observer import open_observer
from megappo.placement.run_plan import RunPlan
from megappo.runtime import megatron_setup

megatron_setup.install()  # must come before the first import of megatron.core

from megappo.engines.handle import EngineHandle  # noqa: E402
from megappo.rollouts.datasets import load_datasets  # noqa: E402
from megappo.rollouts.record import Record, Replay  # noqa: E402
from megappo.rollouts.rollouts import make_rollouts  # noqa: E402
from megappo.trainer import loop  # noqa: E402
from megappo.trainer.batches import SampledBatches  # noqa: E402
from megappo.trainer.eval_only import evaluate_only  # noqa: E402
from megappo.trainer.inference import NoEngines, Probe, connect, start_engines  # noqa: E402
from megappo.trainer.models import build_models  # noqa: E402
from megappo.trainer.phases import Phases  # noqa: E402
from megappo.trainer.progress import Progress  # noqa: E402
from megappo.trainer.rollout_only import rollout_only  # noqa: E402
from megappo.trainer.run import Run, engines_have_initial_weights  # noqa: E402
from megappo.trainer.utilisation import Utilisation  # noqa: E402


def execute(plan: RunPlan, own: EngineHandle, cleanup: ExitStack) -> None:
    """Train, or only sample or evaluate; all ranks together, after the default process group exists.

    Args:
        own: this rank's engine, started. A run that replays rollouts has none; an evaluation starts its own, as the
            model's folder depends on a checkpoint.
        cleanup: closes what must be closed however the run ends.
    """
    if plan.config.trainer.eval_only:
        evaluate_only(plan, cleanup)
    elif plan.config.trainer.rollout_only:
        rollout_only(plan, own, cleanup)
    else:
        run = build_run(plan, own, cleanup)
        if run.exchange.rank == 0:  # not before: a folder that is refused stays as it was
            _write_config(plan.requested, run)
        loop.train(run)


def build_run(plan: RunPlan, own: EngineHandle, cleanup: ExitStack) -> Run:
    """Build the parts of a run on this rank; all ranks together. Arguments as for `execute`."""
    exchange = Exchange(dist.group.WORLD)
    config = plan.config
    progress = Progress(plan.requested, exchange)
    datasets = load_datasets(config, own.workers, exchange)
    left_out = datasets.check(exchange)
    replayed = config.trainer.replay_rollouts
    started = None
    if replayed is None:
        as_loaded = config.proves_weights and engines_have_initial_weights(config, progress)
        started = start_engines(plan, own, exchange, as_loaded=as_loaded)
    models = build_models(plan, exchange)
    progress.restore(models)
    lines = [progress.describe(), *config.absences, *left_out, *plan.decisions()]
    resume_step = progress.start_step + 1 if progress.checkpoint else 0
    observer = open_observer(config, lines, resume_step, exchange.rank, cleanup)
    phase = Phases(models)
    if started is not None:
        rollouts = make_rollouts(plan, own, datasets, exchange, observer)
        restarts, num_engines = rollouts.restarts, rollouts.num_engines
        probe = Probe(config, datasets.train, datasets.stop_token_ids, restarts, models.actor, num_engines)
        engines = connect(plan, started, restarts, models, probe, phase)
        folder = config.trainer.record_rollouts
        record = None if folder is None else Record(Path(folder), config, exchange)
        batches = SampledBatches(datasets, rollouts, engines.sleep, record, num_drawn=progress.num_drawn)
    else:
        rollouts, engines = None, NoEngines()
        batches = Replay(Path(replayed), config, datasets.vocab_size, exchange)
    return Run(
        config=config,
        exchange=exchange,
        datasets=datasets,
        models=models,
        engines=engines,
        rollouts=rollouts,
        batches=batches,
        progress=progress,
        observer=observer,
        phase=phase,
        utilisation=Utilisation(config.model.dtype, models.components, models.specs, exchange),
    )


def _write_config(config: Config, run: Run) -> None:
    """Write the resolved config beside the results, and report what has changed since the checkpoint's."""
    if run.progress.checkpoint is not None:
        for change in changes_since(run.progress.checkpoint / CONFIG_FILE, config):
            run.observer.message(f"changed since then: {change}")
    write_durably(Path(config.trainer.output_dir, CONFIG_FILE), dump_config(config))

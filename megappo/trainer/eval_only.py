"""A run that only evaluates (`trainer.eval_only`): engines, reward functions and, of a checkpoint, the actor."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megappo.batch.exchange import Exchange
from megappo.checkpoint.checksums import refuse_damaged
from megappo.checkpoint.component import load_model
from megappo.checkpoint.durable import write_durably
from megappo.checkpoint.folders import step_of
from megappo.checkpoint.metadata import read_component
from megappo.checkpoint.store import CheckpointStore
from megappo.config.loading import dump_config
from megappo.config.schema import Config
from megappo.engines.handle import start_engine
from megappo.engines.restarts import EngineRestarts
from megappo.observe.files import CHECKPOINTS, CONFIG_FILE, EVALUATION_FILE
from megappo.observe.metrics import Histogram
from megappo.observe.observer import NullObserver, Observer
from megappo.placement.run_plan import RunPlan
from megappo.preflight.resuming import with_own_folder
from megappo.rollouts.datasets import Datasets, load_datasets
from megappo.runtime.listening import run_store
from megappo.trainer.build import make_observer
from megappo.trainer.evaluation import evaluate
from megappo.trainer.inference import Probe, connect, start_engines
from megappo.trainer.models import Models, build_models
from megappo.trainer.phases import Phases
from megappo.trainer.rollouts import Rollouts


@dataclass
class EvalOnly:
    """Evaluates once.

    Attributes:
        config: its output_dir is the evaluation's own.
        weights: what is evaluated: a checkpoint, or the folder of model.path.
        step: of the checkpoint; 0 without one.
    """

    config: Config
    weights: Path
    step: int
    datasets: Datasets
    rollouts: Rollouts
    observer: Observer | NullObserver

    def run(self) -> None:
        """All ranks together. Leaves metrics, samples, report and evaluation.json."""
        metrics = evaluate(self.rollouts, self.datasets, self.observer, self.step)
        self.observer.log(self.step, metrics)
        self.rollouts.exchange.on_rank_0(lambda: self._write(metrics))
        self.observer.finish()

    def _write(self, metrics: Mapping[str, Any]) -> None:
        folder = Path(self.config.trainer.output_dir)
        numbers = {name: value for name, value in metrics.items() if not isinstance(value, Histogram)}
        content = {"weights": str(self.weights.resolve()), "step": self.step, "metrics": numbers}
        write_durably(folder / EVALUATION_FILE, json.dumps(content, indent=1) + "\n")
        write_durably(folder / CONFIG_FILE, dump_config(self.config))


def build_eval_only(plan: RunPlan, cleanup: ExitStack) -> EvalOnly:
    """Build a run that only evaluates; arguments as of `build_run`."""
    exchange = Exchange(dist.group.WORLD)
    checkpoint = _checkpoint(plan.config, exchange)
    weights, step = checkpoint or Path(plan.config.model.path), step_of(checkpoint) if checkpoint else 0
    requested = with_own_folder(plan.requested, weights)
    plan = plan.changed(with_own_folder(plan.config, weights))
    config = plan.config
    own = start_engine(plan, exchange.rank, run_store(), cleanup)
    datasets = load_datasets(config, own.workers, exchange)
    left_out = datasets.check(exchange)
    # Engines that the run starts read model.path themselves; what others hold is not known.
    needs_actor = checkpoint is not None or bool(config.rollout.engines)
    models = started = None
    if needs_actor:
        started = start_engines(plan, own, exchange, as_loaded=False)
        models = _loaded(plan, checkpoint, exchange)
    observer = make_observer(config, [f"evaluating {weights}", *left_out], 0, exchange, cleanup)
    own.wait_ready()
    num_engines = plan.layouts["rollout"].data
    restarts = EngineRestarts(own, exchange, observer.message, config.rollout.max_engine_restarts)
    rollouts = Rollouts(config, datasets, restarts, exchange, observer, num_engines=num_engines)
    if models is not None and started is not None:
        phase = Phases(models)
        prompts = next(iter(datasets.val.values()))
        probe = Probe(config, prompts, datasets.stop_token_ids, restarts, models.actor, num_engines)
        with phase("sync"):
            engines = connect(plan, started, restarts, models, probe, phase)
            engines.first_sync(verify=config.proves_weights, as_loaded=False)
    return EvalOnly(requested, weights, step, datasets, rollouts, observer)


def _checkpoint(config: Config, exchange: Exchange) -> Path | None:
    """The checkpoint to evaluate, each of its files as it was written.

    Raises:
        CheckpointError: it is damaged.
    """
    if config.trainer.eval_checkpoint is None:
        return CheckpointStore(Path(config.trainer.output_dir) / CHECKPOINTS, 0, exchange).latest()
    path = Path(config.trainer.eval_checkpoint).resolve()
    refuse_damaged(path, exchange)
    return path


def _loaded(plan: RunPlan, checkpoint: Path | None, exchange: Exchange) -> Models:
    """The actor with a checkpoint's weights, whatever layout that was written in; without one with model.path's."""
    models = build_models(plan, exchange)
    engine = models.actor.engine
    if engine is not None and checkpoint is not None:
        folder = checkpoint / "actor"
        load_model(engine.chunks, engine.groups, folder, read_component(folder), models.architecture.vocab_size)
    return models

"""A run that only evaluates (`trainer.eval_only`): engines, reward functions and, for a checkpoint, the actor."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megappo.batch.exchange import Exchange
from megappo.checkpoint.checksums import refuse_damaged
from megappo.checkpoint.component_folder import load_model
from megappo.checkpoint.folders import step_of, write_durably
from megappo.checkpoint.metadata import read_component
from megappo.checkpoint.store import CheckpointStore
from megappo.config.loading import dump_config
from megappo.config.schema import Config
from megappo.engines.handle import start_engine
from megappo.observe.files import CHECKPOINTS, CONFIG_FILE, EVALUATION_FILE
from megappo.observe.observer import open_observer
from megappo.placement.run_plan import RunPlan
from megappo.preflight.resuming import with_own_folder
from megappo.rollouts.datasets import load_datasets
from megappo.rollouts.rollouts import make_rollouts
from megappo.runtime.listening import run_store
from megappo.trainer.evaluation import evaluate
from megappo.trainer.inference import Probe, connect, start_engines
from megappo.trainer.models import Models, build_models
from megappo.trainer.phases import Phases


def evaluate_only(plan: RunPlan, cleanup: ExitStack) -> None:
    """Evaluate a checkpoint, or the model of model.path, once; all ranks together. Write metrics, samples, the report
    and evaluation.json into an output folder of its own.

    Args:
        cleanup: see `execute`.
    """
    exchange = Exchange(dist.group.WORLD)
    checkpoint = _find_checkpoint(plan.config, exchange)
    weights, step = (Path(plan.config.model.path), 0) if checkpoint is None else (checkpoint, step_of(checkpoint))
    requested = with_own_folder(plan.requested, weights)
    plan = plan.changed(with_own_folder(plan.config, weights))
    config = plan.config
    own = start_engine(plan, exchange.rank, run_store(), cleanup)
    datasets = load_datasets(config, own.workers, exchange)
    left_out = datasets.check(exchange)
    # Engines that the run starts have read model.path themselves; other engines may hold any weights.
    needs_actor = checkpoint is not None or bool(config.rollout.engines)
    models = started = None
    if needs_actor:
        started = start_engines(plan, own, exchange, as_loaded=False)
        models = _load_models(plan, checkpoint, exchange)
    lines = [f"evaluating {weights}", *left_out, *config.absences]
    observer = open_observer(config, lines, 0, exchange.rank, cleanup)
    own.wait_ready()
    rollouts = make_rollouts(plan, own, datasets, exchange, observer)
    restarts, num_engines = rollouts.restarts, rollouts.num_engines
    if models is not None and started is not None:
        phase = Phases(models)
        prompts = next(iter(datasets.val.values()))
        probe = Probe(config, prompts, datasets.stop_token_ids, restarts, models.actor, num_engines)
        with phase("sync"):
            engines = connect(plan, started, restarts, models, probe, phase)
            engines.first_sync(verify=config.proves_weights, as_loaded=False)
    metrics = evaluate(rollouts, datasets, observer, step)
    observer.log(step, metrics)
    exchange.on_rank_0(lambda: _write(requested, weights, step, metrics))
    observer.finish()


def _write(config: Config, weights: Path, step: int, metrics: dict[str, Any]) -> None:
    folder = Path(config.trainer.output_dir)
    content = {"weights": str(weights.resolve()), "step": step, "metrics": metrics}
    write_durably(folder / EVALUATION_FILE, json.dumps(content, indent=1) + "\n")
    write_durably(folder / CONFIG_FILE, dump_config(config))


def _find_checkpoint(config: Config, exchange: Exchange) -> Path | None:
    """Return the checkpoint to evaluate, after a check of its checksums; None to evaluate model.path.

    Raises:
        CheckpointError: it is damaged.
    """
    if config.trainer.eval_checkpoint is None:
        return CheckpointStore(Path(config.trainer.output_dir) / CHECKPOINTS, 0, exchange).latest()
    path = Path(config.trainer.eval_checkpoint).resolve()
    refuse_damaged(path, exchange)
    return path


def _load_models(plan: RunPlan, checkpoint: Path | None, exchange: Exchange) -> Models:
    """Return the actor with the weights of a checkpoint of any layout, or else of model.path."""
    models = build_models(plan, exchange)
    engine = models.actor.engine
    if engine is not None and checkpoint is not None:
        folder = checkpoint / "actor"
        load_model(engine.chunks, engine.groups, folder, read_component(folder), models.architecture.vocab_size)
    return models

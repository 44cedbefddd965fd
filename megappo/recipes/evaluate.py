"""trainer.eval_only: evaluate a checkpoint, or the model of model.path, once, and train nothing."""

import json
from pathlib import Path

from megappo.observe.files import EVALUATION_FILE
from megappo.observe.loggers import RunEnd
from megappo.runtime.durable_files import write_durably
from megappo.trainer.run import Run
from megappo.trainer.run_builder import RunBuilder


def build(builder: RunBuilder) -> Run:
    """Build the parts of the run on this rank; all ranks together.

    Engines of the run read model.path themselves, so that it needs models only for other weights, or to score.
    """
    config = builder.config
    others = config.trainer.eval_checkpoint or config.model.dist_checkpointing_path or config.rollout.engines
    if others or config.has_reward_model:
        builder.build_models()
    builder.connect()
    return builder.run(builder.rollout_batches())


def loop(run: Run) -> None:
    """Evaluate, and write evaluation.json beside metrics and report."""
    step = run.progress.step
    weights = run.progress.checkpoint or Path(run.config.initial_weights)
    with run.phase("sync"):
        run.engines.first_sync(step)
    metrics = run.evaluate(step)
    run.observer.log(step, metrics)
    content = {"weights": str(weights.resolve()), "step": step, "metrics": metrics}
    file = Path(run.config.trainer.output_dir, EVALUATION_FILE)
    run.exchange.on_rank_0(lambda: write_durably(file, json.dumps(content, indent=1) + "\n"))
    run.observer.end(RunEnd())

"""A run that has been checked: what needs megatron-core, and so is imported after everything that does not."""

from contextlib import ExitStack
from pathlib import Path

from megappo.checkpoint.durable import write_durably
from megappo.config.loading import changes_since, dump_config
from megappo.config.schema import Config
from megappo.observe.files import CONFIG_FILE
from megappo.placement.run_plan import RunPlan
from megappo.runtime import megatron_setup

megatron_setup.install()  # must come before the first import of megatron.core

from megappo.engines.handle import EngineHandle  # noqa: E402
from megappo.trainer.build import build_run  # noqa: E402
from megappo.trainer.eval_only import evaluate_only  # noqa: E402
from megappo.trainer.loop import Trainer  # noqa: E402
from megappo.trainer.rollout_only import rollout_only  # noqa: E402
from megappo.trainer.run import Run  # noqa: E402


def train(plan: RunPlan, own: EngineHandle, cleanup: ExitStack) -> None:
    """Build a run and have it train, or only roll out or evaluate, to its end; all ranks together, after the default
    group exists.

    Args:
        own: of runs that write rollouts; an evaluation starts its own, as the model's folder depends on a checkpoint.
        cleanup: what must be ended when the run ends, however it ends, is registered here.
    """
    if plan.config.trainer.eval_only:
        evaluate_only(plan, cleanup)
        return
    if plan.config.trainer.rollout_only:
        rollout_only(plan, own, cleanup)
        return
    run = build_run(plan, own, cleanup)
    if run.exchange.rank == 0:  # not before: a folder that is refused stays as it was
        _keep_config(plan.requested, run)
    Trainer(plan.requested, run).train()


def _keep_config(config: Config, run: Run) -> None:
    """Write the resolved config beside the results, and say what a resumed run's has that its checkpoint's had not."""
    if run.progress.checkpoint is not None:
        for change in changes_since(run.progress.checkpoint / CONFIG_FILE, config):
            run.observer.message(f"changed since then: {change}")
    write_durably(Path(config.trainer.output_dir, CONFIG_FILE), dump_config(config))

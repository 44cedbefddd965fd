"""A run that has been checked: what needs megatron-core, and so is imported after everything that does not."""

from contextlib import ExitStack
from pathlib import Path

from megappo import megatron_setup
from megappo.checkpoint.durable import write_durably
from megappo.config.errors import ConfigError
from megappo.config.loading import changes_since, dump_config
from megappo.config.schema import Config

megatron_setup.install()  # must come before the first import of megatron.core

from megappo.trainer.build import build_rolling_out, build_run  # noqa: E402
from megappo.trainer.loop import Trainer  # noqa: E402
from megappo.trainer.run import Run  # noqa: E402


def train(config: Config, cleanup: ExitStack) -> None:
    """Build a run and have it train, or only roll out, to its end; all ranks together, after the default group exists.

    Args:
        cleanup: what must be ended when the run ends, however it ends, is registered here.
    """
    if config.trainer.rollout_only:
        build_rolling_out(config, cleanup).run()
        return
    run = build_run(config, cleanup)
    if run.exchange.rank == 0:  # not before: a folder that is refused stays as it was
        _keep_config(config, run)
    Trainer(config, run).train()


def _keep_config(config: Config, run: Run) -> None:
    """Write the resolved config beside the results, and say what a resumed run's has that the one there had not."""
    path = Path(config.trainer.output_dir, "config.yaml")
    if run.progress.start_step and path.exists():
        try:
            for change in changes_since(path, config):
                run.observer.message(f"changed since then: {change}")
        except ConfigError as error:
            run.observer.message(f"WARNING: cannot tell what has changed since then: {'; '.join(error.errors)}")
    write_durably(path, dump_config(config))

"""The loop of a run that trains, around its steps. Every rank runs the same lines; a model that is not on a rank is a
null object there.

Steps are counted from 1; step 0 is the model before training.
"""

from collections.abc import Callable

from megappo.engines.restarts import EngineLost
from megappo.observe.findings import Unhealthy
from megappo.observe.metrics import Reduced
from megappo.observe.profile import profiled
from megappo.runtime.interruption import Interrupted
from megappo.trainer.run import Run


def train(run: Run, make_step: Callable[[Run, int], Reduced]) -> None:
    """Train from the newest checkpoint, or from the beginning, to the last step; then save and export.

    Args:
        make_step: runs one step of the recipe and returns its metrics.
    Raises:
        Interrupted: a signal to any rank, or the time limit, stops the run. Everything is saved.
        EngineLost: an engine failed too often. Everything is saved.
        Unhealthy: a rule of trainer.stop_on began to hold. Everything is saved.
    """
    with run.phase("sync"):
        run.engines.first_sync(run.progress.start_step)
    if run.progress.is_new and run.config.eval_interval:
        run.observer.log(0, run.evaluate(0))
    elif run.gate.is_set:
        run.evaluate(run.progress.start_step)
    run.begin_training()
    try:
        for step in range(run.progress.start_step + 1, run.config.trainer.total_steps + 1):
            run.check_interrupted()
            if run.gate.ends_run:
                break
            with profiled(run.config.trainer, step, run.exchange.rank):
                metrics = make_step(run, step)
            run.log(step, metrics)
            run.save_if_due(step)
    except (Interrupted, EngineLost, Unhealthy):
        run.save_if_needed()
        raise
    run.finish()

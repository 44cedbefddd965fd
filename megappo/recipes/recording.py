"""trainer.rollout_only: record the rollouts of model.path's weights, without models to train."""

from collections.abc import Iterator

from megappo.observe.metrics import reduce_ranks
from megappo.rollouts.record import Record
from megappo.trainer.run import Run
from megappo.trainer.run_builder import RunBuilder
from megappo.trainer.statistics import row_metrics


def build(builder: RunBuilder) -> Run:
    """Build the parts of the run on this rank; all ranks together. Its engines read model.path themselves."""
    assert builder.record is not None, "trainer.rollout_only needs trainer.record_rollouts"
    builder.connect(list(_resume(builder, builder.record)))
    return builder.run(builder.rollout_batches())


def _resume(builder: RunBuilder, record: Record) -> Iterator[str]:
    """Continue after the last step that is recorded as this run would record it; yield lines about it."""
    progress = builder.progress
    progress.start_step, progress.num_drawn, changed = record.valid_steps(builder.datasets.train)
    step = progress.start_step
    if step:
        yield f"continuing after step {step}, the last one in {record.folder} with the same settings"
    if changed:
        yield f"writing step {step + 1} of {record.folder} again: {' and '.join(changed)} changed"


def loop(run: Run) -> None:
    """Record the rollouts of all steps that are not recorded yet.

    Raises:
        Interrupted: a signal on any rank, or the time limit, ends the run.
    """
    run.begin_training()
    for step in range(run.progress.start_step + 1, run.config.trainer.total_steps + 1):
        run.check_interrupted()
        responses = run.batches.sample(step, run.phase)
        batch, metrics = run.batches.score(step, responses, run.phase)
        metrics |= row_metrics(run.exchange, batch.rows, step)
        metrics |= reduce_ranks(run.exchange.all_gather(run.phase.memory()))
        run.log(step, metrics)
    run.finish()

"""trainer.train [critic]: train a critic alone, for the policy of model.path or the policy of recorded rollouts;
trainer.kind critic: on scored trajectories of files.

Parts and steps are PPO's (`megappo/recipes/ppo.py`), without an actor to train. The run ends when the critic passes its
gate. An evaluation compares the critic's values of held-out rollouts with their returns. The policy does not change, so
that these rollouts are sampled once, with training's settings, and kept at their owners.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megappo.batch.exchange import Batch
from megappo.config.config_error import ConfigError
from megappo.data.prompts import PromptDataset
from megappo.observe.metrics import Reduced
from megappo.recipes import ppo
from megappo.rollouts.record import Replay
from megappo.rollouts.row_builder import RowBuilder
from megappo.rollouts.step_responses import StepResponses
from megappo.trainer.experience import with_advantages
from megappo.trainer.run import Run
from megappo.trainer.run_builder import RunBuilder
from megappo.trainer.statistics import over_ranks
from megappo.trainer.value_metrics import NUM_PARTS, GateProgress, calibration, or_lowest, value_metrics

HELD_OUT = "held_out"
"""Name of the data set of trainer.replay_held_out."""


def build(builder: RunBuilder) -> Run:
    """Build the parts of the run on this rank; all ranks together."""
    gate = GateProgress(builder.config.critic.gate)
    return ppo.build(builder, evaluation=CriticEvaluation(gate), gate=gate)


class CriticEvaluation:
    """Compares a critic with the returns of held-out rollouts. All ranks call it together.

    Args:
        gate: notes each evaluation; of several data sets the lowest explained variance.
    """

    def __init__(self, gate: GateProgress):
        self._gate = gate
        self._batches: dict[str, Batch] = {}

    def __call__(self, run: Run, step: int) -> Reduced:
        """Return `val/<dataset>/critic/*`, by `value_metrics` and `calibration`, while the engines sleep."""
        if not self._batches:
            self._batches = dict(_held_out_rollouts(run))
        if not self._batches:  # eval.datasets alone, whose rewards may be others
            return {}
        run.engines.sleep()
        metrics = {}
        explained = []
        for name, batch in self._batches.items():
            rows = _with_values(run, name, batch)
            measured = over_ranks(run.exchange, value_metrics(rows) | calibration(run.exchange, rows))
            metrics |= {f"val/{name}/critic/{metric}": value for metric, value in measured.items()}
            at_end = measured[f"vf_part/{NUM_PARTS - 1}/vf_explained_var"]
            explained.append((measured["vf_explained_var"], at_end))
        self._gate.note(step, *min(explained, key=or_lowest))
        with run.phase("sync"):
            run.engines.wake()
        return metrics


def _held_out_rollouts(run: Run) -> Iterator[tuple[str, Batch]]:
    """Yield the name of each held-out data set and its scored rollouts."""
    config = run.config
    vocab_size = run.datasets.vocab_size
    if not config.recipe.has_rollouts:
        for name in run.datasets.val:
            yield name, run.batches.held_out(name, run.datasets)
        return
    if config.trainer.replay_held_out is not None:
        folder = Path(config.trainer.replay_held_out)
        replay = Replay(folder, config, vocab_size, run.exchange, "trainer.replay_held_out")
        batch, _ = replay.score(1, None, run.phase)
        yield HELD_OUT, _with_model_scores(run, batch, None)
        return
    all_responses = {}
    for name in config.data.val_names:
        prompts = run.datasets.held_out(name, run.exchange)
        sampled = run.rollouts.sample(prompts, config.rollout.n, run.rollouts.training, task=name)
        all_responses[name] = StepResponses(prompts, sampled.samples, [sampled], sampled.usage)
    run.engines.sleep()
    for name, responses in all_responses.items():
        parts = config, vocab_size, run.rollouts.tokenizer, run.exchange
        batch, _ = RowBuilder(*parts, has_images=run.rollouts.images is not None).build(responses)
        yield name, _with_model_scores(run, batch, responses, run.datasets.val[name])


def _with_model_scores(
    run: Run,
    batch: Batch,
    responses: StepResponses | None,
    dataset: PromptDataset | None = None,
) -> Batch:
    """Return the batch with the scores of the reward model added, if the run has one; the engines sleep."""
    conversations = run.scorer.scatter(batch, responses, dataset)
    outputs = run.scorer.forward(conversations, run.phase)
    return run.scorer.add_scores(batch, conversations, outputs)


def _with_values(run: Run, dataset: str, batch: Batch) -> Any:
    """Return this rank's rows with the values of the critic and the returns by the run's algorithm.

    Raises:
        ConfigError: a data-parallel shard would get no row.
    """
    models = run.models
    for name, forward in models.forwards.items():
        component = models.components[name]
        if component.spec.own_rows:
            continue
        if len(batch.table) < component.layout.data:
            raise ConfigError(
                f"data.val_files: {dataset} has {len(batch.table)} rollouts for the {component.layout.data} "
                f"data-parallel shards of the {name}: add records to it, or raise rollout.n"
            )
        with run.phase(forward.phase):
            shard = component.scatter(batch)
            batch = shard.gather(shard.forward(), forward.fields, batch)
    rows, _ = with_advantages(
        run.config, run.exchange, run.progress.kl.value, batch.rows, copy.deepcopy(run.progress.reward_moments)
    )
    return rows

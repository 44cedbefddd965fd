"""Evaluation of a critic that is trained alone: its values of held-out rollouts beside their returns, and the gate that
ends the run.

The policy does not change, so its rollouts are sampled once, as those of training are, and kept at their owners.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from megappo.batch.exchange import Batch, Exchange
from megappo.config.config_error import ConfigError
from megappo.config.schema import Config, Gate
from megappo.data.prompts import PromptDataset
from megappo.rollouts.datasets import Datasets
from megappo.rollouts.group_selection import StepResponses
from megappo.rollouts.record import Replay
from megappo.rollouts.rollouts import Rollouts
from megappo.rollouts.row_builder import RowBuilder
from megappo.trainer.experience import with_advantages
from megappo.trainer.inference import InferenceEngines, NoEngines
from megappo.trainer.models import Models, Phases
from megappo.trainer.progress import Progress
from megappo.trainer.response_scorer import NoResponseScorer, ResponseScorer
from megappo.trainer.statistics import over_ranks
from megappo.trainer.value_metrics import NUM_PARTS, value_metrics

HELD_OUT = "held_out"
"""Name of the data set of trainer.replay_held_out."""


class RunParts(Protocol):
    """Parts of a run that the evaluation of its critic needs; `Run` has them."""

    config: Config
    exchange: Exchange
    datasets: Datasets
    models: Models
    engines: InferenceEngines | NoEngines
    rollouts: Rollouts
    progress: Progress
    phase: Phases
    scorer: ResponseScorer | NoResponseScorer


class GateProgress:
    """Explained variance of a run's evaluations, and whether it is what critic.gate requires.

    Args:
        gate: None in a run without a gate, which it never ends.
    """

    def __init__(self, gate: Gate | None = None):
        self._gate = gate
        self._found: list[tuple[int, float, float]] = []  # step; explained variance, of all tokens and of the last ones

    @property
    def is_set(self) -> bool:
        """True if the run has a gate."""
        return self._gate is not None

    @property
    def ends_run(self) -> bool:
        """True if the last evaluation reached the gate, or critic.gate.patience is used up."""
        return self._is_reached or self._is_exhausted

    def note(self, step: int, explained: float, explained_at_end: float) -> None:
        """Add an evaluation: the explained variance over all tokens, and in the last part of the responses."""
        self._found.append((step, explained, explained_at_end))

    @property
    def _is_reached(self) -> bool:
        return self._gate is not None and bool(self._found) and self._found[-1][1] >= self._gate.explained_variance

    @property
    def _is_exhausted(self) -> bool:
        if self._gate is None or self._gate.patience is None or not self._found:
            return False
        return len(self._found) - 1 - self._found.index(self._best) >= self._gate.patience

    @property
    def _best(self) -> tuple[int, float, float]:
        return max(self._found, key=lambda found: _or_lowest(found[1:]))

    def describe(self) -> str:
        """Return a line: the gate was reached, or why it was not and what to change."""
        required = "critic.gate" if self._gate is None else f"critic.gate {self._gate.explained_variance:g}"
        if not self._found:
            return f"{required} was not checked: the run had no evaluation"
        if self._is_reached:
            step, explained, _ = self._found[-1]
            return f"{required} is reached: at step {step} the critic explains {explained:.3f} of the held-out variance"
        step, explained, at_end = self._best
        found = f"{required} is not reached: the critic explains at most {explained:.3f} of the held-out variance"
        if math.isnan(explained):
            return f"{found}: the returns of the held-out rollouts do not vary, or there are too few of them"
        if self._best is self._found[-1]:
            return f"{found}, at step {step}, and was still rising: raise trainer.total_steps"
        since = f"{found}, at step {step}, and {len(self._found) - 1 - self._found.index(self._best)} evaluations since"
        if self._gate is not None and at_end >= self._gate.explained_variance:
            return (
                f"{since} were no better. In the last part of the responses it explains {at_end:.3f}, so that the "
                "outcome is open before: lower the gate, or raise rollout.n"
            )
        return (
            f"{since} were no better: lower critic.optim.lr if critic/vf_explained_var of the training rollouts is "
            "higher, else raise it, or name a larger critic.model_path"
        )


def _or_lowest(explained: Sequence[float]) -> float:
    """Return the first number, or, if there is none, one that is below all."""
    return -math.inf if math.isnan(explained[0]) else explained[0]


class CriticEvaluation:
    """Compares a critic with the returns of held-out rollouts. All ranks call it together.

    Args:
        gate: notes each evaluation; of several data sets the lowest explained variance.
    """

    def __init__(self, gate: GateProgress):
        self._gate = gate
        self._batches: dict[str, Batch] = {}

    def __call__(self, run: RunParts, step: int) -> dict[str, Any]:
        """Return `val/<dataset>/critic/*`, the metrics of `value_metrics`, while the engines sleep."""
        if not self._batches:
            self._batches = dict(_held_out_rollouts(run))
        if not self._batches:  # eval.datasets alone, whose rewards may be others
            return {}
        run.engines.sleep()
        metrics, explained = {}, []
        for name, batch in self._batches.items():
            measured = over_ranks(run.exchange, value_metrics(_with_values(run, name, batch)))
            metrics |= {f"val/{name}/critic/{metric}": value for metric, value in measured.items()}
            at_end = measured[f"vf_part/{NUM_PARTS - 1}/vf_explained_var"]
            explained.append((measured["vf_explained_var"], at_end))
        self._gate.note(step, *min(explained, key=_or_lowest))
        with run.phase("sync"):
            run.engines.wake()
        return metrics


def _held_out_rollouts(run: RunParts) -> Iterator[tuple[str, Batch]]:
    """Yield the name of each held-out data set and its scored rollouts."""
    config, vocab_size = run.config, run.datasets.vocab_size
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
        all_responses[name] = StepResponses(prompts, sampled.samples, [sampled], [sampled.usage])
    run.engines.sleep()
    for name, responses in all_responses.items():
        batch, _ = RowBuilder(config, vocab_size, run.rollouts.tokenizer, run.exchange).build(responses)
        yield name, _with_model_scores(run, batch, responses, run.datasets.val[name])


def _with_model_scores(
    run: RunParts, batch: Batch, responses: StepResponses | None, dataset: PromptDataset | None = None
) -> Batch:
    """Return the batch with the scores of the reward model added, if the run has one; the engines sleep."""
    conversations = run.scorer.scatter(batch, responses, dataset)
    outputs = run.scorer.forward(conversations, run.phase)
    return run.scorer.add_scores(batch, conversations, outputs)


def _with_values(run: RunParts, dataset: str, batch: Batch) -> Any:
    """Return this rank's rows with the values of the critic and the returns by the run's algorithm.

    Raises:
        ConfigError: a data-parallel shard would get no row.
    """
    models = run.models
    for name, forward in models.forwards.items():
        component = models.components[name]
        if models.specs[name].own_rows:
            continue
        if len(batch.table) < component.layout.data:
            raise ConfigError(
                f"data.val_files: {dataset} has {len(batch.table)} rollouts for the {component.layout.data} "
                f"data-parallel shards of the {name}: add prompts, or raise rollout.n"
            )
        with run.phase(forward.phase):
            shard = component.scatter(batch)
            batch = shard.gather(shard.forward(), forward.fields, batch)
    rows, _ = with_advantages(
        run.config, run.exchange, run.progress.kl.value, batch.rows, copy.deepcopy(run.progress.reward_moments)
    )
    return rows

"""Build the parts of a run whose config has been checked. Recipes choose which parts their run has."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megappo.batch.exchange import Exchange
from megappo.checkpoint.checksums import file_sum
from megappo.config.loading import changes_since, dump_config
from megappo.engines.handle import EngineHandle
from megappo.observe.files import CONFIG_FILE
from megappo.observe.loggers import Outlook, RunInfo
from megappo.observe.observer import open_observer
from megappo.observe.run_file import changed_data, git_commit, logged_step_of, run_id_of
from megappo.observe.samples import drop_samples
from megappo.observe.timeline import drop_phases
from megappo.placement.model_lines import replaced_heads
from megappo.placement.run_plan import RunPlan
from megappo.rollouts.datasets import load_datasets
from megappo.rollouts.record import Record, Replay
from megappo.rollouts.rollouts import make_rollouts
from megappo.rollouts.served_teachers import check_servers
from megappo.runtime import platform
from megappo.runtime.durable_files import write_durably
from megappo.runtime.status import STATUS
from megappo.trainer.batches import make_batches
from megappo.trainer.example_batches import ExampleBatches
from megappo.trainer.inference import InferenceEngines, NoEngines
from megappo.trainer.models import Models, Phases, build_models
from megappo.trainer.progress import Progress
from megappo.trainer.response_scorer import NoResponseScorer, ResponseScorer
from megappo.trainer.run import Run
from megappo.trainer.statistics import Utilisation


class RunBuilder:
    """Builds the parts of a run on this rank, after the default process group exists. All ranks call it together.

    A recipe calls `build_models` first, if its run has models, then `connect`, and last `run`.

    Args:
        engine_handle: this rank's engine, started. A run that replays rollouts has none.
        outlook: read on rank 0 alone.
        cleanup: closes what must be closed however the run ends.
    Attributes:
        record: writes the rollouts of each step, if trainer.record_rollouts names a folder.
        left_out: lines about the data that are left out or cut.
    """

    def __init__(self, plan: RunPlan, engine_handle: EngineHandle, outlook: Outlook, cleanup: ExitStack):
        self.plan = plan
        self.config = plan.config
        self.exchange = Exchange(dist.group.WORLD)
        with STATUS.step("checkpoint check"):
            self.progress = Progress(plan.requested, self.exchange)
        with STATUS.step("prompts"):
            self.datasets = load_datasets(self.config, engine_handle.workers, self.exchange)
            self.left_out = self.datasets.check(self.exchange)
        with STATUS.step("teachers"):
            self.exchange.on_rank_0(partial(check_servers, self.config, self.datasets))
        folder = self.config.trainer.record_rollouts
        self.record = None if folder is None else Record(Path(folder), self.config, self.exchange)
        self.engines: InferenceEngines | NoEngines = NoEngines()
        self.models = Models(replace(plan, components={}), {})
        self._engine_handle = engine_handle
        self._outlook = outlook
        self._cleanup = cleanup

    def build_models(self) -> None:
        """Start the engines that take the actor's weights, if the run samples, and build the models with their initial
        weights, or the checkpoint's.

        The engines come first, because an engine sizes its KV cache by the free memory.
        """
        if self.config.samples:
            self.engines = InferenceEngines(self.plan, self._engine_handle, self.exchange, is_new=self.progress.is_new)
            self.engines.start()
        with STATUS.step("models"):
            self.models = build_models(self.plan, self.exchange, self.datasets.images)
        with STATUS.step("checkpoint"):
            self.progress.restore(self.models)

    def connect(self, progress_lines: Sequence[str] = ()) -> None:
        """Open the run's logs, wait for its engines, and connect them with prompts and models.

        Args:
            progress_lines: lines about what it resumes from; none = about its checkpoint.
        """
        decisions = self.plan.decisions() if self.models.training else ()
        heads = replaced_heads(self.plan.components) if self.progress.is_new else ()
        lines = [*(progress_lines or [self.progress.describe()]), *heads, *self.config.absences, *self.left_out]
        lines += decisions
        with STATUS.step("checksums of the training files"):
            is_first = self.exchange.rank == 0
            facts = run_info(self.plan, self.progress.resume_step, self._outlook) if is_first else None
        lines += [changed_data(facts)] if facts else []
        self.observer = open_observer(facts, self.config.trainer.loggers, self._outlook, lines, self._cleanup)
        self.phase = Phases(self.models)
        with STATUS.step("engine start"):
            self._engine_handle.wait_ready()
        self.rollouts = make_rollouts(self.plan, self._engine_handle, self.datasets, self.exchange, self.observer)
        self.engines.connect(self.models, self.rollouts, self.datasets, self.phase)

    def rollout_batches(self) -> Any:
        """Return the source of each step's scored rows: files, a record, or engines."""
        config = self.config
        if not config.recipe.has_rollouts:
            return ExampleBatches(self.datasets.train, self.exchange, self.progress.num_drawn)
        if config.replays:
            folder = Path(config.trainer.replay_rollouts)
            return Replay(folder, config, self.datasets.vocab_size, self.exchange)
        parts = self.datasets, self.rollouts, self.engines, self.record, self.progress
        return make_batches(*parts, self._cleanup)

    def run(self, batches: Any, **own: Any) -> Run:
        """Return the run, after its output folder has been prepared.

        Args:
            batches: yields each step's rows.
            own: further parts of the recipe's run.
        """
        utilisation = Utilisation(self.models, self.exchange)
        scorer: ResponseScorer | NoResponseScorer = NoResponseScorer()
        judge = self.models.components.get("reward_model")
        if judge is not None and self.config.recipe.has_rollouts:
            tokenizer = self.rollouts.tokenizer
            scorer = ResponseScorer(self.config, judge, self.datasets.train, tokenizer, self.exchange)
        if self.exchange.rank == 0:  # not before: a folder that is refused stays as it was
            self._begin_folder()
        parts = self.config, self.exchange, self.datasets, self.models, self.engines, self.rollouts, batches
        return Run(*parts, self.progress, self.observer, self.phase, utilisation, scorer, **own)

    def _begin_folder(self) -> None:
        """Write the resolved config beside the results, report what has changed since the checkpoint's, and remove what
        an earlier run left of the steps to come."""
        progress = self.progress
        config = self.plan.requested
        output_dir = Path(config.trainer.output_dir)
        if progress.checkpoint is not None and config.recipe.has_steps:
            for change in changes_since(progress.checkpoint / CONFIG_FILE, config):
                self.observer.message(f"changed since then: {change}")
        write_durably(output_dir / CONFIG_FILE, dump_config(config))
        drop_phases(output_dir, progress.resume_step)
        drop_samples(output_dir, progress.sampled_step + 1, "parquet")


def run_info(plan: RunPlan, resume_step: int, outlook: Outlook) -> RunInfo:
    """Return the facts about a run that its loggers record."""
    trainer = plan.config.trainer
    output_dir = Path(trainer.output_dir)
    reads_data = plan.training and not plan.config.replays
    return RunInfo(
        output_dir=output_dir,
        total_steps=trainer.total_steps,
        resume_step=resume_step,
        logged_step=logged_step_of(output_dir, resume_step),
        run_id=run_id_of(output_dir, resume_step),
        config=plan.requested.model_dump(mode="json"),
        commit=git_commit(Path(__file__).parent),
        hardware={"ranks": f"{plan.world_size}, {plan.ranks_per_node} on each node", **platform.capabilities()},
        data=" ".join(file_sum(Path(path)) for path in plan.config.data.files) if reads_data else "",
        **outlook.facts,
    )

"""Progress of a run: the checkpoint that it resumes from, and what it saves besides its models."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megappo.batch.exchange import Batch, Exchange
from megappo.batch.rows_file import RowsFile, write_rows
from megappo.checkpoint.checksums import refuse_damaged
from megappo.checkpoint.component_folder import load_model
from megappo.checkpoint.folders import LATEST, NOT_BEGUN, STATE, CheckpointError, position_of, read_state, step_of
from megappo.checkpoint.metadata import read_component
from megappo.checkpoint.store import CheckpointStore
from megappo.config.loading import dump_config
from megappo.config.schema import Config
from megappo.observe.files import CHECKPOINTS, CONFIG_FILE
from megappo.observe.loggers import Histogram
from megappo.observe.metrics import RankMetrics, Reduced, metrics_from_json
from megappo.observe.metrics_file import METRICS_FILE
from megappo.placement.model_lines import models_in_words
from megappo.ppo.kl import KLController
from megappo.ppo.reward_shaping import RunningMoments
from megappo.trainer.models import Models

EXPERIENCE_FILE = "in_flight.safetensors"
STATE_KEYS = ("prompts_drawn", "prompts_pending", "kl", "reward_moments", "models", "optimizer_steps")
"""Content of a checkpoint's state.json besides the step; `optimizer_steps` are, for each component, its optimizer steps
so far, and how many of the last ones were skipped in a row."""


@dataclass
class Experience:
    """A step whose rows have their advantages, until its end. The same on every rank, except for the rows.

    Attributes:
        batch: rows at their owners, with all fields that losses read.
        metrics: the step's metrics until its advantages.
        kl_penalty: mean of the KL to the reference over the tokens; None without a penalty in the rewards or a token.
        num_updates: component -> mini-batches of all epochs that it has been trained on.
        optimizer_steps: component -> metrics of its optimizer steps.
    """

    step: int
    batch: Batch
    metrics: Reduced
    kl_penalty: float | None = None
    num_updates: dict[str, int] = field(default_factory=dict)
    optimizer_steps: dict[str, list[RankMetrics]] = field(default_factory=dict)

    def add(self, name: str, num_updates: int, steps: list[RankMetrics]) -> None:
        """Add the optimizer steps of a component."""
        self.num_updates[name] = num_updates
        self.optimizer_steps.setdefault(name, []).extend(steps)


class Progress:
    """Finds the newest checkpoint when it is created. All ranks create it, and call its methods except `describe`,
    together.

    Attributes:
        checkpoint: the one to resume from, or to evaluate; None in a folder without any.
        start_step: steps done before this process started, once it is restored.
        step: the last finished step.
        experience: the next step, if its rows have their advantages.
        num_drawn: prompts that the steps so far have drawn, including the next step's if `experience` has it.
        pending: positions of drawn prompts that no step has trained on yet.
        is_overdue: the last save failed.
        failed_saves: number of failed saves in this process.
        kl: controller of the KL coefficient.
        reward_moments: moments of all scores so far, for reward.normalize running.
    """

    def __init__(self, config: Config, exchange: Exchange):
        self.config = config
        self._models = models_in_words(config)
        self.output_dir = Path(config.trainer.output_dir)
        trainer = config.trainer
        self.store = CheckpointStore(
            self.output_dir / CHECKPOINTS, trainer.keep_checkpoints, exchange, keep_every=trainer.keep_every
        )
        self.exchange = exchange
        self.checkpoint = self._find_checkpoint()
        self.start_step = self.step = 0
        self.experience = None
        self.num_drawn = 0
        self.pending: Sequence[int] = ()
        self.is_overdue = False
        self.failed_saves = 0
        self.kl = KLController(config.algorithm.kl_ctrl)
        self.reward_moments = RunningMoments()

    def _find_checkpoint(self) -> Path | None:
        """Return the checkpoint to resume from, or to evaluate, after a check of its checksums."""
        if self.config.recipe.has_steps:
            return self.store.latest()
        if self.config.trainer.eval_checkpoint is None:
            return None
        checkpoint = Path(self.config.trainer.eval_checkpoint).resolve()
        refuse_damaged(checkpoint, self.exchange)
        return checkpoint

    def restore(self, models: Models) -> None:
        """Restore the checkpoint, if there is one; to evaluate it, only the actor's weights."""
        if self.checkpoint is None:
            return
        if not self.config.recipe.has_steps:
            engine = models.actor.engine
            folder = self.checkpoint / "actor"
            if engine is not None:
                vocab_size = models.architecture.vocab_size
                load_model(engine.chunks, engine.groups, folder, read_component(folder), vocab_size)
            self.step = step_of(self.checkpoint)
            return
        state = read_state(self.checkpoint)
        if missing := [key for key in STATE_KEYS if key not in state]:
            raise CheckpointError(
                f"{self.checkpoint / STATE} is of another version of megappo, without {', '.join(missing)}: write the "
                f"name of another checkpoint into {self.checkpoint.parent / LATEST}, or choose another "
                "trainer.output_dir"
            )
        self._restore_models(models, state["optimizer_steps"])
        self.kl.load_state_dict(state["kl"])
        self.reward_moments.load_state_dict(state["reward_moments"])
        self.start_step = self.step = state["step"]
        self.num_drawn = state["prompts_drawn"]
        self.pending = state["prompts_pending"]
        self.experience = self._read_experience(models.num_mini_batches())

    def _restore_models(self, models: Models, optimizer_steps: dict[str, list[int]]) -> None:
        """Load the models one by one, and check that each of their optimizers continues where it was."""
        error = None
        for name, engine in models.trained.items():
            with models.loading(name):
                self.store.load(self.checkpoint, {name: engine})
            if engine is None:
                continue
            num_steps, engine.skipped_in_a_row = optimizer_steps[name]
            if engine.num_steps != {num_steps}:
                error = CheckpointError(
                    f"{self.checkpoint} was saved after {num_steps} optimizer steps of the {name}, but loads as "
                    f"{sorted(engine.num_steps)}: its files do not belong together; use another checkpoint"
                )
        self.exchange.raise_together(error)

    def finish(self, experience: Experience) -> None:
        """Note that a step is finished, and adapt the KL coefficient if the actor was trained in it."""
        if experience.kl_penalty is not None and "actor" in experience.num_updates:
            num_responses = self.config.data.train_batch_size * self.config.rollout.n  # a row may be a part of one
            self.kl.update(experience.kl_penalty, num_responses)
        self.step = experience.step
        self.experience = None

    def begin(self, experience: Experience, batches: Any) -> None:
        """Note that a step's rows have their advantages: an interrupted run resumes from here."""
        self.experience = experience
        self.note_drawn(batches)

    def note_drawn(self, batches: Any) -> None:
        """Note which prompts have been drawn for the steps until now."""
        self.num_drawn = batches.num_drawn
        self.pending = batches.pending

    @property
    def is_new(self) -> bool:
        """True if the run starts without a checkpoint: not even one in the middle of step 1."""
        return self.checkpoint is None

    @property
    def resume_step(self) -> int:
        """The step that a resumed run begins with; 0 in a new run."""
        return self.start_step + 1 if self.sampled_step else 0

    @property
    def sampled_step(self) -> int:
        """The last step whose rollouts were sampled before this process started."""
        return self.start_step + (self.experience is not None)

    @property
    def is_saved(self) -> bool:
        """True if the newest checkpoint is up to date, or there is nothing to save."""
        saved = (0, NOT_BEGUN) if self.checkpoint is None else position_of(self.checkpoint)
        return saved == self._position

    @property
    def _position(self) -> tuple[int, int]:
        """The place of a checkpoint of now; see `checkpoint.folders.position_of`."""
        return self.step, NOT_BEGUN if self.experience is None else sum(self.experience.num_updates.values())

    def begin_save(self, models: Models, *, in_background: bool) -> None:
        """Begin to write a checkpoint; `store.finish` completes it.

        Args:
            in_background: see `CheckpointStore.begin`.
        Raises:
            CheckpointError, OtherRankError: it cannot be written.
        """
        step, num_updates = self._position
        self.is_overdue = False
        trained = [(name, engine) for name, engine in models.trained.items() if engine is not None]
        local = {name: [engine.scheduler.num_steps, engine.skipped_in_a_row] for name, engine in trained}
        state = {
            "prompts_drawn": self.num_drawn,
            "prompts_pending": list(self.pending),
            "kl": self.kl.state_dict(),
            "reward_moments": self.reward_moments.state_dict(),
            "models": self._models,
            "optimizer_steps": self.exchange.merge(local),
            "value_supports": {name: asdict(spec.support) for name, spec in models.specs.items() if spec.support},
        }
        self.store.begin(
            step,
            models.trained,
            state,
            num_updates=num_updates,
            write_more=partial(self._write_more, models.num_mini_batches()),
            in_background=in_background,
        )

    def _write_more(self, num_mini_batches: dict[str, int], folder: Path) -> None:
        """Write the config and the experience into a checkpoint; all ranks together."""
        self.exchange.on_rank_0(lambda: (folder / CONFIG_FILE).write_text(dump_config(self.config), "utf-8"))
        experience = self.experience
        if experience is None:
            return
        rows = experience.batch.at_rank_0(self.exchange)
        facts = {
            "step": experience.step,
            "metrics": {name: _to_json(value) for name, value in experience.metrics.items()},
            "kl_penalty": experience.kl_penalty,
            "num_mini_batches": num_mini_batches,
            "num_updates": experience.num_updates,
            "optimizer_steps": experience.optimizer_steps,
        }
        self.exchange.on_rank_0(lambda: write_rows(folder / EXPERIENCE_FILE, rows, facts))

    def _read_experience(self, num_mini_batches: dict[str, int]) -> Experience | None:
        """Return the step that the checkpoint was saved in the middle of, if any. Every rank reads its own rows.

        Raises:
            ActionableError: the file is damaged.
            CheckpointError: the updates cannot continue with the mini-batches that they began with.
        """
        path = self.checkpoint / EXPERIENCE_FILE
        if not path.exists():
            return None
        with RowsFile(path) as file:
            facts = file.facts
            batch = file.batch(self.exchange)
        for name, saved in facts["num_mini_batches"].items():
            if num_mini_batches[name] != saved:
                raise CheckpointError(
                    f"{self.checkpoint} is in the middle of step {facts['step']}, with {saved} mini-batches an epoch "
                    f"for the {name}, but this run has {num_mini_batches[name]}: set ppo_mini_batch_size as it was "
                    "until that step is finished"
                )
        metrics = {name: _from_json(value) for name, value in facts["metrics"].items()}
        steps = {name: list(map(metrics_from_json, of_one)) for name, of_one in facts["optimizer_steps"].items()}
        return Experience(
            facts["step"],
            batch,
            metrics,
            facts["kl_penalty"],
            num_updates=facts["num_updates"],
            optimizer_steps=steps,
        )

    def describe(self) -> str:
        """Describe what an earlier run left in the folder; "" in a new folder."""
        if not self.config.recipe.has_steps:
            return f"evaluating {self.checkpoint or self.config.model.path}"
        if self.checkpoint is not None:
            begun = "" if self.experience is None else f", in the middle of step {self.experience.step},"
            left_out = ""
            if self.pending and not self.config.rollout.runs_ahead:
                left_out = f"; rollout.max_staleness 0 leaves out {len(self.pending)} prompts that were drawn ahead"
            return f"resuming after step {self.start_step}{begun} from {self.checkpoint}{left_out}"
        if (self.output_dir / METRICS_FILE).exists():
            return (
                f"starting from the beginning: the earlier run left no checkpoint in {self.output_dir}; its metrics "
                "are kept in files with their date"
            )
        return ""


def _to_json(value: Any) -> Any:
    return list(value.numbers) if isinstance(value, Histogram) else value


def _from_json(value: Any) -> Any:
    return Histogram(tuple(value)) if isinstance(value, list) else value

"""Progress of a run: the checkpoint that it resumes from, and what it saves besides its models."""

from pathlib import Path

from pydantic import BaseModel, ValidationError

from megappo.batch.exchange import Exchange
from megappo.checkpoint.folders import LATEST, STATE, CheckpointError, position_of, read_state, step_of
from megappo.checkpoint.store import CheckpointStore
from megappo.config.loading import dump_config
from megappo.config.schema import Config
from megappo.observe.files import CHECKPOINTS, CONFIG_FILE
from megappo.observe.metrics import METRICS_FILE
from megappo.placement.components import trained_in_words
from megappo.ppo.kl import kl_controller
from megappo.ppo.reward_shaping import RunningMoments
from megappo.trainer.in_flight import InFlight, read_in_flight, write_in_flight
from megappo.trainer.models import Models


class TrainerState(BaseModel, strict=True):
    """Content of a checkpoint's state.json. The attributes as for `Progress` and `Models`."""

    step: int
    prompts_drawn: int
    kl: dict[str, int | float]
    reward_moments: dict[str, int | float]
    models: str
    optimizer_steps: dict[str, list[int]]
    skipped_in_a_row: dict[str, int]


class Progress:
    """Finds the newest checkpoint at once. All ranks create it, and call its methods except `describe`, together.

    Attributes:
        checkpoint: the one to resume from; None in a folder without any.
        start_step: steps done before this process started, once it is restored.
        step: the last finished step.
        in_flight: the next step, if its rows have their advantages.
        num_drawn: prompts that the steps so far have drawn, including the one in flight.
        is_overdue: the last save failed. failed_saves: number of failed saves in this process.
        kl: controller of the KL coefficient.
        reward_moments: of all scores so far, for reward.normalize running.
    """

    def __init__(self, config: Config, exchange: Exchange):
        self.config = config
        self.output_dir = Path(config.trainer.output_dir)
        trainer = config.trainer
        self.store = CheckpointStore(
            self.output_dir / CHECKPOINTS, trainer.keep_checkpoints, exchange, keep_every=trainer.keep_every
        )
        self.checkpoint = self.store.latest()
        self.exchange = exchange
        self.start_step = self.step = 0
        self.in_flight: InFlight | None = None
        self.num_drawn = 0
        self.is_overdue, self.failed_saves = False, 0
        self.kl = kl_controller(config.algorithm.kl_ctrl)
        self.reward_moments = RunningMoments()

    def restore(self, models: Models) -> None:
        """Restore the checkpoint, if there is one."""
        if self.checkpoint is None:
            return
        state = read_trainer_state(self.checkpoint)
        for name, engine in models.trained.items():
            with models.loading(name):
                self.store.load(self.checkpoint, {name: engine})
        self._check_optimizer_steps(state.optimizer_steps, models)
        self.kl.load_state_dict(state.kl)
        self.reward_moments.load_state_dict(state.reward_moments)
        for name, engine in models.trained.items():
            if engine is not None:
                engine.skipped_in_a_row = state.skipped_in_a_row[name]
        self.start_step = self.step = state.step
        self.num_drawn = state.prompts_drawn
        self.in_flight = read_in_flight(self.checkpoint, self.exchange)
        if self.in_flight is not None:
            self._check_mini_batches(self.in_flight, models)

    def begin(self, flight: InFlight, num_drawn: int) -> None:
        """Note that a step's rows have their advantages. `num_drawn`: prompts that all steps so far have drawn."""
        self.in_flight, self.num_drawn = flight, num_drawn

    def finish(self, flight: InFlight) -> None:
        """Note that a step is finished, and adapt the KL coefficient if the actor was trained in it."""
        if flight.kl_penalty is not None and "actor" in flight.num_updates:
            num_responses = self.config.data.train_batch_size * self.config.rollout.n  # a row may be a part of one
            self.kl.update(flight.kl_penalty, num_responses)
        self.step, self.in_flight = flight.step, None

    @property
    def is_saved(self) -> bool:
        """True if the newest checkpoint is up to date."""
        return self.checkpoint is not None and position_of(self.checkpoint) == self._position

    def begin_save(self, models: Models, *, in_background: bool) -> None:
        """Begin to write a checkpoint; `finish_save` completes it.

        Args:
            in_background: see `CheckpointStore.begin`.
        Raises:
            CheckpointError, OtherRankError: it cannot be written.
        """
        step, num_updates = self._position
        self.is_overdue = False
        state = TrainerState(
            step=step,
            prompts_drawn=self.num_drawn,
            kl=self.kl.state_dict(),
            reward_moments=self.reward_moments.state_dict(),
            models=trained_in_words(self.config),
            optimizer_steps=models.num_steps(self.exchange),
            skipped_in_a_row=models.skipped_in_a_row(self.exchange),
        )
        self.store.begin(
            step,
            models.trained,
            state.model_dump(),
            num_updates=None if self.in_flight is None else num_updates,
            write_more=self._write_more,
            in_background=in_background,
        )

    def finish_save(self) -> Path:
        """Complete the checkpoint that is being written, and return its folder.

        Raises:
            CheckpointError, OtherRankError: it cannot be written.
        """
        self.checkpoint = self.store.finish()
        return self.checkpoint

    def note_failed_save(self) -> None:
        """Note that a save failed, so that the next one is due at once."""
        self.is_overdue = True
        self.failed_saves += 1

    @property
    def _position(self) -> tuple[int, int]:
        """As `checkpoint.folders.position_of`."""
        return self.step, -1 if self.in_flight is None else sum(self.in_flight.num_updates.values())

    def _check_optimizer_steps(self, saved: dict[str, list[int]], models: Models) -> None:
        """Check that learning rates and optimizers continue where they were."""
        found = models.num_steps(self.exchange)
        if found != saved:
            raise CheckpointError(
                f"{self.checkpoint} was saved after {saved} optimizer steps, but loads as {found}: its files do not "
                "belong together; use another checkpoint"
            )

    def _write_more(self, folder: Path) -> None:
        self.exchange.on_rank_0(lambda: (folder / CONFIG_FILE).write_text(dump_config(self.config), "utf-8"))
        if self.in_flight is not None:
            write_in_flight(folder, self.in_flight, self.exchange)

    def _check_mini_batches(self, flight: InFlight, models: Models) -> None:
        """Check that an update that has begun can continue with the mini-batches that it began with."""
        num_prompts = models.config.data.train_batch_size
        for name, found in flight.num_mini_batches.items():
            training = models.training[name]
            if training.section.num_mini_batches(num_prompts) != found:
                raise CheckpointError(
                    f"{self.checkpoint} is in the middle of step {flight.step}, with {found} mini-batches an epoch for "
                    f"the {name}: set {training.key}.ppo_mini_batch_size {num_prompts // found} until that step is "
                    "finished"
                )

    def describe(self) -> str:
        """Describe what an earlier run left in the folder; "" in a new folder."""
        if self.checkpoint is not None:
            begun = "" if self.in_flight is None else f", in the middle of step {self.in_flight.step},"
            return f"going on after step {self.start_step}{begun} from {self.checkpoint}"
        if (self.output_dir / METRICS_FILE).exists():
            return (
                f"starting from the beginning: the earlier run left no checkpoint in {self.output_dir}; its metrics "
                "are kept in files with their date"
            )
        return ""


def read_trainer_state(checkpoint: Path) -> TrainerState:
    """Return the trainer's state in a checkpoint.

    Raises:
        CheckpointError: something is missing, or the step is not the one in the folder's name.
    """
    try:
        state = TrainerState.model_validate(read_state(checkpoint))
        wrong = [] if state.step == step_of(checkpoint) else [f"step {state.step}"]
    except ValidationError as error:
        wrong = [str(one["loc"][0]) for one in error.errors()]
    if wrong:
        raise CheckpointError(
            f"{checkpoint / STATE} is not what a run saved there (see {', '.join(dict.fromkeys(wrong))}): write the "
            f"name of another checkpoint into {checkpoint.parent / LATEST}, or choose another trainer.output_dir"
        )
    return state

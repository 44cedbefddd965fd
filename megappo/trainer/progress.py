"""Progress of a run: the checkpoint that it resumes from, and what it saves besides its models."""

from pathlib import Path
from typing import Any

from megappo.batch.exchange import Exchange
from megappo.checkpoint.folders import LATEST, STATE, CheckpointError, position_of, read_state, step_of
from megappo.checkpoint.store import CheckpointStore
from megappo.config.loading import dump_config
from megappo.config.schema import Config
from megappo.observe.files import CHECKPOINTS, CONFIG_FILE
from megappo.observe.metrics import METRICS_FILE
from megappo.placement.components import trained_in_words
from megappo.ppo.kl import AdaptiveKLController, FixedKLController, kl_controller
from megappo.ppo.reward_shaping import RunningMoments
from megappo.preflight.resuming import wrong_models
from megappo.trainer.in_flight import InFlight, read_in_flight, write_in_flight
from megappo.trainer.models import Models

Stateful = FixedKLController | AdaptiveKLController | RunningMoments
"""Objects that a checkpoint holds as plain numbers."""


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

    @property
    def _parts(self) -> dict[str, Stateful]:
        return {"kl": self.kl, "reward_moments": self.reward_moments}

    def restore(self, models: Models) -> None:
        """Restore the checkpoint, if there is one."""
        if self.checkpoint is None:
            return
        state = _checked_state(self.checkpoint, self._parts)
        if wrong := wrong_models(self.config, self.checkpoint, state):
            raise CheckpointError(wrong)
        for name, engine in models.trained.items():
            with models.loading(name):
                self.store.load(self.checkpoint, {name: engine})
        self._check_optimizer_steps(state["optimizer_steps"], models)
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        for name, engine in models.trained.items():
            if engine is not None:
                engine.skipped_in_a_row = state["skipped_in_a_row"][name]
        self.start_step = self.step = state["step"]
        self.num_drawn = state["prompts_drawn"]
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
        self.store.begin(
            step,
            models.trained,
            {
                "step": step,
                "prompts_drawn": self.num_drawn,
                **{name: part.state_dict() for name, part in self._parts.items()},
                "models": trained_in_words(self.config),
                "optimizer_steps": models.num_steps(self.exchange),
                "skipped_in_a_row": models.skipped_in_a_row(self.exchange),
            },
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


def _checked_state(checkpoint: Path, parts: dict[str, Stateful]) -> dict[str, Any]:
    """Return state.json, which has everything that `Progress.begin_save` writes.

    Raises:
        CheckpointError: something is missing, or the step is not the one in the folder's name.
    """
    state = read_state(checkpoint)
    wrong = [] if state["step"] == step_of(checkpoint) else [f"step {state['step']}"]
    kinds = {"models": str, "optimizer_steps": dict, "prompts_drawn": int, "skipped_in_a_row": dict}
    wrong += [name for name, kind in kinds.items() if not isinstance(state.get(name), kind)]
    wrong += [name for name, part in parts.items() if not _has_numbers(state.get(name), part.state_dict())]
    if wrong:
        raise CheckpointError(
            f"{checkpoint / STATE} is not what a run saved there (see {', '.join(wrong)}): write the name of another "
            f"checkpoint into {checkpoint.parent / LATEST}, or choose another trainer.output_dir"
        )
    return state


def _has_numbers(found: object, expected: dict[str, float]) -> bool:
    return isinstance(found, dict) and all(isinstance(found.get(name), int | float) for name in expected)

"""How far a run has come: the checkpoint that it goes on from, and what it saves besides its models."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megappo.batch.exchange import Exchange
from megappo.checkpoint.errors import CheckpointError
from megappo.checkpoint.folders import LATEST, STATE, position_of, read_state, step_of
from megappo.checkpoint.store import CheckpointStore
from megappo.config.bases import read_file
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
from megappo.trainer.random_states import restore_random_states, write_random_states

Stateful = FixedKLController | AdaptiveKLController | RunningMoments
"""What a checkpoint holds as plain numbers."""


class Progress:
    """Finds the newest checkpoint at once; all ranks make it, and call its methods but `describe`, together.

    Attributes:
        checkpoint: the one to go on from; None in a folder without any.
        start_step: steps done before this process started, once it is restored.
        step: the last that is finished.
        in_flight: the next one, if its rows have their advantages.
        num_drawn: prompts that the steps so far have drawn, the one in flight among them.
        is_overdue: the last save has failed, by `note_failed_save`. failed_saves: how many have, in this process.
        notice: what of the checkpoint could not be restored; "" if all was.
        kl: the KL coefficient's controller.
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
        self.notice = ""
        self.is_overdue, self.failed_saves = False, 0
        self.kl = kl_controller(config.algorithm.kl_ctrl)
        self.reward_moments = RunningMoments()

    @property
    def _parts(self) -> dict[str, Stateful]:
        return {"kl": self.kl, "reward_moments": self.reward_moments}

    def restore(self, models: Models) -> None:
        """Restore what `save` saved, if there is a checkpoint."""
        if self.checkpoint is None:
            return
        state = _checked_state(self.checkpoint, self._parts)
        if wrong := wrong_models(self.config, self.checkpoint, state):
            raise CheckpointError(wrong)
        for name, engine in models.trained.items():
            with models.loading(name):
                self.store.load(self.checkpoint, {name: engine})
        self._check_steps(state["optimizer_steps"], models)
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        for name, engine in models.trained.items():
            if engine is not None:
                engine.skipped_in_a_row = state.get("skipped_in_a_row", {}).get(name, 0)
        self.start_step = self.step = state["step"]
        self.notice = restore_random_states(self.checkpoint, self.exchange)
        self.in_flight = read_in_flight(self.checkpoint, self.exchange)
        begun = self.in_flight is not None
        self.num_drawn = prompts_drawn(self.checkpoint, state, self.step + begun)
        if begun:
            self._check_mini_batches(self.in_flight, models)

    def begin(self, flight: InFlight, num_drawn: int) -> None:
        """A step's rows have their advantages, and all steps so far have drawn so many prompts."""
        self.in_flight, self.num_drawn = flight, num_drawn

    def finish(self, step: int) -> None:
        """A step has come to its end."""
        self.step, self.in_flight = step, None

    @property
    def is_saved(self) -> bool:
        """Whether the newest checkpoint has all that is known."""
        return self.checkpoint is not None and position_of(self.checkpoint) == self._position

    def begin_save(self, models: Models, *, in_background: bool) -> None:
        """Begin to write a checkpoint of all that is known; `finish_save` says whether that went well.

        Args:
            in_background: see `CheckpointStore.begin`.
        Raises:
            CheckpointError, OtherRankError: it cannot be written.
        """
        state = {name: part.state_dict() for name, part in self._parts.items()}
        step, num_updates = self._position
        self.is_overdue = False
        self.store.begin(
            step,
            models.trained,
            {
                "step": step,
                "prompts_drawn": self.num_drawn,
                **state,
                "models": trained_in_words(self.config),
                "optimizer_steps": models.num_steps(self.exchange),
                "skipped_in_a_row": models.skipped_in_a_row(self.exchange),
            },
            num_updates=None if self.in_flight is None else num_updates,
            write_more=self._write_more,
            in_background=in_background,
        )

    def finish_save(self) -> Path:
        """Complete the checkpoint that is being written; its folder.

        Raises:
            CheckpointError, OtherRankError: it could not be written.
        """
        self.checkpoint = self.store.finish()
        return self.checkpoint

    def note_failed_save(self) -> None:
        """Note that a save has failed, so that the next is overdue."""
        self.is_overdue = True
        self.failed_saves += 1

    @property
    def _position(self) -> tuple[int, int]:
        """As `checkpoint.folders.position_of`."""
        return self.step, -1 if self.in_flight is None else sum(self.in_flight.num_updates.values())

    def _check_steps(self, saved: dict[str, list[int]], models: Models) -> None:
        """See that learning rates and optimizers go on where they were."""
        found = models.num_steps(self.exchange)
        if found != saved:
            raise CheckpointError(
                f"{self.checkpoint} was saved after {saved} optimizer steps, but loads as {found}: its files do not "
                "belong together; use another checkpoint"
            )

    def _write_more(self, folder: Path) -> None:
        self.exchange.on_rank_0(lambda: (folder / CONFIG_FILE).write_text(dump_config(self.config), "utf-8"))
        write_random_states(folder, self.exchange)
        if self.in_flight is not None:
            write_in_flight(folder, self.in_flight, self.exchange)

    def _check_mini_batches(self, flight: InFlight, models: Models) -> None:
        """An update that has begun goes on with the mini-batches it began with."""
        num_prompts = models.config.data.train_batch_size
        for name, found in flight.num_mini_batches.items():
            section = models.training[name].section
            if section.num_mini_batches(num_prompts) != found:
                raise CheckpointError(
                    f"{self.checkpoint} is in the middle of step {flight.step}, with {found} mini-batches an epoch for "
                    f"the {name}: set {models.training[name].key}.ppo_mini_batch_size {num_prompts // found} until "
                    "that step is finished"
                )

    def describe(self) -> str:
        """What to say about a folder in which a run has been before; "" in a new one."""
        if self.checkpoint is not None:
            begun = "" if self.in_flight is None else f", in the middle of step {self.in_flight.step},"
            return f"going on after step {self.start_step}{begun} from {self.checkpoint}"
        if (self.output_dir / METRICS_FILE).exists():
            return (
                f"starting anew: the run before left no checkpoint in {self.output_dir}; its metrics are kept, with "
                "their date"
            )
        return ""


def prompts_drawn(checkpoint: Path, state: Mapping[str, Any], num_begun: int) -> int:
    """How many prompts the steps that a checkpoint has begun have drawn; earlier versions counted batches, or each step
    drew one, of the size that its own config has."""
    if "prompts_drawn" in state:
        return state["prompts_drawn"]
    data = read_file(checkpoint / CONFIG_FILE).values["data"]
    return state.get("num_drawn", num_begun) * (data.get("gen_batch_size") or data["train_batch_size"])


def _checked_state(checkpoint: Path, parts: dict[str, Stateful]) -> dict[str, Any]:
    """state.json with everything that `Progress.begin_save` writes.

    Raises:
        CheckpointError: it lacks something, or is of another step than its folder's name says.
    """
    state = read_state(checkpoint)
    wrong = [] if state["step"] == step_of(checkpoint) else [f"step {state['step']}"]
    kinds = {"models": str, "optimizer_steps": dict}
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

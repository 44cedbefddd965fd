"""How far a run has come: the checkpoint that it goes on from, and what it saves besides its models."""

from pathlib import Path
from typing import Any

from megappo.batch.exchange import Exchange
from megappo.checkpoint.errors import CheckpointError
from megappo.checkpoint.folders import LATEST, STATE, read_state, step_of
from megappo.checkpoint.store import CheckpointStore
from megappo.config.schema import Config
from megappo.observe.files import CHECKPOINTS
from megappo.observe.metrics import METRICS_FILE
from megappo.ppo.kl import AdaptiveKLController, FixedKLController, kl_controller
from megappo.ppo.reward_shaping import RunningMoments
from megappo.trainer.models import Models

Stateful = FixedKLController | AdaptiveKLController | RunningMoments
"""What a checkpoint holds as plain numbers."""


class Progress:
    """Finds the newest checkpoint at once; all ranks make it, and call `restore` and `save`, together.

    Attributes:
        checkpoint: the one to go on from; None in a folder without any.
        start_step: steps done before this process started, once it is restored.
        kl: the KL coefficient's controller.
        reward_moments: of all scores so far, for reward.normalize running.
    """

    def __init__(self, config: Config, exchange: Exchange):
        self.output_dir = Path(config.trainer.output_dir)
        self.store = CheckpointStore(self.output_dir / CHECKPOINTS, config.trainer.keep_checkpoints, exchange)
        self.checkpoint = self.store.latest()
        self.start_step = 0
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
        if state["models"] != models.description:
            raise CheckpointError(
                f"{self.checkpoint} holds {state['models']}, but this run trains {models.description}: set "
                "algorithm.adv_estimator and algorithm.shared_backbone as they were, or choose another "
                "trainer.output_dir"
            )
        self.store.load(self.checkpoint, models.trained)
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        self.start_step = state["step"]

    def save(self, step: int, models: Models) -> Path:
        """Write the checkpoint of a finished step."""
        state = {name: part.state_dict() for name, part in self._parts.items()}
        return self.store.save(step, models.trained, {"step": step} | state | {"models": models.description})

    def describe(self) -> str:
        """What to say about a folder in which a run has been before; "" in a new one."""
        if self.checkpoint is not None:
            return f"going on after step {self.start_step} from {self.checkpoint}"
        if (self.output_dir / METRICS_FILE).exists():
            return (
                f"starting anew: the run before left no checkpoint in {self.output_dir}; its metrics are kept, with "
                "their date"
            )
        return ""


def _checked_state(checkpoint: Path, parts: dict[str, Stateful]) -> dict[str, Any]:
    """state.json with everything that `Progress.save` writes.

    Raises:
        CheckpointError: it lacks something, or is of another step than its folder's name says.
    """
    state = read_state(checkpoint)
    wrong = [] if state["step"] == step_of(checkpoint) else [f"step {state['step']}"]
    wrong += [] if isinstance(state.get("models"), str) else ["models"]
    wrong += [name for name, part in parts.items() if not _has_numbers(state.get(name), part.state_dict())]
    if wrong:
        raise CheckpointError(
            f"{checkpoint / STATE} is not what a run saved there (see {', '.join(wrong)}): write the name of another "
            f"checkpoint into {checkpoint.parent / LATEST}, or choose another trainer.output_dir"
        )
    return state


def _has_numbers(found: object, expected: dict[str, float]) -> bool:
    return isinstance(found, dict) and all(isinstance(found.get(name), int | float) for name in expected)

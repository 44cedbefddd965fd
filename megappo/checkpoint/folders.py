"""The checkpoints in a run's folder, by their names and state.json.

Without torch: the dry run reads them too.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from megappo.architecture.model_folder import CONFIG_FILE
from megappo.architecture.parsing import read_architecture
from megappo.config.config_error import ConfigError, listed
from megappo.config.methods import ValueSupport
from megappo.config.text_files import TextFileError, read_record, read_text
from megappo.errors import ActionableError

LATEST = "latest"
STATE = "state.json"
METADATA = ".metadata"
"""Lists the tensors of a component."""
PARTIAL = ".partial"
"""Ends the name of a checkpoint that is being written, or removed."""
NOT_BEGUN = -1
"""Number of updates of a step that has not begun."""
LONGEST_NAME = 4096
"""Bytes of `latest`."""
_NAME = re.compile(r"step_(\d{8,})(?:_(\d{4,}))?")


class SavedState(BaseModel, strict=True, allow_inf_nan=False):
    """Types of what state.json has; see `trainer.progress.STATE_KEYS`."""

    step: int = Field(ge=0)
    prompts_drawn: int = Field(0, ge=0)
    prompts_pending: list[Annotated[int, Field(ge=0)]] = []
    kl: dict[Literal["value"], float] = {}
    reward_moments: dict[Literal["count", "mean", "squares"], float] = {}
    models: dict[str, str] = {}
    optimizer_steps: dict[str, Annotated[tuple[int, int], Field(strict=False)]] = {}
    value_supports: dict[str, dict[Literal["size", "centers"], int | list[float]]] = {}


class CheckpointError(ActionableError, RuntimeError):
    """A checkpoint cannot be used or written; the message has the reason and the remedy."""


def step_folder(folder: Path, step: int, num_updates: int = NOT_BEGUN) -> Path:
    """Return the folder of a checkpoint after a finished step and `num_updates` updates of the next one."""
    return folder / (f"step_{step:08d}" + ("" if num_updates == NOT_BEGUN else f"_{num_updates:04d}"))


def step_of(checkpoint: Path) -> int:
    """Return the last finished step, from a checkpoint's name."""
    return position_of(checkpoint)[0]


def position_of(checkpoint: Path) -> tuple[int, int]:
    """Return the last finished step, and the updates of the next one, or NOT_BEGUN."""
    step, num_updates = _NAME.fullmatch(checkpoint.name).groups()
    return int(step), NOT_BEGUN if num_updates is None else int(num_updates)


def begun_step(checkpoint: Path) -> int:
    """Return the last step that has begun: the finished one, or the one that the checkpoint is in the middle of."""
    step, num_updates = position_of(checkpoint)
    return step + (num_updates != NOT_BEGUN)


def place_of(checkpoint: Path) -> str:
    """Return where a run resumes from a checkpoint, in words."""
    step = step_of(checkpoint)
    begun = begun_step(checkpoint)
    return f"after step {step}" if begun == step else f"in the middle of step {begun}"


def checkpoints_in(folder: Path) -> list[Path]:
    """List the checkpoints of a run, oldest first, whether complete or not."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in found if _NAME.fullmatch(path.name) and path.is_dir()), key=position_of)


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint, by its names."""
    return _NAME.fullmatch(folder.resolve().name) is not None and (folder / STATE).is_file()


def is_component(folder: Path) -> bool:
    """Return whether a folder is a component of a checkpoint, or a converted model."""
    return (folder / "metadata.json").is_file() or (folder / METADATA).is_file()


def components_of(folder: Path) -> list[Path]:
    """Folders of the components in a training checkpoint, step_XXXXXXXX; none in a component's own folder."""
    if is_component(folder) or not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if is_component(path))


def candidates(folder: Path) -> tuple[list[Path], str]:
    """Return the checkpoints that a run may resume from, best first, and what is wrong with `latest` ("" if nothing).

    The best is the one that `latest` names, or the newest if it names none. Older ones follow.

    Raises:
        CheckpointError: there is a `latest`, but no checkpoint.
    """
    newest_first = checkpoints_in(folder)[::-1]
    pointer = folder / LATEST
    if not newest_first:
        if pointer.exists():
            raise CheckpointError(
                f"{pointer} is there, but no checkpoint beside it: restore them, or remove {pointer} to start from the "
                "beginning"
            )
        return [], ""
    try:
        name = read_text(pointer, LONGEST_NAME).strip()
    except TextFileError as error:
        return newest_first, f"{pointer} cannot be read ({error})"
    names = [checkpoint.name for checkpoint in newest_first]
    if name not in names:
        return newest_first, f"{pointer} names no checkpoint that is there: found {name[:60]!r}"
    return newest_first[names.index(name) :], ""


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the trainer's state in a checkpoint.

    Raises:
        CheckpointError: state.json is missing, damaged, or of another step than the folder's name.
    """
    try:
        state = read_record(checkpoint / STATE, SavedState.model_validate, "use another checkpoint")
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    step = step_of(checkpoint)
    if not state:
        raise CheckpointError(f"{checkpoint / STATE} is not what a run writes: it is missing; use another checkpoint")
    if state["step"] != step:
        raise CheckpointError(f"{checkpoint / STATE} is of step {state['step']}, not {step}; use another checkpoint")
    return state


def stored_support(component: Path, otherwise: ValueSupport | None) -> ValueSupport | None:
    """Return the meaning of the outputs of a component's value head; None for one output.

    Args:
        component: a component's folder in a checkpoint, or a converted model.
        otherwise: returned for a folder without a file that records it: a copy of a component alone.
    Raises:
        CheckpointError, ConfigError: state.json, or config.json, is damaged.
    """
    if (component / CONFIG_FILE).is_file():
        return read_architecture(component, head="value").stored_support
    if not (component.parent / STATE).is_file():
        return otherwise
    stored = read_state(component.parent).get("value_supports", {}).get(component.name)
    return stored and ValueSupport(stored["size"], tuple(stored["centers"]))


def no_folder(folder: Path) -> str:
    """Return an error message that names the folders that exist where `folder` should be."""
    parent = next(path for path in folder.resolve().parents if path.is_dir())
    found = sorted(path.name for path in parent.iterdir() if path.is_dir())
    return f"no folder {folder}; {parent} has {listed(found)}"

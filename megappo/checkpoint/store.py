"""A run's checkpoints: complete or absent, newest named by `latest`, the oldest pruned.

    checkpoints/
      latest                     name of the newest complete checkpoint
      step_00000010/
        state.json               the trainer's state (step, KL coefficient)
        actor/, critic/          dist_checkpointing folders: model, optimizer, learning-rate schedule

A checkpoint is written as `step_X.partial` and renamed when every rank has finished, so a killed run leaves the one
before it untouched. The folder must be on storage that all nodes share.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint.api import CheckpointException  # of any rank; not an Exception

from megappo.checkpoint.errors import CheckpointError
from megappo.checkpoint.sharded import reason, save_sharded
from megappo.placement.exchange import Exchange


class Checkpointed(Protocol):
    """What a checkpoint stores of one component on this rank."""

    def sharded_state_dict(self, is_loading: bool) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def as_world(self) -> AbstractContextManager: ...


class CheckpointStore:
    """Saves and loads a run's checkpoints. Every rank calls every method together.

    Args:
        folder: `<output_dir>/checkpoints`.
        keep: newest checkpoints to keep; 0 keeps all.
    """

    def __init__(self, folder: Path, keep: int, exchange: Exchange):
        self.folder = folder
        self.keep = keep
        self.exchange = exchange

    def latest(self) -> Path | None:
        """The newest complete checkpoint, or None in a folder without any.

        Raises:
            CheckpointError: `latest` names a checkpoint that is missing or incomplete.
        """
        pointer = self.folder / "latest"
        if not pointer.exists():
            return None
        path = self.folder / pointer.read_text().strip()
        if not (path / "state.json").is_file():
            others = ", ".join(p.name for p in self._complete()) or "none"
            raise CheckpointError(
                f"{pointer} names {path.name!r}, which is missing or incomplete. Complete checkpoints: {others}. "
                f"Write one of these names into {pointer}, or start anew in another trainer.output_dir"
            )
        return path

    def save(self, step: int, components: Mapping[str, Checkpointed | None], state: dict[str, Any]) -> Path:
        """Write a checkpoint of `components` (None where this rank is not a member) and the trainer's `state`."""
        path = self.folder / f"step_{step:08d}"
        partial = path.with_name(path.name + ".partial")
        self._on_rank_0(lambda: self._prepare(partial, components))
        self._write(partial, components)
        self.exchange.share(None)  # rank 0 may not be a member of what the others still write
        self._on_rank_0(lambda: self._publish(partial, path, state))
        return path

    def load(self, path: Path, components: Mapping[str, Checkpointed | None]) -> dict[str, Any]:
        """Load `components` from a checkpoint, whatever layout it was saved in; returns the trainer's state.

        Raises:
            CheckpointError: state.json or a component is missing, damaged or of another model.
        """
        state = self.state(path)
        self._read(path, components)
        return state

    def state(self, path: Path) -> dict[str, Any]:
        """The trainer's state in a checkpoint; any rank may ask for it.

        Raises:
            CheckpointError: state.json is missing or damaged.
        """
        try:
            return json.loads((path / "state.json").read_text())
        except (ValueError, OSError) as error:
            raise _unusable(path, "state.json", error) from error

    def _prepare(self, partial: Path, components: Mapping[str, Checkpointed | None]) -> None:
        for leftover in self.folder.glob("*.partial"):
            shutil.rmtree(leftover)
        for name in components:
            (partial / name).mkdir(parents=True)

    def _write(self, partial: Path, components: Mapping[str, Checkpointed | None]) -> None:
        for name, component in components.items():
            if component is not None:
                state = component.sharded_state_dict(is_loading=False)
                save_sharded(state, partial / name, component.as_world())

    def _read(self, path: Path, components: Mapping[str, Checkpointed | None]) -> None:
        for name, component in components.items():
            if component is None:
                continue
            wanted = component.sharded_state_dict(is_loading=True)
            try:
                with component.as_world():
                    loaded = dist_checkpointing.load(wanted, str(path / name), strict=StrictHandling.RAISE_ALL)
            except (Exception, CheckpointException) as error:
                raise _unusable(path, name, error) from error
            component.load_state_dict(loaded)

    def _publish(self, partial: Path, path: Path, state: dict[str, Any]) -> None:
        (partial / "state.json").write_text(json.dumps(state, indent=1))
        if path.exists():  # the same step, saved before a resume from an older checkpoint
            shutil.rmtree(path)
        partial.rename(path)
        pointer = self.folder / "latest.partial_pointer"
        pointer.write_text(path.name + "\n")
        os.replace(pointer, self.folder / "latest")
        if self.keep:
            # Newer ones are there after going back to an older one; they must not push out what was just saved.
            for old in [p for p in self._complete() if p <= path][: -self.keep]:
                shutil.rmtree(old)

    def _complete(self) -> list[Path]:
        complete = (p for p in self.folder.glob("step_*") if p.suffix != ".partial" and (p / "state.json").is_file())
        return sorted(complete)

    def _on_rank_0(self, action: Callable[[], None]) -> None:
        """Run on rank 0; every rank waits for it, and raises when it failed."""
        error = None
        if self.exchange.rank == 0:
            try:
                action()
            except Exception as failure:
                error = failure
        self.exchange.raise_together(error)


def _unusable(path: Path, part: str, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"cannot load {part} from {path}: {reason(error)}. The checkpoint is damaged or of another model; write the "
        f"name of another one into {path.parent / 'latest'}, or choose another trainer.output_dir"
    )

"""A run's checkpoints: complete or absent, newest named by `latest`, the oldest pruned.

    checkpoints/
      latest                     name of the newest complete checkpoint
      step_00000010/
        SHA256SUMS               of every other file, as sha256sum -c takes it
        state.json               the trainer's state (step, KL coefficient)
        actor/, critic/          dist_checkpointing folders: model, optimizer, learning-rate schedule

A checkpoint is written as `step_X.partial` and renamed when every rank has finished and the disk has all of it, so a
killed run leaves the one before it untouched. The folder must be on storage that all nodes share.
"""

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.validation import StrictHandling

from megappo.batch.exchange import Exchange, OtherRankError
from megappo.checkpoint.checksums import damage, write_sums
from megappo.checkpoint.folders import (
    LATEST,
    NOT_BEGUN,
    PARTIAL,
    STATE,
    CheckpointError,
    candidates,
    checkpoints_in,
    position_of,
    step_folder,
)
from megappo.checkpoint.sharded import HostCopies, Writing, begin_sharded, load_sharded, reason
from megappo.models.train_engine import TrainedEngine
from megappo.runtime.durable_files import sync, write_durably


@dataclass(frozen=True)
class Saving:
    """A checkpoint that is being written.

    Attributes:
        path: its name when it is complete. partial: its name until then.
        writings: writings of the components on this rank, in the same order everywhere.
        thread: writes them in the background; None = they are written. A process that exits does not wait for it: an
            incomplete checkpoint has no name to resume from.
    """

    path: Path
    partial: Path
    writings: list[Writing]
    thread: threading.Thread | None


class CheckpointStore:
    """Saves and loads a run's checkpoints. Every rank calls every method together.

    Args:
        folder: `<output_dir>/checkpoints`.
        keep: newest checkpoints to keep; 0 keeps all. keep_every: also keep every keep_every-th step; 0 for none.
        warn: called on rank 0 with the reason why a run resumes from another checkpoint than `latest` names.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        exchange: Exchange,
        warn: Callable[[str], None] = print,
        *,
        keep_every: int = 0,
    ):
        self.folder = folder
        self.keep = keep
        self.keep_every = keep_every
        self.exchange = exchange
        self.warn = warn if exchange.rank == 0 else lambda line: None
        self._damaged: set[Path] = set()
        self._saving: Saving | None = None
        self._copies: HostCopies | None = None

    def latest(self) -> Path | None:
        """Return the checkpoint to resume from, with all files verified; None in a folder without checkpoints.

        It is the one that `latest` names or, if that is damaged, the newest older one that is not.

        Raises:
            CheckpointError: there are checkpoints, but all candidates are damaged.
        """
        found, problem = self.exchange.on_rank_0(lambda: candidates(self.folder))
        faults = [problem] if problem else []
        for path in found:
            fault = damage(path, self.exchange)
            if not fault:
                if faults:
                    self.warn(f"WARNING: {'; '.join(faults)}; resuming from {path}")
                return path
            self._damaged.add(path)
            faults.append(f"{path} is damaged: {fault}")
        if found:
            raise CheckpointError(
                f"no usable checkpoint in {self.folder}: {'; '.join(faults)}. Copy one there, write the name of "
                f"another one into {self.folder / LATEST}, or choose another trainer.output_dir"
            )
        return None

    def begin(
        self,
        step: int,
        components: Mapping[str, TrainedEngine | None],
        state: dict[str, Any],
        *,
        num_updates: int = NOT_BEGUN,
        write_more: Callable[[Path], None] = lambda folder: None,
        in_background: bool = True,
    ) -> None:
        """Begin to write a checkpoint of `components` (None where this rank is not a member) and the trainer's `state`,
        as they are now. No other save may be in progress.

        Args:
            step: the last finished step. num_updates: updates of the next step, or NOT_BEGUN.
            write_more: called on all ranks with the folder, to write further files.
            in_background: a thread writes a copy; otherwise it is on the disk when this returns.
        Raises:
            CheckpointError, OtherRankError: as `finish`.
            RuntimeError: a save is in progress: it would be written from this one's copies.
        """
        if self.is_saving:
            raise RuntimeError("finish the save in progress before another one begins")
        path = step_folder(self.folder, step, num_updates)
        partial = path.with_name(path.name + PARTIAL)
        text = json.dumps({"step": step} | state, indent=1)
        with self._cleanup_on_failure(path, partial):
            self.exchange.on_rank_0(lambda: self._prepare(partial, components))
            # Kept between background saves. A synchronous save, such as the last, needs no copies.
            self._copies = (self._copies or HostCopies()) if in_background else None
            writings: list[Writing] = []
            for name, component in components.items():
                begun = [] if component is None else [_begin_writing(component, partial / name, self._copies)]
                if not in_background:  # before the next one's state takes memory
                    _write(begun)
                    self._finish_writings(begun)
                writings += begun
            write_more(partial)
            self.exchange.on_rank_0(lambda: (partial / STATE).write_text(text))
        thread = None
        if in_background:
            thread = threading.Thread(
                target=_write,
                name="checkpoint",
                args=[writings],
                daemon=True,
            )
            thread.start()
        self._saving = Saving(path, partial, writings, thread)

    @property
    def is_saving(self) -> bool:
        """Return whether a checkpoint awaits `finish`; the same on every rank."""
        return self._saving is not None

    def is_written(self) -> bool:
        """Return whether a checkpoint awaits `finish` and all ranks have written their files."""
        if self._saving is None:
            return False
        thread = self._saving.thread
        return all(self.exchange.all_gather(thread is None or not thread.is_alive()))

    def finish(self) -> Path | None:
        """Complete the checkpoint that `begin` began, if any, and return its folder.

        Raises:
            CheckpointError, OtherRankError: it cannot be written, raised on all ranks. Older checkpoints are
                untouched, and the incomplete one is removed.
        """
        saving = self._saving
        self._saving = None
        if saving is None:
            return None
        with self._cleanup_on_failure(saving.path, saving.partial):
            if saving.thread is not None:
                saving.thread.join()
                self._finish_writings(saving.writings)
            sums: dict[str, str] = {}
            for writing in saving.writings:
                sums |= writing.sums
            write_sums(saving.partial, self.exchange, sums)
            self.exchange.on_rank_0(lambda: self._publish(saving))
        return saving.path

    @contextmanager
    def _cleanup_on_failure(self, path: Path, partial: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, CheckpointError, OtherRankError) as error:
            if self.exchange.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)  # the disk may be full
            if not isinstance(error, OSError):
                raise
            raise CheckpointError(f"cannot save {path.name} to {self.folder}: {reason(error)}") from error

    def load(self, path: Path, components: Mapping[str, TrainedEngine | None]) -> None:
        """Load `components` from a checkpoint, whatever layout it was saved in; `read_state` reads the trainer's state.

        Raises:
            CheckpointError: a component is missing, damaged or of another model.
        """
        for name, component in components.items():
            if component is not None:
                wanted = component.sharded_state_dict(is_loading=True)
                strict = StrictHandling.RAISE_ALL
                found = load_sharded(wanted, path / name, component.as_world, strict, component.replicas)
                component.load_state_dict(found)

    def _prepare(self, partial: Path, components: Mapping[str, TrainedEngine | None]) -> None:
        _remove(*self.folder.glob(f"*{PARTIAL}"))
        for name in components:
            (partial / name).mkdir(parents=True)

    def _finish_writings(self, writings: list[Writing]) -> None:
        error = None
        for writing in writings:
            try:
                writing.finish()
            except CheckpointError as failure:
                error = error or failure
        self.exchange.raise_together(error)  # ranks of other components have not seen it

    def _publish(self, saving: Saving) -> None:
        """Give the checkpoint its name, then name it in `latest`, then remove what is old; a kill in between loses
        nothing."""
        partial = saving.partial
        path = saving.path
        for folder in (*(child for child in partial.iterdir() if child.is_dir()), partial):
            sync(folder)
        # The same step may have been saved before a resume from an older checkpoint.
        old = [_set_aside(path)] if path.exists() else []
        partial.rename(path)
        sync(self.folder)
        self._damaged.discard(path)
        write_durably(self.folder / LATEST, path.name + "\n")
        old += [_set_aside(checkpoint) for checkpoint in self._old(path)]
        if saving.thread is None:
            _remove(*old)
        else:  # slow for large files; the next save removes what remains
            threading.Thread(
                target=_remove,
                name="checkpoint-removal",
                args=old,
                daemon=True,
            ).start()

    def _old(self, newest: Path) -> list[Path]:
        """List the checkpoints to remove after the newest was saved."""
        if not self.keep:
            return []
        # Newer ones are there after going back to an older one; they must not push out what was just saved.
        whole = [other for other in checkpoints_in(self.folder) if other not in self._damaged]
        before = [other for other in whole if position_of(other) <= position_of(newest)]
        return [old for old in before[: -self.keep] if not self._stays(old)]

    def _stays(self, checkpoint: Path) -> bool:
        step, num_updates = position_of(checkpoint)
        return bool(self.keep_every) and step % self.keep_every == 0 and num_updates == NOT_BEGUN


def _begin_writing(component: TrainedEngine, folder: Path, copies: HostCopies | None) -> Writing:
    # Not in a variable: one component's state must be freed before the next one's is made.
    return begin_sharded(component.sharded_state_dict(is_loading=False), folder, component.as_world, copies)


def _write(writings: list[Writing]) -> None:
    for writing in writings:
        writing.write()


def _remove(*folders: Path) -> None:
    """Remove folders, ignoring errors: another process may be removing them too."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _set_aside(checkpoint: Path) -> Path:
    """Rename a checkpoint before it is removed, as half of it would look complete; return its new path."""
    partial = checkpoint.with_name(f"{checkpoint.name}.old{PARTIAL}")
    checkpoint.rename(partial)
    return partial

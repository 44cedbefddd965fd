"""What a run is made of on this rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megappo.batch.exchange import Exchange, OtherRankError
from megappo.checkpoint.errors import CheckpointError
from megappo.config.schema import Config
from megappo.observe.observer import NullObserver, Observer
from megappo.rollouts.datasets import Datasets
from megappo.rollouts.record import Replay
from megappo.trainer.batches import SampledBatches
from megappo.trainer.inference import InferenceEngines, NoEngines
from megappo.trainer.models import Models
from megappo.trainer.phases import Phases
from megappo.trainer.progress import Progress
from megappo.trainer.rollouts import Rollouts, raise_if_interrupted
from megappo.trainer.utilisation import Utilisation


@dataclass
class Run:
    """A run's parts. The same on every rank, but for null objects where a part is absent.

    Attributes:
        rollouts: asks the engines; None in a run that replays a record.
        batches: from a step to its scored rows.
    """

    config: Config
    exchange: Exchange
    datasets: Datasets
    models: Models
    engines: InferenceEngines | NoEngines
    rollouts: Rollouts | None
    batches: SampledBatches | Replay
    progress: Progress
    observer: Observer | NullObserver
    phase: Phases
    utilisation: Utilisation

    def save(self, *, in_background: bool = False, may_fail: bool = False) -> None:
        """Write a checkpoint while the engines sleep; all ranks together. The one before is finished first.

        Args:
            in_background: a copy is written while training goes on, for `finish_save` to complete.
            may_fail: one that cannot be written is told and counted, and overdue then.
        Raises:
            CheckpointError, OtherRankError: it cannot be written, and may not fail.
            FloatingPointError, OtherRankError: weights are spoiled.
        """
        self.finish_save()
        self.engines.sleep()  # saving takes memory
        with self.phase("save"):
            self.models.check_finite(self.exchange)
            with self._told(may_fail):
                self.progress.begin_save(self.models, in_background=in_background)
        if not in_background:
            self.finish_save(may_fail=may_fail)

    def finish_save(self, *, may_fail: bool = True) -> None:
        """Wait for the checkpoint that is being written, if one is, and complete it; all ranks together.

        Raises:
            CheckpointError, OtherRankError: it could not be written, and may not fail.
        """
        if self.progress.store.is_saving:
            with self.phase("finish_save"), self._told(may_fail):
                self.observer.message(f"checkpoint {self.progress.finish_save()}")

    def finish_save_if_written(self) -> None:
        """`finish_save`, if it need not wait."""
        if self.progress.store.is_written():
            self.finish_save()

    @contextmanager
    def _told(self, may_fail: bool) -> Iterator[None]:
        try:
            yield
        except (CheckpointError, OtherRankError) as error:
            if not may_fail:
                raise
            self.progress.note_failed_save()
            self.observer.message(f"WARNING: {error}: it is tried again")

    def save_if_needed(self) -> None:
        """`save` if there is something that no checkpoint has; the engines are not needed any more."""
        self.finish_save()
        is_new = self.progress.step == 0 and self.progress.in_flight is None
        if not is_new and not self.progress.is_saved:
            self.engines.end()
            self.save()

    def check_interrupted(self) -> None:
        """All ranks together.

        Raises:
            Interrupted: on all ranks, if any has a reason to end.
        """
        raise_if_interrupted(self.exchange)

    def finish(self) -> None:
        """Export the actor and report; all ranks together."""
        if self.config.trainer.export_hf:
            with self.phase("export"):
                self.models.export_actor()
        self.exchange.share(None)
        self.observer.finish()

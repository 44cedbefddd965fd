"""TensorBoard's event files of a run."""

from collections.abc import Mapping
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from megappo.observe.files import TENSORBOARD_FOLDER
from megappo.observe.loggers import Logger, RunEnd, RunInfo
from megappo.observe.metrics import BUCKETS, Histogram, only_numbers

FLUSH_SECONDS = 1


class TensorBoard(Logger):
    """Writes each step to `tensorboard/`; the writer's own thread puts it on the disk within FLUSH_SECONDS."""

    def on_start(self, run: RunInfo) -> None:
        """Open the files; TensorBoard then ignores what earlier runs logged for `resume_step` and later."""
        folder = run.output_dir / TENSORBOARD_FOLDER
        self._writer = SummaryWriter(str(folder), purge_step=run.resume_step, flush_secs=FLUSH_SECONDS)

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write a step's numbers and histograms."""
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in only_numbers(metrics).items()]
        self._writer.file_writer.add_summary(Summary(value=scalars), step)  # as add_scalar would, but all at once
        for name, value in metrics.items():
            if isinstance(value, Histogram):
                self._add_histogram(name, value, step)

    def _add_histogram(self, name: str, histogram: Histogram, step: int) -> None:
        total, squares, *counts = histogram.numbers
        filled = [index for index, count in enumerate(counts) if count]
        if filled:
            limits = BUCKETS.tolist()
            low, high = limits[max(filled[0] - 1, 0)], limits[min(filled[-1], len(limits) - 2)]
            self._writer.add_histogram_raw(name, low, high, sum(counts), total, squares, limits, counts, step)

    def on_end(self, end: RunEnd) -> None:
        """Close the files."""
        self._writer.close()

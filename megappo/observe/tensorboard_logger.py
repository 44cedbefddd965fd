"""TensorBoard's event files of a run: metrics, the report's charts, histograms, responses, settings beside scores."""

import re
from collections import defaultdict
from collections.abc import Mapping
from textwrap import indent
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from megappo.config.config_error import show
from megappo.config.loading import leaves
from megappo.observe.charts import charts
from megappo.observe.files import TENSORBOARD_FOLDER, keep_earlier
from megappo.observe.findings import LoggedMetrics, Samples
from megappo.observe.loggers import BUCKETS, Histogram, Logger, RunEnd, RunInfo, only_numbers
from megappo.observe.metrics_file import read_metrics
from megappo.observe.run_summary import HELD_OUT, REWARD
from megappo.observe.samples import sample_key, sample_text

FLUSH_SECONDS = 1


class TensorBoard(Logger):
    """Writes each step to `tensorboard/`; the writer's own thread puts it on the disk within FLUSH_SECONDS.

    A metric that no chart shows is left out until it changes: a run has dozens that are 0 from its first step to its
    last.
    """

    def on_start(self, run: RunInfo) -> None:
        """Open the files; TensorBoard then ignores what earlier runs logged for `resume_step` and later."""
        self._run = run
        folder = run.output_dir / TENSORBOARD_FOLDER
        if not run.resume_step:
            keep_earlier(folder)
        self._writer = SummaryWriter(str(folder), purge_step=run.resume_step, flush_secs=FLUSH_SECONDS)
        groups = {group: {chart["title"]: _tags(chart) for chart in of_group} for group, of_group in charts().items()}
        layout = {group: {title: ["Multiline", tags] for title, tags in of.items()} for group, of in groups.items()}
        self._writer.add_custom_scalars(layout)
        tags = [tag for of_group in groups.values() for of_chart in of_group.values() for tag in of_chart]
        self._charted = re.compile("|".join(tags))
        self._constant: dict[str, dict[int, float]] = {}
        self._changing: set[str] = set()
        for metrics in read_metrics(run.output_dir):  # those before resume_step
            for name, value in metrics.items():
                self._new_points(name, metrics["step"], value)

    def _new_points(self, name: str, step: int, value: float) -> dict[int, float]:
        """Return the points of a metric to write after a step: none while it is constant, then the first and the last
        one at which it was, too."""
        if name in self._changing or self._charted.match(name):
            return {step: value}
        points = {**self._constant.pop(name, {}), step: value}
        if len(set(map(str, points.values()))) > 1:  # str: NaN is unequal to NaN
            self._changing.add(name)
            return points
        self._constant[name] = {min(points): value, step: value}
        return {}

    def on_step(self, step: int, metrics: LoggedMetrics) -> None:
        """Write a step's numbers and histograms."""
        scalars = defaultdict(list)
        for name, value in only_numbers(metrics).items():
            for at, number in self._new_points(name, step, value).items():
                scalars[at].append(Summary.Value(tag=name, simple_value=number))
        for at, values in sorted(scalars.items()):  # TensorBoard draws points in the order of the file
            self._writer.file_writer.add_summary(Summary(value=values), at)  # as add_scalar would, but all at once
        for name, value in metrics.items():
            if isinstance(value, Histogram):
                self._add_histogram(name, value, step)

    def _add_histogram(self, name: str, histogram: Histogram, step: int) -> None:
        counts, limits = histogram.bins()
        if counts:
            low, high = max(limits[0], BUCKETS[0]), min(limits[-1], BUCKETS[-2])
            total, squares, *_ = histogram.numbers
            counts = [0, *counts]  # one for each upper limit
            self._writer.add_histogram_raw(name, low, high, sum(counts), total, squares, limits, counts, step)

    def on_samples(self, step: int, samples: Samples) -> None:
        """Write the samples as one text, in which Markdown shows each as it is."""
        texts = [indent(sample_text(sample), " " * 4) for sample in samples]
        self._writer.add_text(sample_key(samples[0]), "\n\n---\n\n".join(texts), step)

    def on_end(self, end: RunEnd) -> None:
        """Close the files. The page HParams compares the settings and last scores of finished runs; of a run that has
        ended several times it would keep the first settings that it finds."""
        if end.status == "finished":
            names = {name for metrics in read_metrics(self._run.output_dir) for name in metrics}
            scores = sorted(name for name in names if name == REWARD or HELD_OUT.fullmatch(name))
            settings: dict[str, object] = {}
            for key, value in leaves(dict(self._run.config)):
                settings[key] = value if isinstance(value, int | float | str) else show(value)
            for content in hparams(settings, dict.fromkeys(scores)):
                self._writer.file_writer.add_summary(content)
        self._writer.close()


def _tags(chart: Mapping[str, Any]) -> list[str]:
    """Return the regular expressions of a chart's metrics, as the page Custom Scalars has them."""
    excluded = f"(?!{_expression(chart['except'])})" if "except" in chart else ""
    return [excluded + _expression(line) for line in chart["lines"].values()]


def _expression(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", "[^/]+") + "$"

import json
import math
import os
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megappo.observe.loggers import RunEnd, RunInfo
from megappo.observe.metrics import Metric
from megappo.observe.metrics_file import MetricsFile, read_metrics
from megappo.observe.tensorboard_logger import TensorBoard


class Both:
    """metrics.jsonl and TensorBoard in one folder."""

    def __init__(self, folder, resume_step=0):
        self.loggers = [MetricsFile(), TensorBoard()]
        for logger in self.loggers:
            logger.on_start(RunInfo(folder, 10, resume_step))

    def write(self, step, metrics):
        for logger in self.loggers:
            logger.on_step(step, metrics)

    def close(self):
        for logger in self.loggers:
            logger.on_end(RunEnd())


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_each_step_is_on_disk_before_the_writer_is_closed(tmp_path):
    writer = Both(tmp_path)
    for step in (1, 2):
        writer.write(step, {"actor/entropy": 0.5})
        assert lines(tmp_path) == [{"step": done, "actor/entropy": 0.5} for done in range(1, step + 1)]
    events, end = EventAccumulator(str(tmp_path / "tensorboard")), time.monotonic() + 30
    found: list[int] = []
    while found != [1, 2] and time.monotonic() < end:
        time.sleep(0.1)
        found = [event.step for event in events.Reload().Scalars("actor/entropy")]
    assert found == [1, 2]
    writer.close()


def test_resuming_drops_the_steps_that_will_be_written_again_and_a_cut_line(tmp_path):
    writer = Both(tmp_path)
    for step in range(5):
        writer.write(step, {"x": float(step)})
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "x": 5.')

    writer = Both(tmp_path, resume_step=3)
    writer.write(3, {"x": 30.0})
    writer.close()

    assert lines(tmp_path) == [
        {"step": 0, "x": 0.0},
        {"step": 1, "x": 1.0},
        {"step": 2, "x": 2.0},
        {"step": 3, "x": 30.0},
    ]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("x")
    assert [(event.step, event.value) for event in events] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_new_run_keeps_the_metrics_of_the_one_before(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("whatever\nit was\n")
    os.utime(tmp_path / "metrics.jsonl", (0, 0))
    Both(tmp_path).close()
    assert read_metrics(tmp_path) == []
    [kept] = tmp_path.glob("metrics-19*-*.jsonl")
    assert kept.read_text() == "whatever\nit was\n"


def test_nan_stays_readable_json(tmp_path):
    writer = Both(tmp_path)
    writer.write(1, {"bad": math.nan, "good": 1})
    writer.close()
    assert lines(tmp_path) == [{"step": 1, "bad": None, "good": 1.0}]


def test_a_histogram_of_no_value_is_left_out(tmp_path):
    writer = Both(tmp_path)
    writer.write(1, {"a": 2.0, "none": Metric.of(torch.zeros(0), "histogram").value})
    writer.close()
    assert read_metrics(tmp_path) == [{"step": 1, "a": 2.0}]


def test_a_histogram_of_several_parts_is_in_tensorboard_alone(tmp_path):
    values = torch.tensor([-2.0, 0.0, 0.0, 0.5, 3.0, 1e9])
    parts = [Metric.of(part, "histogram") for part in values.split(2)] + [Metric.of(values[:0], "histogram")]
    writer = Both(tmp_path)
    writer.write(1, {"advantages": Metric.merged(parts).value, "good": 1.0})
    writer.close()
    assert lines(tmp_path) == [{"step": 1, "good": 1.0}]
    [event] = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Histograms("advantages")
    found = event.histogram_value
    assert (event.step, found.num, found.sum) == (1, 6, 1e9 + 1.5)
    assert found.sum_squares == pytest.approx(1e18)
    below = 0.0
    for value, count in ((-2.0, 1), (0.0, 2), (0.5, 1), (3.0, 1), (1e9, 1)):
        [bucket] = [i for i, limit in enumerate(found.bucket_limit) if value <= limit][:1]
        assert found.bucket[bucket] == count and found.bucket_limit[bucket - 1] < value
        below += count
    assert below == sum(found.bucket)
    assert found.min < -2.0 and found.max > 3.0


BROKEN = ["not json", "\udcff\x00", "[" * 100_000, "[1]", '{"x": 1}', '{"step": "1"}', '{"step": -1}', '{"step": true}']


@pytest.mark.parametrize("broken", [*BROKEN, '{"step": 2, "x": "1"}', '{"step": 2, "x": NaN}'])
def test_a_broken_line_in_the_middle_is_named(tmp_path, broken):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + broken + '\n{"step": 3}\n', errors="surrogateescape")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 .*, is not what a run writes: "):
        read_metrics(tmp_path)

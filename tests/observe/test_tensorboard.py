"""TensorBoard's files of a run, as TensorBoard itself reads them: charts, constants, responses, settings and scores."""

import random
import re
from pathlib import Path

import pytest
import torch
from report_pages import kept, write_kept
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from megappo.observe.loggers import RunEnd, RunInfo, make_tracker
from megappo.observe.metrics import Metric
from megappo.observe.observer import Observer

CONFIG = {"data": {"train_files": ["a.jsonl"]}}
HELD_OUT = {"dataset": "sums", "prompt": "1+1=", "label": "2", "score": 1.0, "passed": True}
INTERRUPTED = RunEnd("interrupted", "a signal")
SCALARS = {
    "reward/score/mean": {1: 0.0, 2: 0.0, 3: 0.0, 4: 0.5},
    "actor/skipped_steps": {},
    "episode/lost": {1: 0.0, 2: 0.0, 3: 2.0, 4: 0.0},
    "val/sums/mean@4": {4: 0.75},
    "critic/vf_loss": {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0},
    "zz/late": {1: 0.0, 2: 0.0, 3: 1.0},
}
"""Metric -> what TensorBoard has of the run below: charts show all but the second and third."""


def observer_in(folder: Path, resume_step: int = 0, lr: float = 1e-6) -> Observer:
    run = RunInfo(folder, 4, resume_step, config=CONFIG | {"actor": {"optim": {"lr": lr}, "use_kl_loss": False}})
    return Observer(run, {"tensorboard": make_tracker("tensorboard")})


def log(observer: Observer, step: int) -> None:
    lost = 2.0 if step == 3 else 0.0
    metrics = {"reward/score/mean": 0.5 * (step == 4), "actor/skipped_steps": 0.0, "episode/lost": lost}
    histogram = Metric.of(torch.tensor([-1.0, 0.5, 2.0]), "histogram").value
    observer.log(
        step, metrics | {"critic/vf_loss": 1.0, "zz/late": float(step == 3), "advantages/histogram": histogram}
    )


@pytest.fixture(scope="module")
def events(tmp_path_factory) -> EventAccumulator:
    """A run that was interrupted after step 2, before its metrics changed, resumed, and ended well after step 4."""
    folder = tmp_path_factory.mktemp("run")
    first = observer_in(folder)
    for step in (1, 2):
        log(first, step)
    first.end(INTERRUPTED)
    second = observer_in(folder, resume_step=3)
    log(second, 3)
    (folder / "rollouts").mkdir()
    write_kept(folder, 4, [kept(4, row, random.Random(row), prompt="<b>7*7</b>") for row in range(40)])
    second.samples(4, [HELD_OUT | {"response": "two\n\nlines"}, HELD_OUT | {"response": "r2"}])
    metrics = {"reward/score/mean": 0.5, "actor/skipped_steps": 0.0, "episode/lost": 0.0, "critic/vf_loss": 1.0}
    second.log(4, metrics | {"val/sums/mean@4": 0.75, "val/sums/pass@1": 0.5, "val/sums/pass@4": 1.0})
    second.end(RunEnd())
    return EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "histograms": 0}).Reload()


def text_of(events: EventAccumulator, tag: str) -> str:
    [event] = events.Tensors(f"{tag}/text_summary")
    assert event.step == 4
    [text] = event.tensor_proto.string_val
    return text.decode()


def plugin_data(events: EventAccumulator, name: str) -> HParamsPluginData:
    content = events.SummaryMetadata(f"_hparams_/{name}").plugin_data.content
    return HParamsPluginData.FromString(content)


def test_a_metric_is_left_out_until_it_changes_unless_a_chart_shows_it(events):
    logged = events.Tags()["scalars"]
    found = {name: {one.step: one.value for one in events.Scalars(name)} if name in logged else {} for name in SCALARS}
    assert found == SCALARS
    for name in logged:
        steps = [one.step for one in events.Scalars(name)]
        assert steps == sorted(steps), name
    assert not [name for name in logged if name.startswith("health/")]
    assert [event.step for event in events.Histograms("advantages/histogram")] == [1, 2, 3]


def test_the_charts_are_those_of_the_report_in_groups(events):
    layout = Layout.FromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    groups = {}
    for category in layout.category:
        groups[category.title] = {chart.title: chart.multiline.tag for chart in category.chart}
    policy = ("Policy", "Examples", "Optimizer", "Value")
    assert list(groups) == ["Reward and responses", *policy, "Engine", "Speed", "Memory"]

    def shown(group: str, title: str) -> list[str]:
        tags = [re.compile(tag) for tag in groups[group][title]]
        return [name for name in events.Tags()["scalars"] if any(tag.match(name) for tag in tags)]

    assert shown("Reward and responses", "Reward") == ["reward/score/mean"]
    assert shown("Reward and responses", "Held out") == ["val/sums/mean@4"]
    assert shown("Reward and responses", "Held out, pass") == ["val/sums/pass@4"]
    assert shown("Value", "Value loss") == ["critic/vf_loss"]


def test_responses_are_texts_that_markdown_shows_as_they_are(events):
    held_out = text_of(events, "val/sums/samples")
    assert "    response: two\n\n    lines\n" in held_out and "    response: r2" in held_out
    training = text_of(events, "training/samples")
    assert training.count("    prompt: <b>7*7</b>") == 16 and "    score: 1.0" in training


def test_settings_stand_beside_the_last_scores(events):
    session = plugin_data(events, "session_start_info").session_start_info
    values = {name: value.number_value or value.string_value for name, value in session.hparams.items()}
    assert values == {"actor.optim.lr": 1e-6, "actor.use_kl_loss": "", "data.train_files": '["a.jsonl"]'}
    experiment = plugin_data(events, "experiment").experiment
    assert [metric.name.tag for metric in experiment.metric_infos] == ["reward/score/mean", "val/sums/mean@4"]
    assert plugin_data(events, "session_end_info").session_end_info.status == 1  # success


def test_a_new_run_keeps_the_files_of_the_one_before(tmp_path):
    for lr in (1e-6, 2e-6):
        observer = observer_in(tmp_path, lr=lr)
        log(observer, 1)
        observer.end(RunEnd())
    [earlier] = tmp_path.glob("tensorboard-*")
    for folder, lr in ((earlier, 1e-6), (tmp_path / "tensorboard", 2e-6)):
        session = plugin_data(EventAccumulator(str(folder)).Reload(), "session_start_info").session_start_info
        assert session.hparams["actor.optim.lr"].number_value == lr

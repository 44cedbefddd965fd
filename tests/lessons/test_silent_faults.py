"""Faults that train a critic or a policy wrongly and raise nothing: each is made on purpose, and what
docs/critic.md names shows it.

A run is made small: a linear critic learns the scores of a policy that never changes. Advantages, losses, metrics and
health rules are the program's. The other faults of that page are in the other files of this folder.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ppo_engines import at_owners
from spawn import run_ranks
from torch import Tensor

from megappo.batch.exchange import Exchange
from megappo.batch.rows import Rows
from megappo.config.checks import config_errors, config_warnings
from megappo.config.schema import Config
from megappo.lab.report.health import Health
from megappo.observe.metrics import merge_metrics, on_host
from megappo.ppo.kl import KLController
from megappo.ppo.reward_shaping import RunningMoments
from megappo.trainer import experience, objectives
from megappo.trainer.objectives import ActorLoss, critic_loss

PROMPTS, RESPONSES, WIDTH = 12, 4, 8
STEPS, UPDATES, MICRO_BATCH = 8, 4, 16
TEMPERATURE = 2.0

Steps = list[dict[str, Any]]


@dataclass(frozen=True)
class Fault:
    """A fault, and a condition of the steps of a run with it and of a healthy one.

    Attributes:
        settings: config keys.
        rows: what is done to a step's rows as the forward passes return them.
        patches: (module, name, function that is made of the one there).
        start: scale of the critic's initial weights.
    """

    shows: Callable[[Steps, Steps], bool]
    settings: Mapping[str, Any] = field(default_factory=dict)
    rows: Callable[[Rows], Rows] = lambda rows: rows
    patches: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = ()
    start: float = 1.0


def nested(settings: Mapping[str, Any]) -> Config:
    """Return a config with these dotted keys."""
    values: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"train_files": ["f"]},
        "trainer": {"output_dir": "o"},
        "critic": {"value_clip": None, "optim": {"lr": 0.08}},
        "algorithm": {"lam": 1.0, "kl_ctrl": {"kl_coef": 0.001}},
    }
    for key, value in settings.items():
        *sections, name = key.split(".")
        section = values
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    return Config.model_validate(values)


def sampled(step: int) -> tuple[Rows, Tensor]:
    """Return the rows of a step, and what the critic sees of them before each token, [B, R, 4].

    At each token some prompts' responses go wrong more often than others'; a wrong token makes the score 0.
    """
    generator = torch.Generator().manual_seed(step)
    ids = torch.arange(PROMPTS * RESPONSES)
    lengths = torch.randint(4, WIDTH + 1, ids.shape, generator=generator)
    place = torch.arange(WIDTH)
    mask = (place < lengths[:, None]).float()
    hardness = ids // RESPONSES / PROMPTS
    is_wrong = (torch.rand(mask.shape, generator=generator) < 0.02 + 0.3 * hardness[:, None]).float() * mask
    has_failed = (is_wrong.cumsum(1) - is_wrong > 0).float()
    seen = torch.stack(
        [torch.ones_like(mask), hardness[:, None] - 0.5 + 0 * mask, has_failed, place / WIDTH + 0 * mask]
    )
    old = -torch.rand(mask.shape, generator=generator) * mask
    fields = {
        "response_mask": mask,
        "old_log_probs": old,
        "rollout_log_probs": old,
        "ref_log_probs": old - 0.1 * mask,
        "scores": 1 - is_wrong.amax(1),
        "truncated": torch.zeros(len(ids)),
    }
    tokens = torch.randint(91, (int((1 + lengths).sum()),), generator=generator)
    return Rows(ids, ids // RESPONSES, torch.ones_like(ids), lengths, tokens, fields), seen.permute(1, 2, 0)


def train(fault: Fault) -> Steps:
    """Return the metrics of each step of a run."""
    config, exchange = nested(fault.settings), Exchange(dist.group.WORLD)
    progress = SimpleNamespace(kl=KLController(config.algorithm.kl_ctrl), reward_moments=RunningMoments())
    weight = torch.tensor([0.5, -0.3, 0.4, 0.3]).mul(fault.start).requires_grad_()
    optimizer, health, steps = torch.optim.Adam([weight], lr=config.critic.optim.lr), Health(config.model_dump()), []
    with pytest.MonkeyPatch.context() as patch:
        for module, name, make in fault.patches:
            patch.setattr(module, name, make(getattr(module, name)))
        for step in range(1, STEPS + 1):
            rows, seen = sampled(step)
            values = (seen @ weight.detach()) * rows.response_mask
            rows = fault.rows(replace(rows, fields=rows.fields | {"values": values}))
            found = experience.add_advantages(config, exchange, progress, step, at_owners(exchange, rows), {})
            rows, metrics = found.batch.rows, found.metrics
            for _ in range(UPDATES):
                updated = update(config, rows, seen, weight)
                optimizer.step()
                metrics |= {name: metrics.get(name, 0.0) + value / UPDATES for name, value in updated.items()}
            metrics |= of_actor(config, rows)
            steps.append(metrics | health.check(step, metrics)[0])
    return steps


def update(config: Config, rows: Rows, seen: Tensor, weight: Tensor) -> dict[str, float]:
    """Compute the gradient of a mini-batch in micro-batches; return the metrics."""
    weight.grad = torch.zeros_like(weight)
    loss_fn, parts = critic_loss(config, int(rows.response_mask.sum()), len(rows)), []
    for start in range(0, len(rows), MICRO_BATCH):
        part = range(start, start + MICRO_BATCH)
        loss, metrics = loss_fn({"values": seen[start : start + MICRO_BATCH] @ weight}, rows.select(part))
        loss.backward()
        parts.append(metrics)
    found = {name: metric.value for name, metric in merge_metrics(on_host(parts)).items()}
    return found | {"critic/grad_norm": float(weight.grad.norm())}


def of_actor(config: Config, rows: Rows) -> dict[str, float]:
    """Return the metrics of the policy that wrote the rows, after an update has moved it a little."""
    log_probs = (rows.fields["rollout_log_probs"] + 0.01).requires_grad_()
    outputs = {"log_probs": log_probs, "entropy": torch.ones_like(log_probs)}
    _, metrics = ActorLoss(config, int(rows.response_mask.sum()), len(rows))(outputs, rows)
    return {name: metric.value for name, metric in on_host([metrics])[0].items() if not name.endswith("histogram")}


def rule(name: str) -> Callable[[Steps, Steps], bool]:
    """Return a condition: a health rule holds in some step."""
    return lambda steps, healthy: any(step.get(f"health/{name}") for step in steps)


def late(steps: Steps, name: str) -> float:
    """Return the mean of a metric over the last three steps."""
    return sum(step[name] for step in steps[-3:]) / 3


def above(name: str, least: float) -> Callable[[Steps, Steps], bool]:
    """Return a condition: the last steps' metric is above a number, or below if the number is negative."""
    return lambda steps, healthy: math.copysign(1, least) * late(steps, name) > abs(least)


def with_fields(**changes: Callable[[Mapping[str, Tensor]], Tensor]) -> Callable[[Rows], Rows]:
    """Return a function of rows that computes some of their fields from all."""
    return lambda rows: replace(rows, fields=rows.fields | {name: make(rows.fields) for name, make in changes.items()})


def without_normaliser(shared: Callable[..., dict]) -> Callable[..., dict]:
    return lambda *args: shared(*args) | {"normaliser": None}


def detached(value_loss: Callable) -> Callable:
    return lambda values, *args, **options: value_loss(values.detach() + 0 * values, *args, **options)


def over_padding(whiten: Callable) -> Callable:
    return lambda x, mask, **options: whiten(x, torch.ones_like(mask), **options) * mask


def on_last_column(rewards: Callable) -> Callable:
    def scored(scores: Tensor, mask: Tensor, *args: Any) -> Tensor:
        found = rewards(torch.zeros_like(scores), mask, *args)
        found[:, -1] += scores
        return found

    return scored


FAULTS = {
    "averaged per micro-batch": Fault(
        lambda steps, healthy: steps[0]["critic/vf_loss"] > 2 * healthy[0]["critic/vf_loss"],
        patches=((objectives, "_shared", without_normaliser),),
    ),
    "values divided by the temperature": Fault(
        above("critic/vf_slope", 1.5), rows=with_fields(values=lambda fields: fields["values"] / TEMPERATURE)
    ),
    "values clipped too narrowly": Fault(above("critic/vf_clipfrac", 0.3), {"critic.value_clip": 1e-4}),
    "the KL penalty outweighs the scores": Fault(rule("return_drift"), {"algorithm.kl_ctrl.kl_coef": 10.0}),
    "bootstrapping from values that are far off": Fault(
        rule("return_drift"), {"algorithm.critic_lam": 0.0}, start=20.0
    ),
    "values of another scale at the start": Fault(rule("value_range"), start=20.0),
    "a critic without a gradient": Fault(
        lambda steps, healthy: late(steps, "critic/grad_norm") == 0.0,
        patches=((objectives, "value_loss", detached),),
    ),
    "values of other rows": Fault(
        above("critic/vf_separation", -0.02), rows=with_fields(values=lambda fields: fields["values"].flip(0))
    ),
    "values masked by other rows": Fault(
        above("critic/vf_part/3/vf_bias", -0.1),
        rows=with_fields(values=lambda fields: fields["values"] * fields["response_mask"].flip(0)),
    ),
    "the score is not on the policy's last token": Fault(
        lambda steps, healthy: late(steps, "returns/mean") < 0.5 * late(steps, "reward/shaped/mean"),
        patches=((experience, "compute_token_level_rewards", on_last_column),),
    ),
    "whitened over padding": Fault(
        lambda steps, healthy: max(abs(step["advantages/mean"]) for step in steps) > 1e-3,
        patches=((experience, "whiten", over_padding),),
    ),
    "no score fits the labels": Fault(
        rule("no_reward_signal"), rows=with_fields(scores=lambda fields: 0 * fields["scores"])
    ),
    "responses are cut off": Fault(
        rule("truncation"), rows=with_fields(truncated=lambda fields: 0 * fields["truncated"] + 1)
    ),
    "log-probs at another temperature": Fault(
        above("rollout/log_prob_diff/mean", 0.05),
        rows=with_fields(old_log_probs=lambda fields: fields["old_log_probs"] / TEMPERATURE),
    ),
    "old log-probs of another policy": Fault(
        rule("ratio"), rows=with_fields(old_log_probs=lambda fields: fields["old_log_probs"] - 0.5)
    ),
}


def check_fault(rank: int, world_size: int, name: str, healthy_file: Path) -> None:
    fault, healthy = FAULTS[name], json.loads(healthy_file.read_text())
    steps = train(fault)
    assert fault.shows(steps, healthy), steps[-1]
    assert not fault.shows(healthy, healthy), healthy[-1]


def write_healthy(rank: int, world_size: int, file: Path) -> None:
    steps = train(Fault(rule("")))
    numbers = [{name: value for name, value in step.items() if isinstance(value, float | int)} for step in steps]
    file.write_text(json.dumps(numbers))


@pytest.fixture(scope="module")
def healthy_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with the steps of a run without a fault."""
    file = tmp_path_factory.mktemp("healthy") / "steps.json"
    run_ranks(1, write_healthy, file)
    return file


def test_nothing_shows_in_a_healthy_run(healthy_file: Path) -> None:
    steps = json.loads(healthy_file.read_text())
    checked = [(name, holds) for step in steps for name, holds in step.items() if name.startswith("health/")]
    assert len(checked) > 5 * STEPS and not [name for name, holds in checked if holds]
    assert late(steps, "critic/vf_explained_var") > 0.25 and abs(late(steps, "critic/vf_bias")) < 0.1


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_shows(name: str, healthy_file: Path) -> None:
    run_ranks(1, check_fault, name, healthy_file)


def errors(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield what `plan` reports of a config."""
    config = nested(settings)
    yield from config_errors(config)
    yield from config_warnings(config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"algorithm.adv_estimator": "rloo", "rollout.n": 2, "critic.ppo_epochs": 2},
            "critic.ppo_epochs 2 has no effect",
        ),
        ({"critic.optim.lr": 0.5}, "critic.optim.lr 0.5 is unusual: Adam takes 1e-7 to 1e-4"),
        ({"algorithm.gamma": 0.5}, "algorithm.gamma 0.5 is unusual: a reward is forgotten within some tokens"),
        ({"actor.use_kl_loss": True}, "actor.use_kl_loss true is unusual"),
        (
            {"rollout.top_p": 0.9, "algorithm.rollout_correction.level": "token"},
            "rollout.top_p 0.9 is unusual with the engine's log-probs",
        ),
        (
            {"rollout.top_k": 50, "algorithm.old_log_probs": "engine"},
            "rollout.top_k 50 is unusual with the engine's log-probs",
        ),
    ],
)
def test_a_config_that_trains_otherwise_than_it_reads_is_reported(settings: Mapping[str, Any], message: str) -> None:
    before, found = set(errors({})), set(errors(settings))
    assert [line for line in found - before if line.startswith(message)]


def check_not_finite(rank: int, world_size: int) -> None:
    broken = with_fields(scores=lambda fields: fields["scores"] / fields["scores"])
    with pytest.raises(FloatingPointError, match="scores of responses"):
        train(Fault(rule(""), rows=broken))


def test_a_score_that_is_no_number_is_an_error() -> None:
    run_ranks(1, check_not_finite)

"""The same batch gives the same update in every layout and split: scattered, forward pass, update, as in a step of PPO.

tests/models/test_train_engine.py compares single steps with Hugging Face; here one rank is the measure of all layouts.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ppo_engines import (
    OPTIM,
    SPEC,
    Case,
    at_owners,
    exported,
    make_config,
    make_engine,
    make_rows,
    with_score,
)
from spawn import run_ranks
from tiny_models import hf_folder

from megappo.architecture.parsing import read_architecture
from megappo.batch.exchange import Batch, Exchange
from megappo.config.schema import Config
from megappo.observe.loggers import Histogram
from megappo.placement.components import components_of
from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout
from megappo.ppo.conventions import PRESETS
from megappo.trainer.component_batch import Component
from megappo.trainer.statistics import merge_optimizer_steps, training_metrics
from megappo.trainer.update import update_actor, update_critic

LENGTHS = ((3, 4), (3, 6), (5, 1), (5, 2), (4, 5), (4, 3), (2, 2), (2, 7), (1, 1), (1, 3), (6, 2), (6, 6))
ROWS_PER_PROMPT, MINI_BATCHES, EPOCHS = 2, 3, 2
FOUR = (0, 1, 2, 3)
NOT_SHARDED = OPTIM.model_copy(update={"distributed": False})
ONE_RANK = "one rank"
CASES = {
    ONE_RANK: Case(Layout((0,))),
    "one rank, small micro-batches": Case(Layout((3,)), max_tokens=12),
    "dp2": Case(Layout((1, 2)), max_tokens=20),
    "dp2, optimizer not sharded": Case(Layout((1, 2)), optim=NOT_SHARDED),
    "tp2": Case(Layout((0, 2), tensor=2), max_tokens=16),
    "pp2": Case(Layout((1, 3), pipeline=2), max_tokens=12),
    "tp2 dp2 sp": Case(Layout(FOUR, tensor=2), sequence=True, max_tokens=20),
    "pp2 vpp2": Case(Layout((0, 3), pipeline=2, virtual_pipeline=2), max_tokens=12),
    "tp2 pp2 vpp2 sp": Case(Layout(FOUR, tensor=2, pipeline=2, virtual_pipeline=2), sequence=True, max_tokens=20),
    "pp2 dp2": Case(Layout(FOUR, pipeline=2), max_tokens=12),
    "tp2 pp2": Case(Layout(FOUR, tensor=2, pipeline=2), max_tokens=30),
    "dp4": Case(Layout(FOUR)),
}
SHOWN = ("one rank, small micro-batches", "dp2", "tp2 pp2 vpp2 sp", "pp2 dp2", "dp4")
"""Each way of cutting once; tests/models/test_train_engine.py has every layout."""
METHODS = {
    "clip_cov": {"policy_loss": "clip_cov", "clip_cov_ratio": 0.2, "clip_cov_lb": 0.0},
    "kl_cov": {"policy_loss": "kl_cov", "kl_cov_ratio": 0.2},
    "target_kl": {"target_kl": 1e-3, "loss_agg_mode": "seq-mean-token-mean"},
}
"""Settings of the actor, on top of the defaults."""


def update(component: Component, batch: Batch, method: str | None) -> dict[str, float]:
    """Update a component as a step of PPO does; return the update's metrics, on every rank."""
    kind = component.name
    scattered, config = component.scatter(batch, MINI_BATCHES), make_config(kind, EPOCHS)
    actor = config.actor.model_copy(update=METHODS[method] if method else {})
    config = config.model_copy(update={"actor": actor})
    names = {"log_probs": "old_log_probs"} if kind == "actor" else {"values": "values"}
    names = {"log_probs": "old_log_probs", "values": "values"} if kind == "shared" else names
    batch = scattered.gather(scattered.forward(), names, batch)
    fields = components_of(config)["critic" if kind == "critic" else "actor"].training.fields
    scattered.scatter_fields(batch, fields)
    (update_critic if kind == "critic" else update_actor)(scattered, config)
    steps = component.exchange.all_gather(scattered.optimizer_steps)
    metrics = training_metrics(merge_optimizer_steps(steps, component.name), component.name)
    # Rounding moves numbers from one bucket to the next.
    return {name: value for name, value in metrics.items() if not isinstance(value, Histogram)}


def check_updates(
    rank: int, world_size: int, folder: Path, kind: str, method: str | None, cases: dict[str, Case]
) -> None:
    exchange = Exchange(dist.group.WORLD)
    architecture = read_architecture(folder)
    batch = at_owners(exchange, make_rows(architecture.vocab_size, LENGTHS, ROWS_PER_PROMPT))
    groups = build_groups({name: case.layout for name, case in cases.items()}, seed=0)
    before, expected = {}, ()
    for name, case in cases.items():
        engine = make_engine(folder, case, groups[name], kind) if groups[name].member else None
        before = exported(engine, architecture, kind) if name == ONE_RANK and engine else before
        metrics = update(Component(kind, SPEC, case.layout, exchange, engine), batch, method)
        weights = exported(engine, architecture, kind) if engine else None
        expected = expected or (exchange.all_gather(weights)[0], metrics)
        assert_same(name, weights or expected[0], expected[0])
        assert metrics == pytest.approx(expected[1], rel=1e-4, abs=2e-6), name
    if rank == 0:
        assert_moved(before, expected[0])
        assert_method(method, expected[1])


def assert_same(name: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        message = f"{name}: {key} differs from one rank's by {(found[key] - tensor).abs().max():.2g}"
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-5, msg=message)


def assert_moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    """The update is large enough to be compared."""
    assert all((after[key] - before[key]).abs().max() > 1e-3 for key in before)


def assert_method(method: str | None, metrics: dict[str, float]) -> None:
    """It clips, selects and stops as it should."""
    num_steps = next(value for name, value in metrics.items() if name.endswith("num_optimizer_steps"))
    clipped = [value for name, value in metrics.items() if name.endswith(("pg_clipfrac", "vf_clipfrac"))]
    if method == "target_kl":
        assert 1 < num_steps < MINI_BATCHES * EPOCHS
    else:
        assert num_steps == MINI_BATCHES * EPOCHS
        assert clipped and (min(clipped) > 0) == (method != "kl_cov")


KINDS_AND_METHODS = [("actor", None), ("critic", None), ("shared", None), *(("actor", method) for method in METHODS)]


def check_layouts(kind: str, method: str | None, tmp_path: Path, cases: dict[str, Case]) -> None:
    folder = hf_folder(tmp_path / "hf", "qwen2", tie_word_embeddings=kind != "critic")
    run_ranks(4, check_updates, folder if kind == "actor" else with_score(folder), kind, method, cases)


@pytest.mark.parametrize(("kind", "method"), KINDS_AND_METHODS[:3])
def test_layouts_and_micro_batch_sizes_update_alike(kind: str, method: str | None, tmp_path: Path) -> None:
    check_layouts(kind, method, tmp_path, {name: CASES[name] for name in (ONE_RANK, *SHOWN)})


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "method"), KINDS_AND_METHODS)
def test_every_layout_and_micro_batch_size_updates_alike(kind: str, method: str | None, tmp_path: Path) -> None:
    check_layouts(kind, method, tmp_path, CASES)


def check_divisors(rank: int, world_size: int, folder: Path) -> None:
    """At the old policy a sequence's loss is minus the mean of its advantages, and its value loss a plain error."""
    exchange = Exchange(dist.group.WORLD)
    rows = make_rows(read_architecture(folder).vocab_size, LENGTHS)
    masked = [1, 4, 5, 8]  # rows
    mask = rows.response_mask.clone()
    mask[masked] = 0.0
    batch = at_owners(exchange, replace(rows, fields=rows.fields | {"response_mask": mask}))
    layout = Layout((0, 1))
    engine = make_engine(folder, Case(layout), build_groups({"actor": layout}, seed=0)["actor"], "actor")
    means = [float((rows.fields["advantages"][i] * mask[i]).sum() / mask[i].sum()) for i in range(12) if mask[i].any()]
    for preset in (None, *PRESETS):
        scattered, config = Component("actor", SPEC, layout, exchange, engine).scatter(batch), make_config("actor")
        settings = {"loss_agg_mode": "seq-mean-token-mean", "entropy_coeff": 0.0}
        actor = config.actor.model_copy(update=settings)
        algorithm = config.algorithm.model_copy(update={"preset": preset})
        config = config.model_copy(update={"actor": actor, "algorithm": algorithm})
        owned = scattered.gather(scattered.forward(), {"log_probs": "old_log_probs"}, batch)
        scattered.scatter_fields(owned, ["advantages", "old_log_probs"])
        update_actor(scattered, config)
        steps = exchange.all_gather(scattered.optimizer_steps)
        found = training_metrics(merge_optimizer_steps(steps, "actor"), "actor")
        divisor = 12 if preset in ("verl", "slime", "miles") else 12 - len(masked)
        assert found["actor/pg_loss"] == pytest.approx(-sum(means) / divisor, rel=1e-4), preset


def test_presets_divide_by_the_samples_that_their_systems_divide_by(tmp_path: Path) -> None:
    """verl by ppo_mini_batch_size x rollout.n, slime and miles by the global batch size; OpenRLHF and NeMo-RL, as
    megappo, by the samples that have a token."""
    run_ranks(2, check_divisors, hf_folder(tmp_path / "hf", "qwen2"))


def check_only_update(rank: int, world_size: int, folder: Path, cases: dict[str, Case]) -> None:
    """Old log-probs of a pass before the step's only update, and old log-probs of the update itself."""
    exchange = Exchange(dist.group.WORLD)
    architecture = read_architecture(folder)
    config = make_config("actor")
    without_pass = config.model_copy(
        update={"algorithm": config.algorithm.model_copy(update={"use_kl_in_reward": False})}
    )
    assert (config.old_log_probs, without_pass.old_log_probs) == ("trainer", "update")
    every = make_rows(architecture.vocab_size, LENGTHS, ROWS_PER_PROMPT)
    del every.fields["old_log_probs"]
    batch = at_owners(exchange, every)
    groups = build_groups({name: case.layout for name, case in cases.items()}, seed=0)
    for name, case in cases.items():
        found = []
        for one in (config, without_pass):
            engine = make_engine(folder, case, groups[name], "actor") if groups[name].member else None
            shard = Component("actor", SPEC, case.layout, exchange, engine).scatter(batch)
            outputs = shard.forward()
            owned = batch if one is without_pass else shard.gather(outputs, {"log_probs": "old_log_probs"}, batch)
            shard.scatter_fields(owned, components_of(one)["actor"].training.fields)
            update_actor(shard, one)
            if one is without_pass:
                owned = shard.gather(shard.outputs, {"log_probs": "old_log_probs"}, batch)
            steps = merge_optimizer_steps(exchange.all_gather(shard.optimizer_steps), "actor")
            weights = exported(engine, architecture, "actor") if engine else {}
            found.append((owned.rows.fields["old_log_probs"], weights, steps[0]["actor/pg_loss"].value))
        (expected, weights, loss), (old, same_weights, same_loss) = found
        torch.testing.assert_close(old, expected, rtol=0, atol=1e-6)
        assert_same(name, same_weights, weights)
        assert same_loss == pytest.approx(loss, abs=1e-6)


def test_the_only_update_of_a_step_needs_no_pass_before_it(tmp_path: Path) -> None:
    cases = {name: CASES[name] for name in (ONE_RANK, "dp2", "tp2 pp2 vpp2 sp")}
    run_ranks(4, check_only_update, hf_folder(tmp_path / "hf", "qwen2"), cases)


ONE_UPDATE = {"adv_estimator": "grpo", "use_kl_in_reward": False}


@pytest.mark.parametrize(
    ("expected", "algorithm", "sections"),
    [
        ("update", {}, {}),
        ("update", {}, {"actor": {"use_kl_loss": True}}),
        ("engine", {"old_log_probs": "engine"}, {}),
        ("trainer", {}, {"actor": {"ppo_epochs": 2}}),
        ("trainer", {}, {"actor": {"ppo_mini_batch_size": 128}}),
        ("trainer", {"use_kl_in_reward": True}, {}),
        ("trainer", {"adv_estimator": "optimal_token_baseline"}, {}),
        ("trainer", {"rollout_correction": {"level": "token"}}, {}),
        ("trainer", {"adv_estimator": "gae"}, {"critic": {"warmup_steps": 1}}),
        ("trainer", {"adv_estimator": "gae", "shared_backbone": True}, {}),
    ],
)
def test_old_log_probs_come_from_the_update_where_nothing_needs_them_before(
    expected: str, algorithm: dict, sections: dict
) -> None:
    base = {"model": {"path": "m"}, "data": {"train_files": ["f"], "train_batch_size": 256}, "rollout": {"n": 2}}
    config = Config.model_validate(
        base | {"trainer": {"output_dir": "o"}, "algorithm": ONE_UPDATE | algorithm} | sections
    )
    assert config.old_log_probs == expected
    assert (components_of(config)["actor"].forward is not None) == (expected == "trainer")

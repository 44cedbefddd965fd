"""If a loss or gradients are not finite, no rank changes a weight; after several such optimizer steps the run ends."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ppo_engines import SPEC, Case, at_owners, exported, make_config, make_engine, make_rows
from recorder import recorder_in
from spawn import run_ranks
from tiny_models import hf_folder
from tiny_shapes import DEEPSEEK_V3

from megappo.architecture.parsing import read_architecture
from megappo.batch.exchange import Exchange, OtherRankError
from megappo.batch.rows import Rows
from megappo.batch.rows_file import RowsFile
from megappo.config.model_sections import Router
from megappo.config.schema import Config
from megappo.models.megatron_engine import Outputs
from megappo.models.routing import ModelRouting
from megappo.models.train_engine import LossFn, OptimizerStep, TrainedEngine
from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout
from megappo.recipes.ppo import ppo_step
from megappo.trainer.component_batch import Component
from megappo.trainer.objectives import ActorLoss, critic_loss
from megappo.trainer.run import Run

BROKEN_ROW = 4
INF, NAN = float("inf"), float("nan")
ONE_RANK = Case(Layout((0,)), max_tokens=9)
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}
LOSSES = {
    "gspo": ("actor", {"policy_loss": "gspo"}, {"log_probs": -INF}, "actor/pg_loss nan"),
    "cispo": ("actor", {"policy_loss": "cispo"}, {"log_probs": -INF}, "actor/pg_loss"),
    "gpg": ("actor", {"policy_loss": "gpg"}, {"log_probs": -INF}, "actor/pg_loss"),
    "k1": ("actor", KL | {"kl_loss_type": "k1"}, {"log_probs": -INF}, "actor/kl_loss -inf"),
    "k2": ("actor", KL | {"kl_loss_type": "k2"}, {"log_probs": -INF}, "actor/kl_loss inf"),
    "entropy": ("actor", {"entropy_coeff": 0.0}, {"entropy": NAN}, "loss nan|actor/entropy nan"),
    "advantages": ("actor", {}, {"advantages": NAN}, "actor/pg_loss nan"),
    "old_log_probs": ("actor", {}, {"old_log_probs": NAN}, "actor/pg_loss nan.* actor/ppo_kl nan"),
    "values": ("critic", {}, {"values": INF}, "critic/vf_loss"),
    "returns": ("critic", {}, {"returns": 1e30}, "critic/vf_loss inf"),
}
"""Kind of engine, changes of its section, values added to one token, and metrics that the error names."""


def poisoned(loss_fn: LossFn, shifts: dict[str, float]) -> LossFn:
    """The loss with something added to the first token of one row; an output keeps its gradient."""

    def broken(outputs: Outputs, rows: Rows) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        first = (rows.ids == BROKEN_ROW).nonzero().flatten()
        for name, shift in shifts.items():
            values = outputs.get(name, rows.fields.get(name))
            added = torch.zeros_like(values)
            added[first, 0] = shift
            if name in outputs:
                outputs = outputs | {name: values + added}
            else:
                rows = replace(rows, fields=rows.fields | {name: values + added})
        return loss_fn(outputs, rows)

    return broken


def loss_of(name: str, rows: Rows) -> LossFn:
    kind, changes, shifts, _ = LOSSES[name]
    config = make_config(kind)
    config = config.model_copy(update={kind: getattr(config, kind).model_copy(update=changes)})
    make = critic_loss if kind == "critic" else ActorLoss
    return poisoned(make(config, int(rows.response_lengths.sum()), len(rows)), shifts)


def with_reference(rows: Rows) -> Rows:
    return replace(rows, fields=rows.fields | {"ref_log_probs": rows.fields["old_log_probs"]})


def check_skipped(engine: TrainedEngine, folder: Path, rows: Rows, name: str, message: str) -> None:
    """The optimizer step has the reason why it is skipped, and changes no weight."""
    architecture, kind = read_architecture(folder), LOSSES[name][0]
    before = {key: tensor.clone() for key, tensor in exported(engine, architecture, kind).items()}
    step = engine.train_batch(rows, loss_of(name, make_rows(architecture.vocab_size)))
    assert re.search(message, step.skipped) and step.metrics == {}
    after = exported(engine, architecture, kind)
    assert all(torch.equal(after[key], before[key]) for key in before), "the weights have been changed"


def _one_rank(rank: int, world_size: int, folder: Path, kind: str) -> None:
    engine = make_engine(folder, ONE_RANK, build_groups({kind: ONE_RANK.layout}, seed=0)[kind], kind)
    rows = with_reference(make_rows(read_architecture(folder).vocab_size))
    for name, (of_kind, *_, named) in LOSSES.items():
        if of_kind == kind:
            check_skipped(engine, folder, rows, name, f"the loss of .* is not finite: .*({named})")
    check_gradients(engine, folder, rows, kind)


def check_gradients(engine: TrainedEngine, folder: Path, rows: Rows, kind: str) -> None:
    """Gradients that are not finite, of a loss that is finite."""
    architecture = read_architecture(folder)

    def steep(outputs: Outputs, rows: Rows) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return sum((output - output.detach()).abs().sqrt().sum() for output in outputs.values()), {}

    before = {key: tensor.clone() for key, tensor in exported(engine, architecture, kind).items()}
    assert re.fullmatch("the gradient norm is (nan|inf)", engine.train_batch(rows, steep).skipped)
    after = exported(engine, architecture, kind)
    assert all(torch.equal(after[key], before[key]) for key in before), "the weights have been changed"
    moments = [one for part in engine.optimizer.chained_optimizers for one in part.optimizer.state.values()]
    assert all(torch.isfinite(one["exp_avg"]).all() for one in moments) and moments


@pytest.mark.parametrize("kind", ["actor", "critic"])
def test_each_loss_that_is_not_finite_is_skipped(kind: str, tmp_path: Path) -> None:
    run_ranks(1, _one_rank, hf_folder(tmp_path / "hf", "qwen2"), kind)


def _router_biases(rank: int, world_size: int, folder: Path) -> None:
    engine = make_engine(folder, ONE_RANK, build_groups({"actor": ONE_RANK.layout}, seed=0)["actor"], "actor")
    found = {name: bias for name, bias in engine.chunks[0].named_buffers() if name.endswith("expert_bias")}
    before = {name: bias.clone() for name, bias in found.items()}
    engine.routing = ModelRouting(engine.chunks, engine.groups, "actor", Router(bias_update_rate=0.1), replays=False)
    rows = with_reference(make_rows(read_architecture(folder).vocab_size))
    check_skipped(engine, folder, rows, "gpg", "actor/pg_loss")
    check_gradients(engine, folder, rows, "actor")
    assert before and all(bias.any() and torch.equal(found[name], bias) for name, bias in before.items())


def test_the_biases_of_routers_stay_as_well(tmp_path: Path) -> None:
    run_ranks(1, _router_biases, hf_folder(tmp_path / "hf", "deepseek_v3", **DEEPSEEK_V3))


def _stages_and_shards(rank: int, world_size: int, folder: Path) -> None:
    case = Case(Layout((0, 1, 2, 3), pipeline=2), max_tokens=10)
    engine = make_engine(folder, case, build_groups({"actor": case.layout}, seed=0)["actor"], "actor")
    shard = case.layout.shard_of(rank)
    rows = with_reference(make_rows(read_architecture(folder).vocab_size)).select([[0, 1, 2], [3, 4, 5]][shard])
    sees_it = engine.is_output and BROKEN_ROW in rows.ids.tolist()
    if sees_it:
        check_skipped(engine, folder, rows, "gpg", "actor/pg_loss")
    else:
        check_skipped(engine, folder, rows, "gpg", "not finite on another rank")


def test_every_stage_and_shard_skips_when_one_has_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    run_ranks(4, _stages_and_shards, hf_folder(tmp_path / "hf", "qwen2"))


def _broken_model(rank: int, world_size: int, folder: Path) -> None:
    rows = make_rows(read_architecture(folder).vocab_size)
    exchange = Exchange(dist.group.WORLD)
    groups = build_groups(dict.fromkeys(("actor", "critic"), ONE_RANK.layout), seed=0)
    for kind, output in (("actor", "log_probs"), ("critic", "values")):
        engine = make_engine(folder, ONE_RANK, groups[kind], kind)
        component = Component(kind, SPEC, ONE_RANK.layout, exchange, engine)
        scattered = component.scatter(at_owners(exchange, rows))
        assert output in scattered.forward()
        with torch.no_grad():
            engine.chunks[0].decoder.final_layernorm.weight[0] = NAN
        with pytest.raises(FloatingPointError, match=f"the {kind}'s {output} are not finite: .*, the first is nan"):
            scattered.forward()


def test_outputs_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    run_ranks(1, _broken_model, hf_folder(tmp_path / "hf", "qwen2"))


def poisoned_calls(rank: int, numbers: tuple[int, ...]) -> Callable:
    """`train_batch` whose actor's calls of these numbers, from 1 on, have a NaN in the gradient of rank 0."""
    plain, calls = TrainedEngine.train_batch, []

    def called(engine: TrainedEngine, rows: Rows, loss: LossFn) -> OptimizerStep:
        calls.extend([engine] * isinstance(loss, ActorLoss))

        def nan_loss(outputs: Outputs, rows: Rows) -> tuple[torch.Tensor, dict]:
            value, metrics = loss(outputs, rows)
            return value * NAN, metrics

        is_poisoned = isinstance(loss, ActorLoss) and len(calls) in numbers and rank == 0
        return plain(engine, rows, nan_loss if is_poisoned else loss)

    return called


def check_the_count_goes_on(bench: ModuleType, run: Run) -> None:
    """The count of steps skipped in a row is saved and restored."""
    engine = run.models.trained["actor"]
    if engine is not None:
        engine.skipped_in_a_row = 2
    run.save()
    again = bench.build(run.config)
    again.progress.restore(again.models)
    found = {name: one.skipped_in_a_row for name, one in again.models.trained.items() if one is not None}
    assert found == {name: {"actor": 2, "critic": 0}[name] for name in found}
    if engine is not None:
        engine.skipped_in_a_row = 0


def _in_a_row(rank: int, world_size: int, folder: Path) -> None:
    bench = recorder_in(folder)
    changes = {"trainer": {"output_dir": str(folder), "max_bad_steps": 2}}
    layout = bench.LAYOUTS["actor tp2, critic pp2"]
    config = Config.model_validate(bench.merged(bench.settings(folder), layout, changes))
    run = bench.build(config)
    in_the_way = folder / "bad_steps" / "step_00000001_actor_0003_rank_0.safetensors"
    in_the_way.mkdir(parents=True, exist_ok=True)  # what cannot be kept ends no run
    with patch.object(TrainedEngine, "train_batch", poisoned_calls(rank, (2, 3, 6, 7, 8))):
        metrics = ppo_step(run, 1)
        assert (metrics["actor/skipped_steps"], metrics["actor/num_optimizer_steps"]) == (2, 2)
        assert metrics["critic/skipped_steps"] == 0 and math.isfinite(metrics["actor/pg_loss"])
        files = sorted((folder / "bad_steps").iterdir())
        assert [file.name for file in files] == [f"step_00000001_actor_000{i}_rank_0.safetensors" for i in (2, 3)]
        with RowsFile(files[0]) as file:
            assert "advantages" in file.names and "nan" in file.facts["reason"]
        check_the_count_goes_on(bench, run)
        # Ranks 2 and 3 have no actor; they would wait for the others.
        expected = (FloatingPointError, OtherRankError, ZeroDivisionError, ZeroDivisionError)[rank]
        with patch.object(Run, "end_updates", side_effect=ZeroDivisionError), pytest.raises(expected) as error:
            ppo_step(run, 2)
        assert rank or "(3 times in a row, trainer.max_bad_steps is 2)" in str(error.value)


def test_some_are_skipped_and_counted_and_too_many_in_a_row_end_the_run(tmp_path: Path) -> None:
    run_ranks(4, _in_a_row, tmp_path, timeout=60)


def _not_saved(rank: int, world_size: int, folder: Path) -> None:
    bench = recorder_in(folder)
    changes = {"trainer": {"output_dir": str(folder)}}
    config = Config.model_validate(bench.merged(bench.settings(folder), bench.LAYOUTS["tp2 dp2 sp"], changes))
    run = bench.build(config)
    run.save()
    if rank == 3:
        with torch.no_grad():
            run.models.trained["critic"].chunks[0].decoder.final_layernorm.weight[2] = INF
    error, message = (
        FloatingPointError,
        "^the critic's decoder.final_layernorm.weight holds values that are not finite",
    )
    with pytest.raises(error if rank == 3 else OtherRankError, match=message if rank == 3 else "rank 3 failed"):
        run.save()
    assert (folder / "checkpoints" / "latest").read_text() == "step_00000000\n"


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    run_ranks(4, _not_saved, tmp_path, timeout=60)

"""From a checkpoint training goes on as if never stopped, in any layout."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from commands import assert_equal
from component_engines import build, train, weights
from megatron.core import dist_checkpointing
from ppo_engines import OPTIM, Case
from saved import load_checkpoint, save_checkpoint
from spawn import run_ranks
from tiny_models import hf_folder
from tiny_shapes import MIXTURES

from megappo.batch.exchange import Exchange
from megappo.checkpoint.store import CheckpointStore
from megappo.placement.layout import Layout

OPTIM = OPTIM.model_copy(update={"lr_warmup_steps": 2, "lr_decay_style": "cosine", "min_lr": 1e-3})
TWO = (0, 1)
TP2 = Case(Layout(TWO, tensor=2), optim=OPTIM)
PP2 = Case(Layout(TWO, pipeline=2), optim=OPTIM)
VPP2 = replace(PP2, layout=Layout(TWO, pipeline=2, virtual_pipeline=2))
DP2 = Case(Layout(TWO), optim=OPTIM)  # shards the optimizer's state
CP2 = Case(Layout(TWO, context=2), optim=OPTIM, max_tokens=20)  # shards the optimizer's state as well
EP2 = Case(Layout(TWO, expert=2), optim=OPTIM, max_tokens=12)
ETP2 = Case(Layout(TWO, expert_tensor=2), optim=OPTIM, max_tokens=12)
ONE = Case(Layout((1,)), optim=OPTIM)


def check_resumed(rank: int, world_size: int, folders: dict[str, Path], store_folder: Path) -> None:
    cases = {"actor": TP2, "critic": PP2}
    store = CheckpointStore(store_folder, 0, Exchange(dist.group.WORLD))
    assert store.latest() is None
    engines = build(folders, cases)
    train(engines, 3)
    save_checkpoint(store, 3, engines, {"step": 3, "kl": {"value": 0.125}})
    saved = weights(engines, folders)
    metrics, expected = train(engines, 2), weights(engines, folders)
    again = build(folders, cases)
    path = store.latest()
    assert path == store_folder / "step_00000003"
    assert load_checkpoint(store, path, again) == {"step": 3, "kl": {"value": 0.125}}
    assert_equal(weights(again, folders), saved)
    assert train(again, 2) == metrics
    assert_equal(weights(again, folders), expected)
    assert metrics["actor/lr"] < OPTIM.lr, "the schedule must be on its way for this test to see it"


def test_actor_and_critic_of_different_layouts_go_on_bit_for_bit(folders: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(2, check_resumed, folders, tmp_path / "checkpoints")


def check_new_settings(rank: int, world_size: int, folders: dict[str, Path], store_folder: Path) -> None:
    store = CheckpointStore(store_folder, 0, Exchange(dist.group.WORLD))
    old = build(folders, {"actor": TP2, "critic": DP2})
    train(old, 3)
    save_checkpoint(store, 3, old, {})
    optim = OPTIM.model_copy(update={"lr": 3e-3, "min_lr": 3e-3, "betas": (0.5, 0.6), "lr_decay_style": "linear"})
    resumed = build(folders, {"actor": replace(TP2, optim=optim), "critic": replace(DP2, optim=optim)})
    store.load(store.latest(), resumed)
    metrics = train(resumed, 1)
    for kind, engine in resumed.items():
        assert metrics[f"{kind}/lr"] == pytest.approx(3e-3)
        assert {tuple(group["betas"]) for group in engine.optimizer.param_groups} == {(0.5, 0.6)}
    assert train(old, 1)["actor/lr"] > 6e-3, "the checkpoint's settings must differ for this test to see them"


def test_a_resumed_run_takes_the_optimizer_settings_of_its_config(folders: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(2, check_new_settings, folders, tmp_path / "checkpoints")


MOVES = {
    "actor, tp2 to pp2": (TP2, PP2),
    "actor, stages of 3 and 1 to pp2": (replace(PP2, split=(3, 1)), PP2),
    "actor, dp2 to stages of 1 and 3": (DP2, replace(PP2, split=(1, 3))),
    "actor, dp2 to tp2": (DP2, TP2),
    "actor, one rank to dp2": (ONE, DP2),
    "actor, pp2 vpp2 to one rank": (VPP2, ONE),
    "actor, pp2 vpp2 to dp2": (VPP2, DP2),
    "actor, tp2 to pp2 vpp2": (TP2, VPP2),
    "critic, pp2 vpp2 to pp2": (VPP2, PP2),
    "critic, pp2 to pp2 vpp2": (PP2, VPP2),
    "critic, pp2 to tp2": (PP2, TP2),
    "critic, tp2 to dp2": (TP2, DP2),
    "critic, tp2 sp to one rank": (replace(TP2, sequence=True), ONE),
    "critic, dp2 to one rank": (DP2, ONE),
    "actor, cp2 to one rank": (CP2, ONE),
    "actor, tp2 to cp2": (TP2, CP2),
    "critic, cp2 to dp2": (CP2, DP2),
}


EXPERT_MOVES = {
    "actor, ep2 to tp2 sp": (EP2, replace(TP2, sequence=True)),
    "actor, tp2 sp to ep2": (replace(TP2, sequence=True), EP2),
    "actor, ep2 to pp2": (EP2, PP2),
    "actor, one rank to tp2 ep2 sp": (ONE, Case(Layout(TWO, tensor=2, expert=2), sequence=True, optim=OPTIM)),
    "actor, dp2 to ep2": (DP2, EP2),
    "actor, ep2 to one rank": (EP2, ONE),
    "actor, etp2 to ep2": (ETP2, EP2),
    "actor, tp2 etp2 sp to one rank": (
        Case(Layout(TWO, tensor=2, expert_tensor=2), sequence=True, optim=OPTIM),
        ONE,
    ),
    "actor, dp2 to tp2 etp2 sp": (DP2, Case(Layout(TWO, tensor=2, expert_tensor=2), sequence=True, optim=OPTIM)),
    "actor, ep2 to etp2": (EP2, ETP2),
    "actor, ep2 cp2 to tp2 sp": (replace(EP2, layout=Layout(TWO, context=2, expert=2)), replace(TP2, sequence=True)),
}


DENSE_STAGE_MOVES = {"actor, pp2 to ep2": (PP2, EP2), "actor, pp2 to pp2": (PP2, PP2)}
"""Moves of a model whose first of two stages has no experts."""

SHOWN_MOVES = (
    "actor, stages of 3 and 1 to pp2",
    "actor, dp2 to stages of 1 and 3",
    "actor, tp2 to pp2 vpp2",
    "actor, pp2 vpp2 to one rank",
    "actor, one rank to dp2",
    "critic, pp2 to tp2",
    "critic, tp2 to dp2",
    "actor, tp2 to cp2",
    "critic, cp2 to dp2",
)
"""Each layout is left and entered, of an actor or a critic."""
SHOWN_DENSE_STAGE_MOVES = ("actor, pp2 to ep2", "actor, one rank to tp2 ep2 sp", "actor, ep2 cp2 to tp2 sp")
SHOWN_DENSE_STAGE_MOVES += ("actor, etp2 to ep2", "actor, dp2 to tp2 etp2 sp")
"""Together they leave or enter each way of cutting experts."""


def shown_and_rest(moves: dict[str, tuple[Case, Case]], shown: tuple[str, ...]) -> list:
    """A case of the moves that show every layout, and one of those between the same layouts otherwise."""
    rest = {name: move for name, move in moves.items() if name not in shown}
    return [
        pytest.param({name: moves[name] for name in shown}, id="shown"),
        pytest.param(rest, id="rest", marks=pytest.mark.slow),
    ]


def check_moved(
    rank: int, world_size: int, folders: dict[str, Path], store_folder: Path, moves: dict[str, tuple[Case, Case]]
) -> None:
    """A checkpoint of each layout loaded in another one: saved again, every tensor of it, the optimizer's too, is the
    same to the bit; and two steps more give what they had given."""
    exchange = Exchange(dist.group.WORLD)
    for name, (before, after) in moves.items():
        kind = name.split(",")[0]
        store = CheckpointStore(store_folder / name, 0, exchange)
        engines = build(folders, {kind: before})
        train(engines, 3)
        save_checkpoint(store, 3, engines, {})
        uninterrupted = exchange.all_gather((train(engines, 2), weights(engines, folders)))
        metrics, expected = next(part for part in uninterrupted if part[0])
        moved = build(folders, {kind: after})
        store.load(store.latest(), moved)
        again = CheckpointStore(store_folder / f"{name}, again", 0, exchange)
        save_checkpoint(again, 3, moved, {})
        assert_same_tensors(again.latest() / kind, store.latest() / kind, name)
        found = train(moved, 2)
        assert not found or found == pytest.approx(metrics, rel=1e-4), name
        for key, tensor in weights(moved, folders).items():
            message = f"{name}: {key} is {(tensor - expected[key]).abs().max():.2g} off the uninterrupted run's"
            torch.testing.assert_close(tensor, expected[key], rtol=0, atol=1e-5, msg=message)


@pytest.mark.parametrize("moves", shown_and_rest(MOVES, SHOWN_MOVES))
def test_any_layout_goes_on_from_any_other(
    moves: dict[str, tuple[Case, Case]], folders: dict[str, Path], tmp_path: Path
) -> None:
    run_ranks(2, check_moved, folders, tmp_path / "checkpoints", moves)


def test_buckets_with_padding_between_them_go_on(tmp_path: Path) -> None:
    """A shared embedding has a bucket of its own on the last stage, padded to a multiple of 128 numbers."""
    folders = {"actor": hf_folder(tmp_path / "actor", "qwen2", vocab_size=93, tie_word_embeddings=True)}
    run_ranks(2, check_moved, folders, tmp_path / "checkpoints", {"actor, pp2 to one rank": (PP2, ONE)})


def assert_same_tensors(found_in: Path, expected_in: Path, name: str) -> None:
    found, expected = tensors_in(found_in), tensors_in(expected_in)
    assert len([key for key in expected if "exp_avg" in key]) > 10 and found.keys() == expected.keys()
    for key, tensor in expected.items():
        rows = min(len(found[key]), len(tensor)) if "embedding" in key or "output_layer" in key else None  # of padding
        assert torch.equal(found[key][:rows], tensor[:rows]), f"{name}: {key}"


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Return the sharded tensors of a component's folder; other state, such as the schedule, is in dictionaries."""
    loaded = dist_checkpointing.load_plain_tensors(str(folder))
    return {name: tensor for name, tensor in loaded.items() if isinstance(tensor, torch.Tensor)}


@pytest.mark.slow  # the next test has experts, too
def test_a_mixture_of_experts_goes_on_in_any_layout(tmp_path: Path) -> None:
    folders = {"actor": hf_folder(tmp_path / "actor", "qwen2_moe", **MIXTURES["qwen2_moe"])}
    run_ranks(2, check_moved, folders, tmp_path / "checkpoints", EXPERT_MOVES)


@pytest.mark.parametrize("moves", shown_and_rest(EXPERT_MOVES | DENSE_STAGE_MOVES, SHOWN_DENSE_STAGE_MOVES))
def test_dense_layers_before_experts_and_router_biases_go_on_in_any_layout(
    moves: dict[str, tuple[Case, Case]], tmp_path: Path
) -> None:
    folders = {"actor": hf_folder(tmp_path / "actor", "deepseek_v3", **MIXTURES["deepseek_v3"])}
    run_ranks(2, check_moved, folders, tmp_path / "checkpoints", moves)

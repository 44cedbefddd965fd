"""Checkpoints of real engines: going on as if never stopped, in any layout; damage named; a killed save harmless."""

import os
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from ppo_engines import OPTIM, Case, exported, make_engine, make_loss, make_rows, with_score
from spawn import run_ranks
from tiny_deepseek import DEEPSEEK_V3
from tiny_models import hf_folder
from torch.multiprocessing import ProcessExitedException

from megappo.architecture.parsing import read_architecture
from megappo.batch.balance import balanced_partitions
from megappo.batch.exchange import Exchange
from megappo.checkpoint.errors import CheckpointError
from megappo.checkpoint.store import CheckpointStore
from megappo.models.train_engine import TrainedEngine
from megappo.placement.groups import build_groups
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


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """Hugging Face folders of an actor and a critic."""
    critic = with_score(hf_folder(tmp_path / "critic", "qwen2"))
    return {"actor": hf_folder(tmp_path / "actor", "qwen2"), "critic": critic}


def build(folders: dict[str, Path], cases: dict[str, Case]) -> dict[str, TrainedEngine | None]:
    """Fresh engines of these components, None where this rank is outside."""
    groups = build_groups({kind: case.layout for kind, case in cases.items()}, seed=0)
    return {
        kind: make_engine(folders[kind], case, groups[kind], kind) if groups[kind].member else None
        for kind, case in cases.items()
    }


def train(engines: dict[str, TrainedEngine | None], num_steps: int) -> dict[str, float]:
    """Some optimizer steps; the last one's gradient norms and learning rates, of the engines on this rank."""
    metrics: dict[str, float] = {}
    for kind, engine in engines.items():
        if engine is None:
            continue
        rows = make_rows(91)
        layout = engine.groups.layout
        mine = balanced_partitions([len(tokens) for tokens in rows.input_ids], layout.data)
        loss = make_loss(kind, rows)
        for _ in range(num_steps):
            step = engine.train_batch(rows.select(mine[layout.shard_of(dist.get_rank())]), loss)
            metrics |= {f"{kind}/{name}": getattr(step, name) for name in ("grad_norm", "lr")}
    return metrics


def weights(engines: dict[str, TrainedEngine | None], folders: dict[str, Path]) -> dict[str, torch.Tensor]:
    """All weights of the engines on this rank, by component and Hugging Face name."""
    return {
        f"{kind}/{name}": tensor
        for kind, engine in engines.items()
        if engine is not None
        for name, tensor in exported(engine, read_architecture(folders[kind]), kind).items()
    }


# --- going on ---


def check_resumed(rank: int, world_size: int, folders: dict[str, Path], store_folder: Path) -> None:
    cases = {"actor": TP2, "critic": PP2}
    store = CheckpointStore(store_folder, 0, Exchange(dist.group.WORLD))
    assert store.latest() is None
    engines = build(folders, cases)
    train(engines, 3)
    store.save(3, engines, {"step": 3, "kl": {"value": 0.125}})
    saved = weights(engines, folders)
    metrics, expected = train(engines, 2), weights(engines, folders)
    again = build(folders, cases)
    path = store.latest()
    assert path == store_folder / "step_00000003"
    assert store.load(path, again) == {"step": 3, "kl": {"value": 0.125}}
    assert_equal(weights(again, folders), saved)
    assert train(again, 2) == metrics
    assert_equal(weights(again, folders), expected)
    assert metrics["actor/lr"] < OPTIM.lr, "the schedule must be on its way for this test to see it"


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_actor_and_critic_of_different_layouts_go_on_bit_for_bit(folders: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(2, check_resumed, folders, tmp_path / "checkpoints")


def check_new_settings(rank: int, world_size: int, folders: dict[str, Path], store_folder: Path) -> None:
    store = CheckpointStore(store_folder, 0, Exchange(dist.group.WORLD))
    old = build(folders, {"actor": TP2, "critic": DP2})
    train(old, 3)
    store.save(3, old, {})
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
"""Of a model whose first stage of two has no experts."""

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
SHOWN_EXPERT_MOVES = (
    "actor, ep2 to tp2 sp",
    "actor, one rank to tp2 ep2 sp",
    "actor, dp2 to tp2 etp2 sp",
    "actor, etp2 to ep2",
    "actor, ep2 cp2 to tp2 sp",
    "actor, pp2 to ep2",
)
"""Each way of cutting experts is left or entered."""


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
        store.save(3, engines, {})
        uninterrupted = exchange.share((train(engines, 2), weights(engines, folders)))
        metrics, expected = next(part for part in uninterrupted if part[0])
        moved = build(folders, {kind: after})
        store.load(store.latest(), moved)
        again = CheckpointStore(store_folder / f"{name}, again", 0, exchange)
        again.save(3, moved, {})
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


def assert_same_tensors(found_in: Path, expected_in: Path, name: str) -> None:
    found, expected = tensors_in(found_in), tensors_in(expected_in)
    assert len([key for key in expected if "exp_avg" in key]) > 10 and found.keys() == expected.keys()
    for key, tensor in expected.items():
        rows = min(len(found[key]), len(tensor)) if "embedding" in key or "output_layer" in key else None  # of padding
        assert torch.equal(found[key][:rows], tensor[:rows]), f"{name}: {key}"


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """What is sharded in a component's folder; the rest, such as the schedule, lies in dictionaries beside it."""
    loaded = dist_checkpointing.load_plain_tensors(str(folder))
    return {name: tensor for name, tensor in loaded.items() if isinstance(tensor, torch.Tensor)}


@pytest.mark.parametrize("moves", shown_and_rest(EXPERT_MOVES, SHOWN_EXPERT_MOVES[:2]))  # the next test has more
def test_a_mixture_of_experts_goes_on_in_any_layout(moves: dict[str, tuple[Case, Case]], tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    shape = {"num_hidden_layers": 2, "shared_expert_intermediate_size": 24}
    folders = {"actor": hf_folder(tmp_path / "actor", "qwen2_moe", **experts, **shape)}
    run_ranks(2, check_moved, folders, tmp_path / "checkpoints", moves)


@pytest.mark.parametrize("moves", shown_and_rest(EXPERT_MOVES | DENSE_STAGE_MOVES, SHOWN_EXPERT_MOVES))
def test_dense_layers_before_experts_and_router_biases_go_on_in_any_layout(
    moves: dict[str, tuple[Case, Case]], tmp_path: Path
) -> None:
    folders = {"actor": hf_folder(tmp_path / "actor", "deepseek_v3", **DEEPSEEK_V3, num_hidden_layers=2)}
    run_ranks(2, check_moved, folders, tmp_path / "checkpoints", moves)


# --- which checkpoint ---


def step_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def check_pruned(rank: int, world_size: int, folders: dict[str, Path], folder: Path) -> None:
    exchange = Exchange(dist.group.WORLD)
    engines = build(folders, {"actor": Case(Layout((0,)))})
    for step in (8, 9, 10, 11):
        CheckpointStore(folder, 2, exchange).save(step, engines, {"step": step})
    assert step_names(folder) == ["step_00000010", "step_00000011"]
    CheckpointStore(folder, 0, exchange).save(12, engines, {"step": 12})
    assert step_names(folder) == ["step_00000010", "step_00000011", "step_00000012"]
    (folder / "latest").write_text("step_00000010\n")  # as a user would, to go back
    store = CheckpointStore(folder, 1, exchange)
    assert store.load(store.latest(), engines) == {"step": 10}
    store.save(11, engines, {"step": 11, "again": True})
    assert step_names(folder) == ["step_00000011", "step_00000012"], "what was just saved must not be pruned"
    assert store.load(store.latest(), engines) == {"step": 11, "again": True}


def test_the_newest_are_kept_and_latest_is_among_them(folders: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(1, check_pruned, folders, tmp_path / "checkpoints")


# --- damage ---


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def a_shard(component: str) -> Callable[[Path], Path]:
    return lambda step: sorted((step / component).glob("*.distcp"))[-1]


# What is done to a checkpoint, how that is called, and what the error says when it is loaded all the same.
DAMAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no state": (lambda step: (step / "state.json").unlink(), "state.json is missing", "cannot read .*state.json"),
    "cut state": (lambda step: truncate(step / "state.json"), "state.json is altered or cut off", "state.json is not"),
    "no actor": (lambda step: shutil.rmtree(step / "actor"), "actor/.metadata is missing", "cannot load actor from"),
    "no shard": (lambda step: a_shard("critic")(step).unlink(), "critic/__.*distcp is missing", "critic from.*distcp"),
    "cut shard": (lambda step: truncate(a_shard("critic")(step)), "critic/__.*distcp is altered", "load critic from"),
    "empty shard": (lambda step: os.truncate(a_shard("actor")(step), 0), "actor/__.*distcp is altered", "actor from"),
    "no metadata": (lambda step: (step / "actor" / ".metadata").unlink(), "actor/.metadata is missing", "actor from"),
    "cut metadata": (
        lambda step: truncate(step / "critic" / ".metadata"),
        "critic/.metadata is altered",
        "critic from",
    ),
    "cut common.pt": (lambda step: truncate(step / "actor" / "common.pt"), "actor/common.pt is altered", "actor from"),
    "no sums": (lambda step: (step / "SHA256SUMS").unlink(), "SHA256SUMS is missing.*sha256sum", ""),
    "a file too many": (lambda step: (step / "actor" / "x").touch(), "actor/x is not listed in SHA256SUMS", ""),
}


def check_damages(rank: int, world_size: int, folders: dict[str, Path], whole: Path, other: Path) -> None:
    exchange = Exchange(dist.group.WORLD)
    cases = {"actor": TP2, "critic": PP2}
    engines = build(folders, cases)
    for step in (1, 2):
        CheckpointStore(whole, 0, exchange).save(step, engines, {"step": step})
    for name, (damage, called, refusal) in DAMAGES.items():
        folder = whole.with_name(name)
        if rank == 0:
            shutil.copytree(whole, folder)
            damage(folder / "step_00000002")
        exchange.share(None)
        warnings: list[str] = []
        store = CheckpointStore(folder, 0, exchange, warnings.append)
        assert store.latest() == folder / "step_00000001", name
        if rank == 0:
            [warning] = warnings
            assert re.fullmatch(
                f"WARNING: .*step_00000002 is damaged: .*{called}.*; going on from .*_00000001", warning
            )
            shutil.rmtree(folder / "step_00000001")
        exchange.share(None)
        with pytest.raises(CheckpointError, match=f"step_00000002 is damaged: .*{called}.*trainer.output_dir"):
            store.latest()
        if refusal:
            with pytest.raises(CheckpointError, match=f"(?s){refusal}") as caught:
                store.load(folder / "step_00000002", engines)
            assert "step_00000002" in str(caught.value)
    store = CheckpointStore(whole, 0, exchange)
    larger = build(folders | {"critic": other}, cases)
    with pytest.raises(CheckpointError, match="(?s)cannot load critic from.*step_00000002.*shape"):
        store.load(store.latest(), larger)
    assert store.load(store.latest(), engines) == {"step": 2}


def test_of_a_damaged_checkpoint_the_file_is_named_and_the_one_before_it_used(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    other = with_score(hf_folder(tmp_path / "other", "qwen2", intermediate_size=64))
    run_ranks(2, check_damages, folders, tmp_path / "whole", other)


# --- a save that does not finish ---


class Dying:
    """An engine whose rank is killed when it comes to be saved."""

    def __init__(self, engine: TrainedEngine):
        self.engine = engine

    def sharded_state_dict(self, is_loading: bool) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("survived SIGKILL")

    def as_world(self) -> AbstractContextManager:
        return self.engine.as_world()


def save_and_die(rank: int, world_size: int, folders: dict[str, Path], folder: Path, dying: int) -> None:
    store = CheckpointStore(folder, 1, Exchange(dist.group.WORLD))
    engines = build(folders, {"actor": TP2, "critic": PP2})
    train(engines, 1)
    store.save(1, engines, {"step": 1})
    train(engines, 1)
    store.save(2, engines | ({"critic": Dying(engines["critic"])} if rank == dying else {}), {"step": 2})


def go_on(rank: int, world_size: int, folders: dict[str, Path], folder: Path) -> None:
    """The first checkpoint is there and whole; the next save clears the unfinished one away."""
    expected = build(folders, {"actor": TP2, "critic": PP2})
    train(expected, 1)
    store = CheckpointStore(folder, 1, Exchange(dist.group.WORLD))
    assert step_names(folder) == ["step_00000001", "step_00000002.partial"]
    engines = build(folders, {"actor": TP2, "critic": PP2})
    assert store.load(store.latest(), engines) == {"step": 1}
    assert_equal(weights(engines, folders), weights(expected, folders))
    store.save(2, engines, {"step": 2})
    assert step_names(folder) == ["step_00000002"]


def test_a_rank_killed_in_a_save_leaves_the_checkpoint_before(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ProcessExitedException, match="rank 1 was ended by SIGKILL"):
        run_ranks(2, save_and_die, folders, tmp_path / "checkpoints", 1)
    run_ranks(2, go_on, folders, tmp_path / "checkpoints")


def fail_and_go_on(rank: int, world_size: int, folders: dict[str, Path], folder: Path) -> None:
    """Once rank 1 can write no file of more than 2000 bytes, once rank 0 cannot write state.json."""
    store = CheckpointStore(folder, 1, Exchange(dist.group.WORLD))
    engines = build(folders, {"actor": TP2, "critic": PP2})
    train(engines, 1)
    store.save(1, engines, {"step": 1})
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError, match="cannot save actor to .*step_00000002.partial: File too large$"):
        store.save(2, engines, {"step": 2})
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with pytest.raises((TypeError, RuntimeError), match="not JSON serializable"):
        store.save(2, engines, {"step": object()})
    go_on(rank, world_size, folders, folder)


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_checkpoint_before(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    run_ranks(2, fail_and_go_on, folders, tmp_path / "checkpoints")


# --- what `latest` says ---


def a_folder(pointer: Path) -> None:
    pointer.unlink()
    pointer.mkdir()


# What becomes of `latest`, and what is said of it.
POINTERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "latest is missing"),
    "a folder": (a_folder, "cannot read .*latest .Is a directory."),
    "not text": (lambda pointer: pointer.write_bytes(b"\xff\x00step"), "latest is not text"),
    "empty": (lambda pointer: pointer.write_text(""), "latest names no checkpoint: .*found ''"),
    "garbage": (lambda pointer: pointer.write_text("../../etc\n"), "latest names no checkpoint: .*found '../../etc'"),
    "of nothing": (
        lambda pointer: pointer.write_text("step_00000009\n"),
        "latest names step_00000009, which is not there",
    ),
}


def check_pointers(rank: int, world_size: int, folders: dict[str, Path], whole: Path) -> None:
    exchange = Exchange(dist.group.WORLD)
    engines = build(folders, {"actor": Case(Layout((0,)))})
    for step in (1, 2):
        CheckpointStore(whole, 0, exchange).save(step, engines, {})
    for name, (change, said) in POINTERS.items():
        folder, warnings = whole.with_name(name), []
        shutil.copytree(whole, folder)
        change(folder / "latest")
        store = CheckpointStore(folder, 0, exchange, warnings.append)
        assert store.latest() == folder / "step_00000002"
        [warning] = warnings
        assert re.fullmatch(f"WARNING: .*{said}; going on from .*step_00000002", warning)
        store.save(3, engines, {})
        assert (folder / "latest").read_text() == "step_00000003\n"
    shutil.rmtree(whole / "step_00000001")
    shutil.rmtree(whole / "step_00000002")
    with pytest.raises(CheckpointError, match="latest is there, but no checkpoint beside it: put them back, or remove"):
        CheckpointStore(whole, 0, exchange).latest()


def test_without_a_latest_that_names_one_the_newest_is_used(folders: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(1, check_pointers, folders, tmp_path / "whole")


# --- flipped bits ---


def check_flips(rank: int, world_size: int, folders: dict[str, Path], folder: Path, num_places: int) -> None:
    """One bit of a file at a time, in places over all of each file."""
    exchange, warnings = Exchange(dist.group.WORLD), []
    engines = build(folders, {"actor": Case(Layout((0,))), "critic": Case(Layout((0,)))})
    store = CheckpointStore(folder, 0, exchange, warnings.append)
    for step in (1, 2):
        store.save(step, engines, {"step": step})
    files = [path for path in (folder / "step_00000002").rglob("*") if path.is_file()]
    assert len(files) == 12
    for path in files:
        content = path.read_bytes()
        for place in {*range(0, len(content), max(1, len(content) // num_places)), len(content) - 1}:
            flipped = bytearray(content)
            flipped[place] ^= 1 << place % 8
            path.write_bytes(flipped)
            assert store.latest() == folder / "step_00000001", (path, place)
            named = path.relative_to(folder / "step_00000002").as_posix()
            assert named in warnings.pop(), (path, place)
        path.write_bytes(content)
    assert store.latest() == folder / "step_00000002" and not warnings
    subprocess.run(
        ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=folder / "step_00000002", check=True
    )


@pytest.mark.parametrize("num_places", [10, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_named_and_the_checkpoint_before_used(
    folders: dict[str, Path], tmp_path: Path, num_places: int
) -> None:
    run_ranks(1, check_flips, folders, tmp_path / "checkpoints", num_places, timeout=300)

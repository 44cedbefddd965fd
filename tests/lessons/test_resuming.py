"""State that a resumed run must restore: bugs of others that resume without a part of it, and report nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from commands import assert_equal
from component_engines import build, train, weights
from ppo_engines import OPTIM, Case, hf_outputs, make_config, make_rows
from safetensors.torch import load_file, save_file
from saved import load_checkpoint, save_checkpoint
from spawn import run_ranks
from tiny_models import hf_folder, hf_model

from megappo.batch.exchange import Exchange
from megappo.checkpoint.store import CheckpointStore
from megappo.engines.client import EngineError
from megappo.models.train_engine import TrainedEngine
from megappo.placement.layout import Layout
from megappo.sync.proof import check_log_probs

DECAYING = OPTIM.model_copy(update={"lr_warmup_steps": 2, "lr_decay_style": "cosine", "min_lr": 1e-3})
ONE = {"actor": Case(Layout((0,)), optim=DECAYING)}
CONSTANT = {"actor": Case(Layout((0,)))}
SAVED_AFTER, GOING_ON = 3, 2


def forget_moments(engine: TrainedEngine) -> None:
    for part in engine.optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()


def restart_schedule(engine: TrainedEngine) -> None:
    engine.scheduler.num_steps = 0
    engine.scheduler.step(increment=0)


def count_steps_twice(engine: TrainedEngine) -> None:
    engine.scheduler.step(increment=SAVED_AFTER)


FAULTS: dict[Callable[[TrainedEngine], None], bool] = {
    forget_moments: False,
    restart_schedule: True,
    count_steps_twice: True,
}
"""Bugs of others, done to an engine after its checkpoint was loaded, and True if the learning rate shows them."""


def check_going_on(rank: int, world_size: int, folders: dict[str, Path], store_folder: Path) -> None:
    store = CheckpointStore(store_folder, 0, Exchange(dist.group.WORLD))
    engines = build(folders, ONE)
    train(engines, SAVED_AFTER)
    save_checkpoint(store, SAVED_AFTER, engines, {})
    metrics, expected = train(engines, GOING_ON), weights(engines, folders)
    for fault, shows_in_lr in {None: False, **FAULTS}.items():
        resumed = build(folders, ONE)
        for _ in range(2):  # a second load adds nothing to the first
            assert load_checkpoint(store, store.latest(), resumed) == {"step": SAVED_AFTER}
        if fault is not None:
            fault(resumed["actor"])
        found, after = train(resumed, GOING_ON), weights(resumed, folders)
        if fault is None:
            assert found == metrics
            assert_equal(after, expected)
            continue
        assert max((after[name] - x).abs().max() for name, x in expected.items()) > 1e-3, fault
        assert (abs(found["actor/lr"] / metrics["actor/lr"] - 1) > 0.05) == shows_in_lr, fault


def test_optimizer_schedule_and_step_go_on(tmp_path: Path) -> None:
    """Weights came back, but with fresh moments and a fresh schedule, as the optimizer's state was looked for in a
    folder that Megatron's checkpoints have not: https://github.com/NVIDIA-NeMo/RL/pull/3171
    The schedule was saved, and by default not loaded: https://github.com/verl-project/verl/issues/7953
    It was loaded and then moved on by the same steps again: https://github.com/radixark/miles/pull/1627; as Megatron's
    loading does by itself to a schedule that has been under way: https://github.com/NovaSky-AI/SkyRL/pull/2214
    Optimizer, schedule or step were dropped: https://github.com/areal-project/AReaL/issues/1468
    """
    folders = {"actor": hf_folder(tmp_path / "actor", "qwen2")}
    run_ranks(1, check_going_on, folders, tmp_path / "checkpoints")


def save_what_is_sent(rank: int, world_size: int, folders: dict[str, Path], root: Path) -> None:
    """Log-probs after each of three steps and after a resume, with the weights that would go to the engines then."""
    store, rows = CheckpointStore(root / "checkpoints", 0, Exchange(dist.group.WORLD)), make_rows(91)
    engines = build(folders, CONSTANT)

    def save(name: str) -> None:
        log_probs = engines["actor"].forward(rows)["log_probs"]
        sent = {name.removeprefix("actor/"): x for name, x in weights(engines, folders).items()}
        save_file(sent | {"log_probs": log_probs}, root / name)

    for step in range(1, SAVED_AFTER + 1):
        train(engines, 1)
        save(f"step {step}")
    save_checkpoint(store, SAVED_AFTER, engines, {})
    engines = build(folders, CONSTANT)
    store.load(store.latest(), engines)
    save("resumed")


def test_what_is_sent_to_the_engines_is_what_the_trainer_computes_with(tmp_path: Path) -> None:
    """For some steps after a resume rollouts and trainer disagreed about the log-probs, and rewards fell.

    No message reported that another model was sampling. Here Hugging Face with the weights that are sent agrees with
    the trainer after every step and after a resume; the engines' initial weights do not, and such a difference ends the
    run.

    https://github.com/THUDM/slime/issues/1695 (which does not name the cause)
    """
    folders, rows = {"actor": hf_folder(tmp_path / "actor", "qwen2")}, make_rows(91)
    run_ranks(1, save_what_is_sent, folders, tmp_path)
    model, config = hf_model(folders["actor"]), make_config("actor")

    def difference(log_probs: torch.Tensor) -> float:
        """Return the mean difference over the tokens of the mask."""
        total = sum(
            float((mine[: len(own)].detach() - own.detach()).abs().sum())
            for mine, (own, _) in zip(log_probs, hf_outputs(model, None, rows), strict=True)
        )
        return total / float(rows.response_mask.sum())

    for name in (*(f"step {step}" for step in range(1, SAVED_AFTER + 1)), "resumed"):
        sent = load_file(tmp_path / name)
        log_probs = sent.pop("log_probs")
        model.load_state_dict(load_file(folders["actor"] / "model.safetensors"))
        with pytest.raises(EngineError, match="the engine does not run the actor's weights"):
            check_log_probs("the rollouts", difference(log_probs), config, print)
        model.load_state_dict(sent)
        assert difference(log_probs) < 1e-5, name
    last, resumed = load_file(tmp_path / f"step {SAVED_AFTER}"), load_file(tmp_path / "resumed")
    assert_equal(resumed, last)

"""The engine's outputs and updates against Hugging Face on one process, in every layout and cut of the batch."""

from pathlib import Path

import pytest
import torch
from ppo_engines import (
    ACTOR,
    CRITIC,
    OPTIM,
    Case,
    exported,
    hf_outputs,
    hf_value_head,
    make_engine,
    make_rows,
    read_config,
    with_score,
)
from spawn import run_ranks
from tiny_models import hf_folder, hf_model

from megappo.config.schema import Actor, Critic
from megappo.data.balance import balanced_partitions
from megappo.data.batch import Rows
from megappo.models.engine import TrainedEngine
from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout
from megappo.trainer.losses import actor_loss, critic_loss

TWO, FOUR = (0, 1), (0, 1, 2, 3)
CASES = {
    "one rank": Case(Layout((0,))),
    "one rank, small micro-batches": Case(Layout((0,)), max_tokens=9),
    "tp2": Case(Layout(TWO, tensor=2)),
    "tp2 sp": Case(Layout(TWO, tensor=2), sequence=True, max_tokens=14),
    "pp2": Case(Layout(TWO, pipeline=2), max_tokens=9),
    "dp2": Case(Layout(TWO)),
    "dp2, optimizer not sharded": Case(
        Layout(TWO), optim=OPTIM.model_copy(update={"distributed": False}), max_tokens=12
    ),
    "tp2 pp2, full recompute": Case(Layout(FOUR, tensor=2, pipeline=2), recompute="full"),
    "tp2 dp2 sp": Case(Layout(FOUR, tensor=2), sequence=True, max_tokens=20),
    "pp2 dp2": Case(Layout(FOUR, pipeline=2), max_tokens=10),
}


# --- Hugging Face, one process, one row at a time ---


def hf_actor_loss(model: torch.nn.Module, rows: Rows, config: Actor) -> torch.Tensor:
    """Token mean of PPO's clipped loss with dual clip and entropy bonus, token by token."""
    total, count = torch.zeros(()), 0
    for row, (log_probs, entropy) in enumerate(hf_outputs(model, None, rows)):
        for t in range(len(log_probs)):
            advantage = rows.fields["advantages"][row, t]
            ratio = (log_probs[t] - rows.fields["old_log_probs"][row, t]).exp()
            loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - config.clip_ratio, 1 + config.clip_ratio))
            if advantage < 0:
                loss = torch.min(loss, -config.clip_ratio_c * advantage)
            total, count = total + loss - config.entropy_coeff * entropy[t], count + 1
    return total / count


def hf_critic_loss(model: torch.nn.Module, head: torch.nn.Module, rows: Rows, config: Critic) -> torch.Tensor:
    """Token mean of the clipped squared error, token by token."""
    total, count = torch.zeros(()), 0
    for row, (values,) in enumerate(hf_outputs(model, head, rows)):
        for t in range(len(values)):
            old, target = rows.fields["values"][row, t], rows.fields["returns"][row, t]
            clipped = old + (values[t] - old).clamp(-config.value_clip, config.value_clip)
            total, count = total + 0.5 * torch.max((values[t] - target) ** 2, (clipped - target) ** 2), count + 1
    return total / count


def hf_train(folder: Path, kind: str, num_steps: int) -> dict:
    """Outputs before, gradient norms and parameters after some Adam steps."""
    torch.manual_seed(0)
    model = hf_model(folder)
    rows = make_rows(model.config.vocab_size)
    head = hf_value_head(folder) if kind == "critic" else None
    named = dict((model if head is None else model.model).named_parameters(prefix="" if head is None else "model"))
    if head is not None:
        named["score.weight"] = head.weight
    decayed = [parameter for parameter in named.values() if parameter.dim() > 1]
    others = [parameter for parameter in named.values() if parameter.dim() == 1]
    groups = [{"params": decayed, "weight_decay": OPTIM.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=OPTIM.lr, betas=OPTIM.betas, eps=OPTIM.eps)
    with torch.no_grad():
        before = hf_outputs(model, head, rows)
    norms = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = hf_actor_loss(model, rows, ACTOR) if head is None else hf_critic_loss(model, head, rows, CRITIC)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(named.values(), OPTIM.clip_grad)))
        optimizer.step()
    return {"outputs": before, "grad_norms": norms, "parameters": {k: v.detach() for k, v in named.items()}}


# --- Megatron ---


def _matches(rank: int, world_size: int, folder: Path, name: str, kind: str, expected: dict) -> None:
    case = CASES[name]
    engine = make_engine(folder, case, build_groups({kind: case.layout}, seed=0)[kind], kind)
    hf_config = read_config(folder)
    rows = make_rows(hf_config["vocab_size"])
    lengths = [len(tokens) for tokens in rows.input_ids]
    mine = balanced_partitions(lengths, case.layout.data)[case.layout.shard_of(rank)]
    _assert_outputs(engine, rows, mine, expected["outputs"], kind)
    num_tokens = int(rows.response_lengths.sum())
    loss = actor_loss(ACTOR, num_tokens) if kind == "actor" else critic_loss(CRITIC, num_tokens)
    for norm in expected["grad_norms"]:
        metrics = engine.train_batch(rows.select(mine), loss)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=2e-5)
    found = exported(engine, hf_config, kind)
    assert found.keys() == expected["parameters"].keys()
    for key, parameter in expected["parameters"].items():
        message = f"{key} differs from Hugging Face's after {len(expected['grad_norms'])} steps"
        torch.testing.assert_close(found[key], parameter, rtol=0, atol=2e-5, msg=message)


def _assert_outputs(engine: TrainedEngine, rows: Rows, mine: list[int], expected: list, kind: str) -> None:
    outputs = engine.forward(rows.select(mine))
    if not outputs:
        assert not engine.is_output
        return
    names = ("values",) if kind == "critic" else ("log_probs", "entropy")
    for row, position in enumerate(mine):
        for name, reference in zip(names, expected[position], strict=True):
            found = outputs[name][row]
            torch.testing.assert_close(found[: len(reference)], reference, rtol=1e-5, atol=1e-5)
            assert not found[len(reference) :].any(), "padding must be 0"


@pytest.mark.parametrize("name", CASES)
def test_actor_trains_as_hugging_face_does(name: str, tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", "qwen2", tie_word_embeddings=True)
    run_ranks(len(CASES[name].layout.ranks), _matches, folder, name, "actor", hf_train(folder, "actor", 2))


@pytest.mark.parametrize("name", ["one rank", "tp2 sp", "pp2", "dp2", "tp2 pp2, full recompute"])
def test_critic_trains_as_hugging_face_does(name: str, tmp_path: Path) -> None:
    folder = with_score(hf_folder(tmp_path / "hf", "qwen2"))
    run_ranks(len(CASES[name].layout.ranks), _matches, folder, name, "critic", hf_train(folder, "critic", 2))

"""Load-balancing losses and bias updates of routers, against plain loops over what transformers' routers return."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hf_training import hf_train, shard_of
from ppo_engines import LENGTHS, Case, exported, make_engine, make_loss, make_rows, with_score
from saved import save_checkpoint
from slow import slow_ones
from spawn import run_ranks
from tiny_models import hf_folder
from tiny_shapes import DEEPSEEK_V3, EXPERTS

from megappo.architecture.parsing import read_architecture
from megappo.batch.balance import micro_batches
from megappo.batch.exchange import Exchange
from megappo.batch.rows import Rows
from megappo.checkpoint.store import CheckpointStore
from megappo.config.model_sections import Router
from megappo.models.routing import ModelRouting
from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout

COEF, RATE = 0.3, 0.05
SMALL, TOGETHER = 9, 64
"""Tokens of a micro-batch: about two rows, and all."""
TWO, FOUR = (0, 1), (0, 1, 2, 3)
ROW_CASES = {
    "one rank": Case(Layout((0,)), max_tokens=TOGETHER),
    "one rank, small micro-batches": Case(Layout((0,)), max_tokens=SMALL),
    "tp2 sp": Case(Layout(TWO, tensor=2), sequence=True, max_tokens=14),
    "cp2": Case(Layout(TWO, context=2), max_tokens=14),
    "ep2": Case(Layout(TWO, expert=2), max_tokens=SMALL),
    "pp2": Case(Layout(TWO, pipeline=2), max_tokens=SMALL),
    "pp2 vpp2, full recompute": Case(Layout(TWO, pipeline=2, virtual_pipeline=2), recompute="full", max_tokens=SMALL),
    "ep2 cp2 tp2 sp": Case(Layout(FOUR, tensor=2, context=2, expert=2), sequence=True, max_tokens=20),
    "ep2 pp2, full recompute": Case(Layout(FOUR, pipeline=2, expert=2), recompute="full", max_tokens=SMALL),
}
"""Layouts and cuts of the batch, none of which changes the loss over each row."""
MICRO_BATCH_CASES = {
    "one rank": Case(Layout((0,)), max_tokens=TOGETHER),
    "one rank, small micro-batches": Case(Layout((0,)), max_tokens=SMALL),
    "tp2 sp, full recompute": Case(Layout(TWO, tensor=2), sequence=True, recompute="full", max_tokens=TOGETHER),
    "cp2 tp2 sp": Case(Layout(FOUR, tensor=2, context=2), sequence=True, max_tokens=TOGETHER),
}
"""The same micro-batches, on ranks that share their tokens."""


def balancing_loss(logits: torch.Tensor, top_k: int, *, has_sigmoid: bool) -> torch.Tensor:
    """Return the loss over the tokens of some logits, [T, E].

    Source: Switch Transformers, eq. 4-6, with top_k choices of a token; DeepSeek-V3, eq. 17-20.
    """
    scores = logits.sigmoid() if has_sigmoid else logits.softmax(-1)
    num_tokens, num_experts = logits.shape
    loss = torch.zeros(())
    for expert in range(num_experts):
        num_chosen, share = 0, torch.zeros(())
        for token in scores:
            num_chosen += expert in token.topk(top_k).indices
            share = share + token[expert] / token.sum()
        loss = loss + num_chosen / (num_tokens * top_k) * share / num_tokens
    return num_experts * loss


class AddedLoss:
    """The loss of transformers' routers, which get one row after the other, over some groups of rows.

    Attributes:
        values: the loss of each optimizer step, as a mean over layers, without its weight.
    """

    def __init__(self, groups: list[list[int]], top_k: int, has_sigmoid: bool):
        self.groups, self.values = groups, []
        self._loss = partial(balancing_loss, top_k=top_k, has_sigmoid=has_sigmoid)

    def watch(self, model: torch.nn.Module, rows: Rows) -> "AddedLoss":
        routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
        self._logits = [[] for _ in routers]
        for router, logits in zip(routers, self._logits, strict=True):
            router.register_forward_hook(partial(self._keep, logits))
        return self

    def _keep(self, logits, router, inputs, outputs):
        if torch.is_grad_enabled():
            logits.append(outputs[0])

    def __call__(self) -> torch.Tensor:
        loss = torch.zeros(())
        for by_row in self._logits:
            num_tokens = sum(map(len, by_row[: sum(map(len, self.groups))]))  # a critic's rows come twice
            for group in self.groups:
                together = torch.cat([by_row[row] for row in group])
                loss = loss + len(together) / num_tokens * self._loss(together)
            by_row.clear()
        self.values.append(float(loss.detach()) / len(self._logits))
        return COEF * loss


class MovedBiases:
    """The biases of transformers' routers, which each optimizer step moves against the load of the experts."""

    def watch(self, model: torch.nn.Module, rows: Rows) -> "MovedBiases":
        self._routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
        for router in self._routers:
            router.register_forward_hook(self._keep)
            router.choices = []
        return self

    def _keep(self, router, inputs, outputs):
        if torch.is_grad_enabled():
            router.choices += outputs[2].flatten().tolist()

    def __call__(self) -> torch.Tensor:
        for router in self._routers:
            mean = len(router.choices) / len(router.e_score_correction_bias)
            for expert in range(len(router.e_score_correction_bias)):
                load = router.choices.count(expert)
                router.e_score_correction_bias[expert] += RATE * ((load < mean) - (load > mean))
            router.choices.clear()
        return torch.zeros(())


def _trains(rank: int, world_size: int, folder: Path, kind: str, case: Case, router: Router, expected: dict) -> None:
    architecture = read_architecture(folder)
    engine = make_engine(folder, case, build_groups({kind: case.layout}, seed=0)[kind], kind)
    engine.routing = ModelRouting(engine.chunks, engine.groups, kind, router, replays=False)
    rows = make_rows(architecture.vocab_size)
    mine = rows.select(shard_of(rows, case.layout))
    for norm, loss in zip(expected["grad_norms"], expected["losses"], strict=True):
        engine.forward(mine)  # adds nothing
        step = engine.train_batch(mine, make_loss(kind, rows))
        if loss is not None:
            assert step.metrics[f"{kind}/load_balancing_loss"].value == pytest.approx(loss, rel=1e-5)
        assert step.grad_norm == pytest.approx(norm, rel=2e-5)
    found = exported(engine, architecture, kind)
    for key, parameter in expected["parameters"].items():
        torch.testing.assert_close(found[key], parameter, rtol=0, atol=2e-5, msg=f"{key} differs from Hugging Face's")


def check(folder: Path, kind: str, case: Case, router: Router, groups: list[list[int]]) -> None:
    architecture = read_architecture(folder)
    added = AddedLoss(groups, architecture.experts.top_k, architecture.family.experts.router_bias)
    expected = hf_train(folder, kind, None, num_steps=2, lengths=LENGTHS, choose=added.watch)
    without = hf_train(folder, kind, None, num_steps=1, lengths=LENGTHS)["grad_norms"]
    assert abs(without[0] - expected["grad_norms"][0]) > 1e-3 * without[0], "the loss must show"
    expected["losses"] = added.values
    run_ranks(len(case.layout.ranks), _trains, folder, kind, case, router, expected)


def softmax(folder: Path) -> Path:
    return hf_folder(folder / "hf", "qwen3_moe", **EXPERTS, norm_topk_prob=True)


def sigmoid(folder: Path) -> Path:
    return hf_folder(folder / "hf", "deepseek_v3", **DEEPSEEK_V3)


BY_ROW = [[row] for row in range(len(LENGTHS))]
SHOWN = "pp2 vpp2, full recompute"


@pytest.mark.parametrize("name", slow_ones(ROW_CASES, ROW_CASES.keys() - {SHOWN}))
def test_the_loss_over_each_row_is_the_same_in_every_layout(name: str, tmp_path: Path) -> None:
    check(softmax(tmp_path), "actor", ROW_CASES[name], Router(seq_aux_loss_coef=COEF), BY_ROW)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one rank, small micro-batches", "ep2 cp2 tp2 sp", "ep2 pp2, full recompute"])
def test_the_loss_of_sigmoid_routers_is_the_same_in_every_layout(name: str, tmp_path: Path) -> None:
    check(sigmoid(tmp_path), "actor", ROW_CASES[name], Router(seq_aux_loss_coef=COEF), BY_ROW)


@pytest.mark.slow
@pytest.mark.parametrize("name", MICRO_BATCH_CASES)
def test_the_loss_over_a_micro_batch(name: str, tmp_path: Path) -> None:
    case = MICRO_BATCH_CASES[name]
    bins = micro_batches([sum(length) for length in LENGTHS], case.max_tokens, at_least=1)
    assert len(bins) == (1 if case.max_tokens == TOGETHER else 5)
    check(softmax(tmp_path), "actor", case, Router(aux_loss_coef=COEF), bins)


@pytest.mark.slow
def test_the_loss_of_a_critic(tmp_path: Path) -> None:
    check(with_score(softmax(tmp_path)), "critic", ROW_CASES["ep2"], Router(seq_aux_loss_coef=COEF), BY_ROW)


OF_BIASES = ("one rank, small micro-batches", "ep2 cp2 tp2 sp", "pp2 vpp2, full recompute", "ep2")


@pytest.mark.parametrize("name", slow_ones(OF_BIASES, OF_BIASES[1:]))
def test_biases_move_against_the_load(name: str, tmp_path: Path) -> None:
    folder, case = sigmoid(tmp_path), ROW_CASES[name]
    expected = hf_train(folder, "actor", None, num_steps=3, lengths=LENGTHS, choose=MovedBiases().watch)
    unmoved = hf_train(folder, "actor", None, num_steps=1, lengths=LENGTHS)["parameters"]
    biases = [key for key in unmoved if key.endswith("e_score_correction_bias")]
    assert biases and all((expected["parameters"][key] - unmoved[key]).abs().max() > RATE / 2 for key in biases)
    router, losses = Router(bias_update_rate=RATE), [None] * 3
    run_ranks(len(case.layout.ranks), _trains, folder, "actor", case, router, expected | {"losses": losses})


def _saved(rank: int, world_size: int, folder: Path, checkpoint: Path) -> None:
    store, architecture = CheckpointStore(checkpoint, 0, Exchange(dist.group.WORLD)), read_architecture(folder)
    rows, weights = make_rows(architecture.vocab_size), []
    for name in ("ep2", "pp2 vpp2, full recompute"):
        case = ROW_CASES[name]
        engine = make_engine(folder, case, build_groups({"actor": case.layout}, seed=0)["actor"], "actor")
        weights.append(exported(engine, architecture, "actor"))
        if store.latest() is None:
            engine.routing = ModelRouting(
                engine.chunks, engine.groups, "actor", Router(bias_update_rate=RATE), replays=False
            )
            engine.train_batch(rows.select(shard_of(rows, case.layout)), make_loss("actor", rows))
            save_checkpoint(store, 1, {"actor": engine}, {})
        else:
            store.load(store.latest(), {"actor": engine})
        weights.append(exported(engine, architecture, "actor"))
    before, trained, _, loaded = weights
    biases = [key for key in before if key.endswith("e_score_correction_bias")]
    assert biases
    for key in biases:
        assert torch.equal(loaded[key], trained[key]) and not torch.equal(trained[key], before[key])


@pytest.mark.slow
def test_checkpoints_have_the_moved_biases(tmp_path: Path) -> None:
    run_ranks(2, _saved, sigmoid(tmp_path), tmp_path / "checkpoints")

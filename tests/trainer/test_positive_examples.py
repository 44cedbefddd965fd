"""The likelihood term of VAPO, of the responses with a score above 0, however a mini-batch is cut: a plain loop."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ppo_engines import SPEC, Case, at_owners, make_config, make_engine, make_rows
from spawn import run_ranks
from tiny_models import hf_folder

from megappo.architecture.parsing import read_architecture
from megappo.batch.exchange import Exchange
from megappo.batch.rows import Rows
from megappo.config.schema import Config
from megappo.placement.components import components_of
from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout
from megappo.trainer.component_batch import Component
from megappo.trainer.objectives import ActorLoss, positive_mask
from megappo.trainer.statistics import merge_optimizer_steps, training_metrics
from megappo.trainer.update import update_actor

COEF = 0.3
LENGTHS = ((3, 4), (3, 6), (5, 1), (5, 2), (4, 5), (4, 3), (2, 2), (2, 7))
SCORES = (1.0, -1.0, 0.0, 0.25, 2.0, 0.0, -0.5, 1.0)
CORRECT = (0, 3, 4, 7)


def with_coef(coef: float) -> Config:
    config = make_config("actor")
    return config.model_copy(update={"actor": config.actor.model_copy(update={"positive_nll_coef": coef})})


def scored_rows(vocab_size: int, scores: tuple[float, ...] = SCORES, *, weighted: bool = False) -> Rows:
    rows = make_rows(vocab_size, LENGTHS, weighted=weighted)
    return replace(rows, fields=rows.fields | {"scores": torch.tensor(scores)})


def plain_nll(log_probs: torch.Tensor, rows: Rows) -> float:
    """Return the mean over the tokens that the policy wrote in correct responses, token by token."""
    terms = []
    for row in CORRECT:
        weight = float(rows.fields["loss_weights"][row]) if "loss_weights" in rows.fields else 1.0
        terms += [-weight * float(log_probs[row, t]) for t in rows.response_mask[row].nonzero().flatten().tolist()]
    return sum(terms) / len(terms)


def in_parts(rows: Rows, log_probs: torch.Tensor, coef: float, parts: list[list[int]]) -> tuple[float, float]:
    """Return loss and actor/positive_nll_loss, added up over micro-batches; log_probs get the gradient."""
    counts = int(rows.response_mask.sum()), len(rows), int(positive_mask(rows).sum())
    loss_fn, losses, metric = ActorLoss(with_coef(coef), *counts), [], 0.0
    for part in parts:
        outputs = {"log_probs": log_probs[part], "entropy": torch.ones_like(log_probs[part])}
        loss, metrics = loss_fn(outputs, rows.select(part))
        losses.append(loss)
        metric += float(metrics["actor/positive_nll_loss"].part[0]) if coef else 0.0
    total = torch.stack(losses).sum()
    total.backward()
    return float(total.detach()), metric


@pytest.mark.parametrize("weighted", [False, True])
def test_the_term_is_the_mean_over_the_tokens_of_correct_responses(weighted: bool) -> None:
    rows = scored_rows(91, weighted=weighted)
    numbers = torch.randn(rows.response_mask.shape, generator=torch.Generator().manual_seed(5)) - 4.0
    expected, found = plain_nll(numbers, rows), []
    for coef, parts in ((0.0, [[*range(8)]]), (COEF, [[*range(8)]]), (COEF, [[1, 2], [7, 5, 0], [3], [6, 4]])):
        leaf = numbers.clone().requires_grad_()
        found.append((*in_parts(rows, leaf, coef, parts), leaf.grad))
    without, whole, cut = found
    for loss, metric, gradient in (whole, cut):
        assert metric == pytest.approx(expected, rel=1e-5)
        assert loss - without[0] == pytest.approx(COEF * expected, rel=1e-4)
        added = gradient - without[2]
        of_token = -COEF / sum(int(rows.response_mask[row].sum()) for row in CORRECT)
        for row in range(8):
            weight = float(rows.fields["loss_weights"][row]) if weighted else 1.0
            right = rows.response_mask[row] * (of_token * weight if row in CORRECT else 0.0)
            torch.testing.assert_close(added[row], right, rtol=0, atol=1e-6)


def test_a_mini_batch_without_a_correct_response_adds_nothing() -> None:
    rows, losses = scored_rows(91, (0.0,) * 8), []
    for coef in (0.0, COEF):
        leaf = torch.full(rows.response_mask.shape, -3.0).requires_grad_()
        losses.append((*in_parts(rows, leaf, coef, [[*range(8)]]), leaf.grad))
    assert losses[0][:2] == losses[1][:2] and torch.equal(losses[0][2], losses[1][2])


def check_update(rank: int, world_size: int, folder: Path) -> None:
    exchange, layout, config = Exchange(dist.group.WORLD), Layout((0, 1)), with_coef(COEF)
    fields = components_of(config)["actor"].training.fields
    assert "scores" in fields and "scores" not in components_of(with_coef(0.0))["actor"].training.fields
    every = scored_rows(read_architecture(folder).vocab_size)
    batch = at_owners(exchange, every)
    engine = make_engine(folder, Case(layout, max_tokens=12), build_groups({"actor": layout}, seed=0)["actor"], "actor")
    before = engine.forward(every)["log_probs"]
    scattered = Component("actor", SPEC, layout, exchange, engine).scatter(batch)
    scattered.scatter_fields(batch, fields)
    update_actor(scattered, config)
    steps = exchange.all_gather(scattered.optimizer_steps)
    found = training_metrics(merge_optimizer_steps(steps, "actor"), "actor")["actor/positive_nll_loss"]
    own = {row for row in scattered.batch.rows.ids.tolist() if row in CORRECT}
    assert own and own != set(CORRECT), "both ranks have correct responses"
    assert found == pytest.approx(plain_nll(before, every), rel=1e-4)


def test_an_update_counts_the_correct_responses_of_all_ranks(tmp_path: Path) -> None:
    run_ranks(2, check_update, hf_folder(tmp_path / "hf", "qwen2"))

"""Training with given experts, against Hugging Face's model with its routers patched to choose them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest
import torch
from hf_training import assert_outputs, hf_train, shard_of
from ppo_engines import LENGTHS, Case, exported, make_engine, make_loss, make_rows
from slow import slow_ones
from spawn import run_ranks
from tiny_models import hf_folder
from tiny_shapes import DEEPSEEK_V3, EXPERTS, GPT_OSS

from megappo.architecture.parsing import read_architecture
from megappo.batch.rows import Rows
from megappo.config.model_sections import Router
from megappo.errors import ActionableError
from megappo.models.routing import ModelRouting
from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout

TWO, FOUR = (0, 1), (0, 1, 2, 3)
CASES = {
    "one rank, small micro-batches": Case(Layout((0,)), max_tokens=9),
    "tp2 sp": Case(Layout(TWO, tensor=2), sequence=True, max_tokens=14),
    "pp2, full recompute": Case(Layout(TWO, pipeline=2), recompute="full", max_tokens=9),
    "pp2 vpp2, full recompute": Case(Layout(TWO, pipeline=2, virtual_pipeline=2), recompute="full", max_tokens=9),
    "ep2": Case(Layout(TWO, expert=2), max_tokens=9),
    "cp2": Case(Layout(TWO, context=2), max_tokens=14),
    "etp2": Case(Layout(TWO, expert_tensor=2), max_tokens=9),
    "ep2 pp2, full recompute": Case(Layout(FOUR, pipeline=2, expert=2), recompute="full", max_tokens=9),
    "cp2 tp2 sp": Case(Layout(FOUR, tensor=2, context=2), sequence=True, max_tokens=20),
}
MANY = {"num_experts_per_tok": 2, "moe_intermediate_size": 4, "num_hidden_layers": 2}
UNKNOWN = 5
"""Every n-th token has no choice."""


def choices_of(rows: Rows, num_layers: int, num_experts: int, top_k: int) -> torch.Tensor:
    """Return random experts, [T, layers, top_k], which no router chose; -1 for tokens without a choice."""
    generator = torch.Generator().manual_seed(5)
    scores = torch.rand(len(rows.input_ids), num_layers, num_experts, generator=generator)
    choices = scores.argsort(dim=-1)[..., :top_k]
    choices[::UNKNOWN] = -1
    return choices


def patch_routers(model: torch.nn.Module, rows: Rows, *, counts: torch.Tensor, top_k: int) -> None:
    """Make Hugging Face's routers take `choices_of`, and count the tokens of experts of each layer in passes without
    gradients. The model gets one row after the other, again and again."""
    choices = choices_of(rows, *counts.shape, top_k)
    routers = [module for name, module in model.named_modules() if name.endswith(("mlp.gate", "mlp.router"))]
    assert len(routers) == len(counts)
    for layer, router in enumerate(routers):
        by_row = cycle(choices[:, layer].split(rows.lengths.tolist()))
        scaling = getattr(router, "routed_scaling_factor", None)
        router.register_forward_hook(partial(_choose, by_row, counts[layer], scaling))


def _choose(by_row, counts, scaling, router, inputs, outputs):
    logits, _, own = outputs
    given = next(by_row)
    chosen = torch.where(given >= 0, given, own)
    if not torch.is_grad_enabled():
        counts += chosen.flatten().bincount(minlength=len(counts))
    if scaling is None:  # softmax over all experts
        weights = logits.softmax(-1).gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen
    weights = logits.sigmoid().gather(1, chosen)
    return logits, scaling * weights / weights.sum(-1, keepdim=True), chosen


def _replays(rank: int, world_size: int, folder: Path, name: str, expected: dict) -> None:
    case, architecture = CASES[name], read_architecture(folder)
    engine = make_engine(folder, case, build_groups({"actor": case.layout}, seed=0)["actor"], "actor")
    experts = architecture.experts
    num_layers = architecture.num_layers - experts.num_dense_layers
    engine.routing = ModelRouting(engine.chunks, engine.groups, "actor", Router(), replays=True)
    plain = make_rows(architecture.vocab_size)
    choices = choices_of(plain, num_layers, experts.count, experts.top_k)
    numbers = (choices + 1).to(torch.uint8 if experts.count <= 256 else torch.int16).flatten(1)
    assert numbers.view(torch.uint8).shape[1] == architecture.choice_bytes
    rows = replace(plain, fields=plain.fields | {"expert_choices": numbers.view(torch.uint8)})
    mine = shard_of(rows, case.layout)
    if world_size == 1:
        of_another_version = torch.zeros_like(rows.fields["expert_choices"]).repeat(1, 2)
        with pytest.raises(ActionableError, match="record or sample them again"):
            engine.forward(replace(plain, fields=plain.fields | {"expert_choices": of_another_version}))
    assert_outputs(engine, rows, mine, expected["outputs"])
    loads = []
    for norm in expected["grad_norms"]:
        step = engine.train_batch(rows.select(mine), make_loss("actor", rows))
        assert step.grad_norm == pytest.approx(norm, rel=2e-5)
        assert 0.5 < step.metrics["actor/routing_diff_frac"].value <= 1, "random choices are rarely the routers' own"
        loads.append([step.metrics[f"actor/{name}"].value for name in ("expert_load_max", "expert_rank_load_max")])
    assert loads[0] == pytest.approx([expected["load"], expected["rank load"]])
    found = exported(engine, architecture, "actor")
    for key, parameter in expected["parameters"].items():
        torch.testing.assert_close(found[key], parameter, rtol=0, atol=2e-5, msg=f"{key} differs from Hugging Face's")
    replayed, own = (engine.forward(one.select(mine)) for one in (rows, plain))
    assert not own or (own["log_probs"] - replayed["log_probs"]).abs().max() > 0.01, "without choices routers choose"


def check(folder: Path, name: str) -> None:
    architecture = read_architecture(folder)
    experts = architecture.experts
    counts = torch.zeros(architecture.num_layers - experts.num_dense_layers, experts.count)
    choose: Callable = partial(patch_routers, counts=counts, top_k=experts.top_k)
    expected = hf_train(folder, "actor", None, num_steps=2, lengths=LENGTHS, choose=choose)
    expected["load"] = float((counts.max(dim=1).values / counts.mean(dim=1)).mean())
    of_ranks = [float(counts[:, part].sum()) for part in torch.arange(experts.count).chunk(CASES[name].layout.expert)]
    expected["rank load"] = max(of_ranks) * len(of_ranks) / sum(of_ranks)
    run_ranks(len(CASES[name].layout.ranks), _replays, folder, name, expected)


@pytest.mark.parametrize("name", slow_ones(CASES, CASES.keys() - {"pp2, full recompute"}))
def test_the_given_experts_are_trained_as_hugging_face_does(name: str, tmp_path: Path) -> None:
    check(hf_folder(tmp_path / "hf", "deepseek_v3", **DEEPSEEK_V3), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cp2 tp2 sp", "ep2 pp2, full recompute"])
def test_so_are_those_of_a_softmax(name: str, tmp_path: Path) -> None:
    check(hf_folder(tmp_path / "hf", "qwen3_moe", **EXPERTS, norm_topk_prob=True), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cp2", "ep2 pp2, full recompute"])
def test_so_are_those_of_gpt_oss(name: str, tmp_path: Path) -> None:
    check(hf_folder(tmp_path / "hf", "gpt_oss", **GPT_OSS), name)


@pytest.mark.parametrize("num_experts", [256, pytest.param(260, marks=pytest.mark.slow)])
def test_as_many_experts_as_a_byte_can_number_and_more(num_experts: int, tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", "qwen3_moe", **MANY | {"num_experts": num_experts}, norm_topk_prob=True)
    check(folder, "one rank, small micro-batches")

"""Training of adapters against Hugging Face's model, whose weights torch parametrizes, in layouts of every kind."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hf_training import ByRow, hf_train
from ppo_engines import (
    HEADS,
    LENGTHS,
    Case,
    exported,
    exported_adapters,
    make_engine,
    make_loss,
    make_rows,
    with_score,
)
from safetensors.torch import load_file
from slow import slow_ones
from spawn import run_ranks
from tiny_models import hf_folder

from megappo.architecture.parsing import read_architecture
from megappo.batch.balance import balanced_partitions
from megappo.config.schema import Lora
from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout

LORA = Lora(rank=3, alpha=5.0)
SOME = Lora(rank=2, target_modules=("v_proj", "up_proj"))
TWO, FOUR = (0, 1), (0, 1, 2, 3)
CASES = {
    "one rank": Case(Layout((0,)), max_tokens=9, lora=LORA),
    "one rank, some modules, full recompute": Case(Layout((0,)), recompute="full", lora=SOME),
    "tp2": Case(Layout(TWO, tensor=2), lora=LORA),
    "tp2 sp": Case(Layout(TWO, tensor=2), sequence=True, max_tokens=14, lora=LORA),
    "dp2": Case(Layout(TWO), max_tokens=12, lora=LORA),
    "cp2 tp2 sp, full recompute": Case(
        Layout(FOUR, tensor=2, context=2), sequence=True, max_tokens=20, recompute="full", lora=LORA
    ),
    "tp2 pp2 vpp2 sp": Case(
        Layout(FOUR, tensor=2, pipeline=2, virtual_pipeline=2), sequence=True, max_tokens=14, lora=LORA
    ),
    "pp2, full recompute": Case(Layout(TWO, pipeline=2), max_tokens=9, recompute="full", lora=LORA),
}


def _matches(rank: int, world_size: int, folder: Path, name: str, kind: str, expected: dict) -> None:
    case = CASES[name]
    engine = make_engine(folder, case, build_groups({kind: case.layout}, seed=0)[kind], kind)
    architecture = replace(read_architecture(folder, HEADS[kind]), lora=case.lora)
    rows = make_rows(architecture.vocab_size)
    lengths = [len(tokens) for tokens in rows.input_ids]
    mine = balanced_partitions(lengths, case.layout.data)[case.layout.shard_of(dist.get_rank())]
    _assert_outputs(engine.forward(rows.select(mine)), mine, expected["outputs"])
    for norm in expected["grad_norms"]:
        assert engine.train_batch(rows.select(mine), make_loss(kind, rows)).grad_norm == pytest.approx(norm, rel=2e-5)
    merged, adapters = exported(engine, architecture, kind), exported_adapters(engine, architecture)
    found = adapters | {key: merged[key] for key in merged if key == "score.weight"}
    assert found.keys() == expected["parameters"].keys()
    for key, parameter in expected["parameters"].items():
        torch.testing.assert_close(found[key], parameter, rtol=0, atol=2e-5, msg=f"{key} differs")
    base = load_file(folder / "model.safetensors")
    for key in merged.keys() - {"score.weight"}:
        a, b = (adapters.get(f"{key.removesuffix('.weight')}.lora_{name}.weight") for name in "AB")
        weight = base[key] if a is None else base[key] + case.lora.alpha / case.lora.rank * b @ a
        torch.testing.assert_close(
            merged[key], weight, rtol=0, atol=0 if a is None else 1e-6, msg=f"{key} is not merged"
        )


def _assert_outputs(outputs: dict[str, torch.Tensor], mine: list[int], expected: ByRow) -> None:
    for name in outputs:
        for row, position in enumerate(mine):
            reference = expected[name][position]
            torch.testing.assert_close(outputs[name][row].view(-1)[: len(reference)], reference, rtol=1e-5, atol=1e-5)


def check(name: str, kind: str, folder: Path) -> None:
    expected = hf_train(folder, kind, None, num_steps=2, lengths=LENGTHS, lora=CASES[name].lora)
    run_ranks(len(CASES[name].layout.ranks), _matches, folder, name, kind, expected)


@pytest.mark.parametrize("name", slow_ones(CASES, ["tp2", "dp2", "pp2, full recompute"]))
def test_actor_trains_as_hugging_face_does(name: str, tmp_path: Path) -> None:
    check(name, "actor", hf_folder(tmp_path / "hf", "qwen2", tie_word_embeddings="pp2" not in name))


@pytest.mark.parametrize(("name", "kind"), [("tp2 sp", "critic"), ("tp2 sp", "shared")])
def test_value_heads_are_trained_beside_adapters(name: str, kind: str, tmp_path: Path) -> None:
    check(name, kind, with_score(hf_folder(tmp_path / "hf", "llama")))

"""Models with vision towers: outputs, gradients and updates against transformers, in layouts of every kind."""

import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hf_training import assert_outputs, hf_train, shard_of
from ppo_engines import Case, exported, hf_outputs, make_engine, make_loss, make_rows, with_score
from spawn import run_ranks
from tiny_shapes import SHAPE
from transformer_engine_stub import call
from vision_rows import PATCH_NUMBERS, TOKENS, VISION, Pictures, Seeing, vision_folder, vision_rows

from megappo.architecture.parsing import read_architecture
from megappo.architecture.vision import unnested_name
from megappo.batch.image_layout import lay_out_images
from megappo.batch.images import Image
from megappo.models import vision_tower
from megappo.models.packed_attention import PackedAttention
from megappo.models.vision_tower import towers
from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout

TWO, FOUR = (0, 1), (0, 1, 2, 3)
CASES = {
    "one rank, small micro-batches": Case(Layout((0,)), max_tokens=20),
    "tp2": Case(Layout(TWO, tensor=2)),
    "tp2 sp, full recompute": Case(Layout(TWO, tensor=2), sequence=True, max_tokens=36, recompute="full"),
    "cp2": Case(Layout(TWO, context=2), max_tokens=36),
    "pp2, full recompute": Case(Layout(TWO, pipeline=2), max_tokens=20, recompute="full"),
    "dp2": Case(Layout(TWO), max_tokens=20),
    "cp2 tp2 sp": Case(Layout(FOUR, tensor=2, context=2), sequence=True, max_tokens=40),
    "cp2 pp2, full recompute": Case(Layout(FOUR, pipeline=2, context=2), recompute="full", max_tokens=20),
    "pp2 vpp2": Case(Layout(TWO, pipeline=2, virtual_pipeline=2), max_tokens=20),
}
DEEP = {"pp2 vpp2": {"num_hidden_layers": 8}}
"""Deepstack's features are added in the first chunk alone."""


def _matches(rank: int, world_size: int, folder: Path, name: str, kind: str, expected: dict) -> None:
    case = CASES[name]
    groups = build_groups({kind: case.layout}, seed=0)[kind]
    engine = make_engine(folder, case, groups, kind)
    engine.image_source = source = Pictures()
    rows = vision_rows()
    mine = shard_of(rows, case.layout)
    assert_outputs(engine, rows, mine, expected["outputs"])
    for norm in expected["grad_norms"]:
        step = engine.train_batch(rows.select(mine), make_loss(kind, rows))
        assert step.grad_norm == pytest.approx(norm, rel=2e-5)
    is_first = groups.collection.pp.rank() == 0
    assert len(source.made) == len(set(source.made)), "each image goes through the tower once"
    assert bool(source.made) <= is_first
    found = {unnested_name(key): one for key, one in exported(engine, read_architecture(folder), kind).items()}
    assert found.keys() == expected["parameters"].keys()
    for key, parameter in expected["parameters"].items():
        torch.testing.assert_close(found[key], parameter, rtol=0, atol=2e-5, msg=f"{key} differs from transformers'")


KIND_OF = {"tp2": "critic", "pp2, full recompute": "critic", "cp2": "shared"}
SHOWN = {
    ("qwen3_vl", name)
    for name in ("one rank, small micro-batches", "tp2 sp, full recompute", "cp2", "pp2, full recompute")
} | {("qwen2_5_vl", "tp2")}
ALL = [(family, name) for family in VISION for name in CASES]


@pytest.mark.parametrize(
    ("family", "name"), [pytest.param(*one, marks=() if one in SHOWN else pytest.mark.slow) for one in ALL]
)
def test_models_with_images_train_as_transformers_does(family: str, name: str, tmp_path: Path) -> None:
    kind = KIND_OF.get(name, "actor")
    folder = vision_folder(tmp_path / "hf", family, **DEEP.get(name, {}))
    if kind != "actor":
        with_score(folder)
    expected = hf_train(folder, kind, None, 2, (), model=Seeing(folder), rows=vision_rows())
    run_ranks(len(CASES[name].layout.ranks), _matches, folder, name, kind, expected)


class Watched(Pictures):
    """One image for each prompt; notes the bytes of pixels that are alive together."""

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.most = 0, 0

    def images(self, record: tuple[int, int]) -> list[Image]:
        return [Image(3, (1, 4, 6), (*record, 0))]

    def pixels(self, image: Image) -> torch.Tensor:
        made = super().pixels(image)
        self.alive += made.nbytes
        self.most = max(self.most, self.alive)
        weakref.finalize(made, self.forget, made.nbytes)
        return made

    def forget(self, num_bytes: int) -> None:
        self.alive -= num_bytes


def memory_of_images(rank: int, world_size: int, folder: Path) -> None:
    case = Case(Layout((0,)), max_tokens=40)
    engine = make_engine(folder, case, build_groups({"actor": case.layout}, seed=0)["actor"], "actor")
    [tower] = towers(engine.chunks)
    features, passed, most = tower.features, [], []
    tower.features = lambda *given: passed.append(features(*given)) or passed[-1]
    for count in (4, 32):
        rows = make_rows(TOKENS["image_token_id"], [(11, 4)] * count)
        records = torch.stack((torch.full((count,), float(count)), torch.arange(count).float()), dim=1)
        tokens = rows.input_ids.view(count, 15).clone()
        tokens[:, 3:9] = TOKENS["image_token_id"]
        rows = replace(rows, input_ids=tokens.flatten(), fields=rows.fields | {"prompt_records": records})
        engine.image_source = source = Watched()
        kept_bytes = 4 * 6 * 3 * SHAPE["hidden_size"] * 4  # of four images: 6 tokens, deepstack twice, fp32
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vision_tower, "KEPT_BYTES", kept_bytes)
            engine.train_batch(rows, make_loss("actor", rows))
        assert len(source.made) == count and source.alive == 0
        kept = sum(one.nbytes for one in tower._kept.values())
        most.append((source.most, max(one.nbytes for one in passed), kept))
        passed.clear()
    print(f"bytes of pixels, of a micro-batch's features and of kept features with 4 and 32 images: {most}")
    assert most[0] == most[1] and most[0][0] == 24 * PATCH_NUMBERS * 4, "pixels of one image at a time"


def test_memory_does_not_grow_with_the_images_of_a_step(tmp_path: Path) -> None:
    run_ranks(1, memory_of_images, vision_folder(tmp_path / "hf", "qwen3_vl"))


def check_layers_of_transformer_engine(root: str) -> None:
    from transformer_engine_computed import compute

    compute()
    groups = build_groups({"actor": Layout((0,))}, seed=0)["actor"]
    rows = vision_rows()
    for family in VISION:
        engine = make_engine(Path(root, family), Case(Layout((0,)), max_tokens=36), groups, "actor")
        assert not isinstance(engine.chunks[0].decoder.layers[0].self_attention.core_attention, PackedAttention)
        engine.image_source = Pictures()
        found = engine.forward(rows)["log_probs"]
        with torch.no_grad():
            expected = hf_outputs(Seeing(Path(root, family)), None, rows)
        for row, (log_probs, _) in enumerate(expected):
            torch.testing.assert_close(found[row, : len(log_probs)], log_probs, rtol=1e-4, atol=1e-4)


@pytest.mark.slow  # starts a process with TransformerEngine's Python
@pytest.mark.xdist_group("transformer_engine")
def test_layers_of_transformer_engines_rotate_by_the_positions_of_images(tmp_path: Path) -> None:
    for family in VISION:
        vision_folder(tmp_path / family, family)
    call(check_layers_of_transformer_engine, tmp_path)


def test_rows_that_are_not_of_their_images_are_refused(tmp_path: Path) -> None:
    rows = vision_rows()
    vision = read_architecture(vision_folder(tmp_path / "hf", "qwen3_vl")).vision
    starts = torch.cat((torch.zeros(1), rows.lengths.cumsum(0))).long()
    moved = replace(rows, fields=rows.fields | {"prompt_records": torch.tensor([[0.0, 1.0]] * len(rows))})
    with pytest.raises(ValueError, match=r"image \(0, 1, 0\) .* has other tokens than its 4 of 87 from token 0"):
        lay_out_images(moved, starts, vision, Pictures())
    positions, slots, images = lay_out_images(replace(rows, fields={}), starts, vision, Pictures())
    assert images == [] and (slots == -1).all()
    assert (positions == positions[0]).all() and positions.max() == rows.lengths.max() - 1

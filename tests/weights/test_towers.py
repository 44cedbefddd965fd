"""Vision towers in folders, exports and critics: equal to the bit there and back, and never changed."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from layouts import parallel_of
from safetensors.torch import load_file, save_file
from spawn import run_ranks
from transformers import AutoModelForImageTextToText
from vision_rows import VISION, Pictures, vision_folder

from megappo.architecture.families import HeadKind
from megappo.architecture.parameters import tower_size
from megappo.architecture.parsing import read_architecture
from megappo.architecture.vision import unnested_name
from megappo.config.schema import Model
from megappo.errors import ActionableError
from megappo.lab.estimate.seconds import num_exported
from megappo.models import vision_tower
from megappo.models.gpt import ModelChunks, build_model
from megappo.models.sharding import sharded_chunks
from megappo.models.vision_tower import VisionTower, tower_of
from megappo.placement.groups import ComponentGroups, build_groups
from megappo.placement.layout import Layout
from megappo.weights.export import Export
from megappo.weights.hf_folder import write_hf_folder
from megappo.weights.load import critic_architecture, folder_shapes, load_hf

LAYOUTS = {"TP2": Layout((0, 1), tensor=2), "PP2": Layout((0, 1), pipeline=2)}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def load(folder: Path, groups: ComponentGroups, dtype: str = "fp32", head: HeadKind = "policy") -> ModelChunks:
    architecture = read_architecture(folder, head)
    sizes = Model(path=str(folder), dtype=dtype), parallel_of(groups.layout)
    chunks = build_model(architecture, *sizes, groups, recompute="none", trained=True)
    load_hf(chunks, folder, architecture, groups)
    return chunks


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def round_trips(rank: int, world_size: int, folder: Path, dtype: str) -> None:
    all_groups = build_groups(LAYOUTS, seed=0)
    architecture = read_architecture(folder)
    own = {unnested_name(name): tensor for name, tensor in tensors_of(folder).items()}
    assert folder_shapes(folder, architecture) == {name: tuple(tensor.shape) for name, tensor in own.items()}
    for name, groups in all_groups.items():
        chunks = load(folder, groups, dtype)
        export = Export(chunks, architecture, groups)
        assert len(export.tensors) == num_exported(architecture), "as plan counts them"
        assert {one.name for one in export.tensors if one.is_frozen} == {
            key for key in own if key.startswith("visual.")
        }
        assert_equal(dict(pair for bucket in export.buckets(8_000) for pair in bucket), own)
        assert not any("visual" in key for state in sharded_chunks(chunks, groups).values() for key in state)
        write_hf_folder(chunks, architecture, groups, folder, folder.with_name(f"{folder.name} {name}"))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen2_5_vl", "bf16"), ("qwen3_vl", "bf16"), pytest.param("qwen3_vl", "fp32", marks=pytest.mark.slow)],
)
def test_folders_are_equal_to_the_bit_there_and_back(family: str, dtype: str, tmp_path: Path) -> None:
    folder = vision_folder(tmp_path / "hf", family, {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])
    run_ranks(2, round_trips, folder, dtype)
    config = json.loads((folder / "config.json").read_text())
    for name in LAYOUTS:
        back = tmp_path / f"hf {name}"
        assert_equal(tensors_of(back), tensors_of(folder))
        written = json.loads((back / "config.json").read_text())
        sections = ("text_config", "vision_config")
        assert [written.pop(key)["dtype"] for key in sections] == [config["dtype"]] * 2
        assert written.pop("torch_dtype") == config["dtype"]
        assert written == {key: value for key, value in config.items() if key not in sections}
    _, info = AutoModelForImageTextToText.from_pretrained(back, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def critics(rank: int, world_size: int, folder: Path, whole: Path) -> None:
    groups = build_groups({"PP2": LAYOUTS["PP2"]}, seed=0)["PP2"]
    architecture = critic_architecture(folder)
    write_hf_folder(load(folder, groups, head="value"), architecture, groups, folder, whole)
    again = critic_architecture(whole)
    assert again.vision.sizes.items() >= architecture.vision.sizes.items() and again.name == architecture.name
    chunks = load(whole, groups, head="value")
    found = dict(pair for bucket in Export(chunks, again, groups).buckets(8_000) for pair in bucket)
    written = {unnested_name(name): tensor for name, tensor in tensors_of(whole).items()}
    assert not written.pop("score.bias").any()
    assert_equal(found, written)
    of_folder = {unnested_name(name): tensor for name, tensor in tensors_of(folder).items()}
    assert_equal(
        {name: one for name, one in written.items() if name != "score.weight"},
        {name: one for name, one in of_folder.items() if name != "lm_head.weight"},
    )


@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)])
def test_a_critics_folder_has_the_tower(family: str, tmp_path: Path) -> None:
    run_ranks(2, critics, vision_folder(tmp_path / "hf", family), tmp_path / "critic")


def damaged(rank: int, world_size: int, folder: Path) -> None:
    groups = build_groups({"one": Layout((0,))}, seed=0)["one"]
    with pytest.raises(ActionableError, match=r"lacks visual\.merger\.mlp\.2\.weight of its vision tower"):
        load(folder, groups)


def test_a_tower_that_lacks_a_tensor_is_refused_by_its_name(tmp_path: Path) -> None:
    folder = vision_folder(tmp_path / "hf", "qwen2_5_vl")
    tensors = tensors_of(folder)
    tensors["visual.further"] = tensors.pop("visual.merger.mlp.2.weight")
    save_file(tensors, folder / "model.safetensors")
    run_ranks(1, damaged, folder)


@pytest.mark.parametrize("family", VISION)
def test_nested_and_other_names_are_read_alike(family: str, tmp_path: Path) -> None:
    folder = vision_folder(tmp_path / "hf", family)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    tensors = tensors_of(folder)
    is_nested = any(name.startswith("model.language_model.") for name in tensors)
    assert is_nested == (family == "qwen3_vl")
    for own, nested in (("visual.", "model.visual."), ("model.", "model.language_model.")):
        for name in list(tensors):
            old, new = (nested, own) if is_nested else (own, nested)
            if name.startswith(old) and not (own == "model." and name.startswith("model.visual.")):
                tensors[new + name.removeprefix(old)] = tensors.pop(name)
    save_file(tensors, other / "model.safetensors")
    assert tensors_of(other).keys() != tensors_of(folder).keys()
    shapes = [folder_shapes(one, read_architecture(one)) for one in (folder, other)]
    assert shapes[0] == shapes[1]


def test_models_of_a_folder_share_a_tower_that_keeps_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture = read_architecture(vision_folder(tmp_path / "hf", "qwen3_vl"))
    tower = tower_of(architecture, torch.float32)
    assert tower is tower_of(architecture.with_head("value"), torch.float32)
    assert tower is not tower_of(architecture, torch.bfloat16)
    assert sum(one.numel() for _, one in tower.named_parameters()) == tower_size(architecture)
    source = Pictures()
    first, second = source.images((0, 1))
    both = tower.features([first, second], source)
    assert both.shape == (8, 3 * 32), "embeddings, and deepstack's features of two layers"
    assert torch.equal(torch.cat([tower.features([one], source) for one in (first, second)]), both)
    assert source.made == [first.key, second.key]
    monkeypatch.setattr(vision_tower, "KEPT_BYTES", both[:5].nbytes)  # room for one
    third = replace(first, key=(0, 1, 9))
    tower.features([third, first], source)
    tower.features([first], source)
    assert source.made[2:] == [third.key], "what was used last is kept"
    tower.features([second], source)
    assert source.made[3:] == [second.key]


def test_a_tower_computes_in_the_weights_dtype_with_frequencies_in_fp32(tmp_path: Path) -> None:
    tower = VisionTower(read_architecture(vision_folder(tmp_path / "hf", "qwen2_5_vl")), torch.bfloat16)
    assert {one.dtype for one in tower.module.parameters()} == {torch.bfloat16}
    assert {one.dtype for one in tower.module.buffers()} == {torch.float32}
    source = Pictures()
    assert tower.features(source.images((0, 0)), source).dtype == torch.bfloat16

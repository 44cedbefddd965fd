"""Folders written from a trained model, read back by transformers."""

import json
from pathlib import Path

import pytest
import tiny_models
import torch
import torch.distributed as dist
from exported_adapters import ALPHA, RANK, check_merged, exported_adapters
from safetensors.torch import load_file
from spawn import run_ranks
from tiny_folders import hf_folder, load, read_config
from tiny_shapes import MIXTURES, VARIANTS
from transformers import AutoModelForCausalLM

from megappo.architecture.parsing import read_architecture
from megappo.config.model_sections import Lora
from megappo.config.schema import Model
from megappo.config.sections import Parallel
from megappo.models.gpt import build_model
from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout
from megappo.weights.buckets import into_buckets, num_bytes, views
from megappo.weights.export import Export
from megappo.weights.hf_folder import staged, write_adapters, write_hf_folder
from megappo.weights.load import load_hf


def write_scaled(rank: int, world_size: int, source: Path, target: Path) -> None:
    """Export the model with every weight doubled, from TP2 on two of the three ranks, PP2 in the second case.

    The second one has a value head besides, which no one but the trainer may see.
    """
    layouts = {"TP2": Layout((1, 2), tensor=2), "PP2xDP1": Layout((0, 2), pipeline=2)}
    groups = build_groups(layouts, seed=0)
    for name in layouts:
        if not groups[name].member:
            continue
        chunks = load(source, groups[name], head="policy" if name == "TP2" else "policy_value")
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.data.mul_(2)
        write_hf_folder(
            chunks,
            read_architecture(source),
            groups[name],
            source,
            target / name,
            bucket_bytes=5_000,
            max_shard_bytes=30_000,
        )
        assert (target / name / "config.json").is_file()


def test_transformers_reads_what_was_written(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "source", "qwen2", tie_word_embeddings=True, head_dim=8)
    config = read_config(source)
    (source / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    (source / "tokenizer.json").write_text('{"a": 1}')
    stale = tmp_path / "target" / "TP2"
    stale.mkdir(parents=True)
    (stale / "model.safetensors").write_text("an older export")
    left_over = tmp_path / "target" / "PP2xDP1.tmp"
    left_over.mkdir()
    (left_over / "part-7.safetensors").write_text("an export that was cut short")
    run_ranks(3, write_scaled, source, tmp_path / "target")

    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).state_dict()
    assert sorted(path.name for path in (tmp_path / "target").iterdir()) == ["PP2xDP1", "TP2"]
    for folder in (tmp_path / "target").iterdir():
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert model.dtype == torch.float32
        for key, tensor in model.state_dict().items():
            assert torch.equal(tensor, original[key] * 2), key
        assert (folder / "tokenizer.json").read_text() == '{"a": 1}'
        assert (folder / "generation_config.json").is_file()
        files = sorted(folder.glob("*.safetensors"))
        assert len(files) > 2 and files[0].name.startswith("model-00001-of-")
        assert "lm_head.weight" not in {name for file in files for name in load_file(file)}


def write_adapted(rank: int, world_size: int, source: Path, target: Path, modules: tuple[str, ...]) -> None:
    lora = Lora(rank=RANK, alpha=ALPHA, target_modules=modules)
    architecture, parallel = read_architecture(source).with_lora(lora), Parallel(tensor=2)
    groups = build_groups({"actor": Layout((0, 1), tensor=2)}, seed=0)["actor"]
    model = Model(path=str(source), dtype="fp32")
    chunks = build_model(architecture, model, parallel, groups, recompute="none", trained=True)
    load_hf(chunks, source, architecture, groups)
    for name, parameter in chunks[0].named_parameters():
        if name.endswith(".b"):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    write_hf_folder(chunks, architecture, groups, source, target)


@pytest.mark.parametrize("modules", [("q_proj", "down_proj", "gate_proj", "up_proj"), ("up_proj",)])
def test_adapters_of_matrices_that_files_stack_are_one(modules: tuple[str, ...], tmp_path: Path) -> None:
    source = tiny_models.hf_folder(tmp_path / "source", "glm4", **VARIANTS["glm4"])
    run_ranks(2, write_adapted, source, tmp_path / "target", modules)
    check_merged(tmp_path / "target", source)
    adapted = {name.split(".")[-3] for name in exported_adapters(tmp_path / "target")}
    assert adapted == {*modules} - {"gate_proj", "up_proj"} | {"gate_up_proj"}


def test_adapters_are_written_for_whoever_may_read_other_files(tmp_path: Path) -> None:
    matrix, folder = torch.arange(6.0).view(3, 2).t(), tmp_path / "adapter"
    folder.mkdir()
    write_adapters(folder, [("model.layers.0.mlp.up_proj.lora_A.weight", matrix)], Lora(), "base")
    found = load_file(folder / "adapter_model.safetensors")
    assert torch.equal(found["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"], matrix)
    modes = {path.name: path.stat().st_mode for path in folder.iterdir()}
    assert modes["adapter_model.safetensors"] == modes["adapter_config.json"]


# Layout of four ranks -> ranks that an export needs: the first replica, and who has experts that its ranks lack.
NEEDED = {
    "DP4": (Layout((0, 1, 2, 3)), {0}),
    "TP2xDP2": (Layout((0, 1, 2, 3), tensor=2), {0, 1}),
    "PP2xDP2": (Layout((0, 1, 2, 3), pipeline=2), {0, 2}),
    "EP2xDP4": (Layout((0, 1, 2, 3), expert=2), {0, 1}),
    "TP2xEP2": (Layout((0, 1, 2, 3), tensor=2, expert=2), {0, 1}),
    "TP2xEP4": (Layout((0, 1, 2, 3), tensor=2, expert=4), {0, 1, 2, 3}),
    "PP2xEP2": (Layout((0, 1, 2, 3), pipeline=2, expert=2), {0, 1, 2, 3}),
}


def write_from_few(rank: int, world_size: int, source: Path, target: Path) -> None:
    groups = build_groups({name: layout for name, (layout, _) in NEEDED.items()}, seed=0)
    for name, (_, needed) in NEEDED.items():
        model = load(source, groups[name])
        assert Export(model, read_architecture(source), groups[name], full_tensor_ranks={0}).participates == (
            rank in needed
        ), name
        write_hf_folder(model, read_architecture(source), groups[name], source, target / name, max_shard_bytes=30_000)
        assert (target / name / "config.json").is_file()


def give_to_some(rank: int, world_size: int, source: Path) -> None:
    """The ranks that need the tensors get them bit for bit, and no rank waits for one that does not take part."""
    layouts = {name: layout for name, (layout, _) in NEEDED.items()}
    layouts["TP2xPP2"] = Layout((0, 1, 2, 3), tensor=2, pipeline=2)
    layouts["TP2xETP2"] = Layout((0, 1, 2, 3), tensor=2, expert_tensor=2, expert=2)
    expected = {name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for name, groups in build_groups(layouts, seed=0).items():
        model = load(source, groups)
        for needing in ({0}, {3}, {1, 2}, {0, 2}, {0, 1, 3}, {0, 1, 2, 3}, set()):
            export = Export(model, read_architecture(source), groups, full_tensor_ranks=needing)
            if not export.participates:
                assert rank not in needing
                continue
            found = {}
            for bucket in into_buckets(export.tensors, 20_000):
                flat = torch.full((num_bytes(bucket),), 255, dtype=torch.uint8)  # NaN
                found |= dict(views(bucket, export.gather(bucket, flat)))
            assert found.keys() == expected.keys()
            if rank in needing:
                assert all(torch.equal(found[key], expected[key]) for key in expected), (name, needing)


def give_by_stage(rank: int, world_size: int, source: Path) -> None:
    """The first rank of each stage gets what its stage has, bit for bit, and all of them together everything, once."""
    layouts = {name: layout for name, (layout, _) in NEEDED.items()}
    layouts["TP2xPP2"] = Layout((0, 1, 2, 3), tensor=2, pipeline=2)
    expected = {name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for name, groups in build_groups(layouts, seed=0).items():
        stages = layouts[name].stages
        needing = [stage[0] for stage in stages]
        export = Export(
            load(source, groups), read_architecture(source), groups, full_tensor_ranks=needing, by_stage=True
        )
        own = [tensor for tensor in export.tensors if tensor.sender_index == export.sender_index]
        found = {}
        for bucket in into_buckets(own if export.participates else [], 20_000):
            found |= dict(views(bucket, export.gather(bucket)))
        if rank in needing:
            assert all(torch.equal(found[key], expected[key]) for key in found), name
        gathered: list[set[str]] = [set()] * world_size
        dist.all_gather_object(gathered, set(found) if rank in needing else set())
        assert sorted(key for keys in gathered for key in keys) == sorted(expected), name
        assert all(gathered[needed] for needed in needing), name


def test_each_stage_gathers_its_own(tmp_path: Path) -> None:
    run_ranks(4, give_by_stage, hf_folder(tmp_path / "source", "qwen3_moe", **MIXTURES["qwen3_moe"]))


def test_tensors_go_to_the_ranks_that_need_them(tmp_path: Path) -> None:
    run_ranks(4, give_to_some, hf_folder(tmp_path / "source", "qwen3_moe", **MIXTURES["qwen3_moe"]))


def test_only_ranks_that_are_needed_gather(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "source", "qwen3_moe", **MIXTURES["qwen3_moe"])
    run_ranks(4, write_from_few, source, tmp_path / "target")
    expected = {name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for name in NEEDED:
        files = sorted((tmp_path / "target" / name).glob("*.safetensors"))
        found = {key: tensor for file in files for key, tensor in load_file(file).items()}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected), name
        index = json.loads((tmp_path / "target" / name / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == {file.name for file in files}
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())


@pytest.mark.parametrize("is_dangling", [False, True])
def test_a_link_in_the_place_of_the_folder_is_replaced_and_its_target_stays(is_dangling: bool, tmp_path: Path) -> None:
    target, other = tmp_path / "hf_actor", tmp_path / "other"
    target.symlink_to(other)
    if not is_dangling:
        other.mkdir()
        (other / "mine").touch()
    with staged(target) as folder:
        (folder / "model").touch()
    assert [path.name for path in target.iterdir()] == ["model"] and not target.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf_actor", "other"][: 2 - is_dangling]
    assert is_dangling or [path.name for path in other.iterdir()] == ["mine"]

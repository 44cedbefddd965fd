"""Reading and writing folders of safetensors; the oracles are the safetensors library's own load_file and, for MXFP4,
transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megappo.errors import ActionableError
from megappo.weights.safetensors_io import INDEX, SINGLE, HFFolder, ShardedWriter, dequantize

TENSORS = {
    "a.weight": torch.arange(24.0).view(6, 4),
    "a.bias": torch.arange(6, dtype=torch.bfloat16),
    "b.weight": torch.arange(8.0).view(2, 4) + 100,
}


def write_sharded(folder: Path) -> Path:
    folder.mkdir()
    save_file({name: TENSORS[name] for name in ("a.weight", "a.bias")}, folder / "one.safetensors")
    save_file({"b.weight": TENSORS["b.weight"]}, folder / "two.safetensors")
    weight_map = {"a.weight": "one.safetensors", "a.bias": "one.safetensors", "b.weight": "two.safetensors"}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_reads_slices_of_one_file_and_of_shards(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / SINGLE)
    for folder in (tmp_path, write_sharded(tmp_path / "sharded")):
        with HFFolder(folder) as source:
            assert source.names() == set(TENSORS)
            assert source.shape("a.weight") == (6, 4)
            for name, tensor in TENSORS.items():
                assert source.read(name).dtype == tensor.dtype
                assert torch.equal(source.read(name), tensor)
            assert torch.equal(source.read("a.weight", 0, 2, 5), TENSORS["a.weight"][2:5])
            assert torch.equal(source.read("a.weight", 1, 1, 3), TENSORS["a.weight"][:, 1:3])
            assert source.read("a.weight", 0, 6, 6).shape == (0, 4)


def test_missing_folder_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ActionableError, match="nowhere"):
        HFFolder(tmp_path / "nowhere")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ActionableError, match=r"holds no model\.safetensors"):
        HFFolder(tmp_path)
    folder = write_sharded(tmp_path / "sharded")
    (folder / "two.safetensors").unlink()
    with pytest.raises(ActionableError, match=r"lacks two\.safetensors"):
        HFFolder(folder)


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
def test_a_truncated_file_is_named(tmp_path: Path, keep: float) -> None:
    file = write_sharded(tmp_path / "sharded") / "one.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(ValueError, match=r"one\.safetensors .* truncated"):
        HFFolder(file.parent)


def test_an_index_that_disagrees_with_its_files_is_refused(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "sharded")
    save_file({"other": torch.zeros(1)}, folder / "two.safetensors")
    with pytest.raises(ValueError, match=r"two\.safetensors lacks b\.weight, which .*index\.json lists"):
        HFFolder(folder)
    (folder / INDEX).write_text("{")
    with pytest.raises(ValueError, match=INDEX):
        HFFolder(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "../one.safetensors"}}))
    with pytest.raises(ValueError, match="its own folder"):
        HFFolder(folder)


def test_numbers_of_mxfp4_are_those_of_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (2, 6, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 135, blocks.shape[:-1], dtype=torch.uint8, generator=generator)
    expected = convert_moe_packed_tensors(blocks, scales)  # [experts, in, out]
    assert torch.equal(dequantize(blocks, scales), expected.transpose(1, 2))


def test_writer_makes_one_file_or_numbered_shards_with_an_index(tmp_path: Path) -> None:
    for name, limit, files in (("one", 10**6, 1), ("three", 1, 3), ("two", 110, 2)):
        folder = tmp_path / name
        folder.mkdir()
        writer = ShardedWriter(folder, limit)
        for pair in TENSORS.items():
            writer.add([pair])
        writer.finish()
        paths = sorted(folder.glob("*.safetensors"))
        assert len(paths) == files
        stored = {key: tensor for path in paths for key, tensor in load_file(path).items()}
        assert stored.keys() == TENSORS.keys()
        assert all(torch.equal(stored[key], TENSORS[key]) for key in TENSORS)
        assert (folder / INDEX).exists() == (files > 1)
        with HFFolder(folder) as source:
            assert source.names() == set(TENSORS)
    index = json.loads((tmp_path / "two" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())


def test_writer_takes_copies(tmp_path: Path) -> None:
    writer, tensor = ShardedWriter(tmp_path, 10**6), torch.ones(2)
    writer.add([("x", tensor)])
    tensor.zero_()
    writer.finish()
    assert torch.equal(load_file(tmp_path / SINGLE)["x"], torch.ones(2))

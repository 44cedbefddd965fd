"""Reading and writing Hugging Face folders of safetensors: lazily, and a bounded number of bytes at a time."""

import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from megappo.architecture.architecture import Architecture
from megappo.architecture.config_json import INDEX, SINGLE
from megappo.architecture.dtypes import DTYPES, dtype_name
from megappo.architecture.model_folder import tensor_files
from megappo.config.text_files import TextFileError
from megappo.errors import ActionableError

HEADER_BYTES = 256 * 2**10 - 8  # of a file that is written: some 1,500 tensors, which then start on a page


class WeightsError(ActionableError, ValueError):
    """A folder of weights that cannot be used: what is wrong with it, and the remedy."""


@dataclass(frozen=True)
class _Stored:
    """Place of a tensor: a tensor of a file or, with `expert`, rows [start, stop) of one expert's matrix in it."""

    file: str
    name: str
    expert: int | None = None
    start: int = 0
    stop: int = 0


class HFFolder(AbstractContextManager):
    """The tensors of a Hugging Face folder by name, of which only the requested slices are read.

    A context manager: the files stay open (memory-mapped) inside it.

    Args:
        architecture: its experts have one tensor for each matrix, even where the folder keeps the experts of a layer in
            two 3-D tensors. transformers 5 holds a mixture of experts so, and writes it so in its own format:

                mlp.experts.gate_up_proj [experts, 2 x ffn, hidden]     mlp.experts.down_proj [experts, hidden, ffn]
    Raises:
        WeightsError: the folder, its safetensors, or a file that its index names is missing, cannot be read, is damaged
            or truncated, or lacks a tensor that the index lists there; or a 3-D tensor has another shape than
            config.json gives.
    """

    def __init__(self, folder: str | Path, architecture: Architecture | None = None):
        self.folder = Path(folder)
        try:
            files = tensor_files(self.folder)
        except TextFileError as error:
            raise WeightsError(str(error)) from error
        self._stored = {name: _Stored(file, name) for name, file in files.items()}
        self._files = {file: safe_open(self.folder / file, framework="pt") for file in sorted(set(files.values()))}
        if architecture is not None and architecture.experts:
            for layer in range(architecture.num_layers):
                self._split_experts(f"model.layers.{layer}.", architecture)

    def __exit__(self, *error: object) -> None:
        self._files.clear()

    def rename(self, names: Mapping[str, str]) -> None:
        """Call tensors by other names from now on: `names` maps the file's name to the new one."""
        for old, new in names.items():
            self._stored[new] = self._stored.pop(old)

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the file's header."""
        stored, shape = self._stored[name], tuple(self._slice(name).get_shape())
        return shape if stored.expert is None else (stored.stop - stored.start, shape[2])

    def dtype(self, name: str) -> str:
        """Dtype of a tensor, as safetensors spells it: F32, BF16, ..."""
        return self._slice(name).get_dtype()

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements start:stop (default: all) of a tensor along dimension 0 or 1, on the CPU in the file's dtype."""
        stored, part = self._stored[name], slice(start, self.shape(name)[dim] if stop is None else stop)
        if stored.expert is None:
            return self._slice(name)[part] if dim == 0 else self._slice(name)[:, part]
        if dim == 1:
            return self._slice(name)[stored.expert, stored.start : stored.stop, part]
        return self._slice(name)[stored.expert, stored.start + part.start : stored.start + part.stop]

    def _slice(self, name: str) -> Any:
        stored = self._stored[name]
        return self._files[stored.file].get_slice(stored.name)

    def _split_experts(self, layer: str, architecture: Architecture) -> None:
        """Give each matrix of each expert of a layer its name in the format of the hub."""
        experts, names = architecture.experts, architecture.family.experts
        gate_up, down = f"{layer}mlp.experts.gate_up_proj", f"{layer}mlp.experts.down_proj"
        if gate_up not in self._stored:
            return
        ffn, hidden = experts.ffn_size, architecture.hidden_size
        self._check_shape(gate_up, (experts.count, 2 * ffn, hidden))
        self._check_shape(down, (experts.count, hidden, ffn))
        block, router = f"{layer}{names.block}.", f"{layer}mlp.gate.weight"
        gate_up_file, down_file = self._stored.pop(gate_up).file, self._stored.pop(down).file
        for expert in range(experts.count):
            name = f"{block}experts.{expert}."
            self._stored[f"{name}{names.gate}.weight"] = _Stored(gate_up_file, gate_up, expert, 0, ffn)
            self._stored[f"{name}{names.up}.weight"] = _Stored(gate_up_file, gate_up, expert, ffn, 2 * ffn)
            self._stored[f"{name}{names.down}.weight"] = _Stored(down_file, down, expert, 0, hidden)
        if router in self._stored:
            self.rename({router: f"{block}gate.weight"})

    def _check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        if name not in self._stored:
            raise WeightsError(f"{self.folder} lacks {name}, which goes with the fused experts it has; copy it again")
        if self.shape(name) != expected:
            raise WeightsError(
                f"{name} in {self.folder} has shape {[*self.shape(name)]}, but its config.json gives {[*expected]}"
            )


class ShardedWriter:
    """Writes tensors into a folder as numbered safetensors files with an index, or as one file when they fit.

    A tensor is on the disk when `add` returns; none is kept in memory. What a file holds is known at its end only, so
    its header, which comes first, has a fixed room of `HEADER_BYTES`, which the format lets end in spaces.

    Args:
        folder: an existing folder.
        max_shard_bytes: bytes of tensors put into one file; a larger tensor has its own.
    """

    def __init__(self, folder: Path, max_shard_bytes: int):
        self.folder = folder
        self.max_shard_bytes = max_shard_bytes
        self._shards: list[_Shard] = []

    def add(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write the tensors; begin a file whenever the next one would not fit.

        Raises:
            OSError: a file cannot be written.
        """
        for name, tensor in tensors:
            if not self._shards or not self._shards[-1].has_room(name, tensor, self.max_shard_bytes):
                self._finish_shard()
                self._shards.append(_Shard(self.folder / f"part-{len(self._shards)}.safetensors"))
            self._shards[-1].add(name, tensor)

    def finish(self) -> None:
        """Give the files their final names, and write the index."""
        self._finish_shard()
        if len(self._shards) == 1:
            self._shards[0].path.rename(self.folder / SINGLE)
            return
        weight_map = {}
        for number, shard in enumerate(self._shards):
            file = f"model-{number + 1:05d}-of-{len(self._shards):05d}.safetensors"
            shard.path.rename(self.folder / file)
            weight_map.update(dict.fromkeys(shard.names, file))
        total_bytes = sum(shard.num_bytes for shard in self._shards)
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _finish_shard(self) -> None:
        if self._shards:
            self._shards[-1].finish()


class _Shard:
    """A safetensors file that grows tensor by tensor: 8 bytes, the header's length; the header; the tensors."""

    def __init__(self, path: Path):
        self.path = path
        self.names: list[str] = []
        self.num_bytes = 0
        self._header = '{"__metadata__":{"format":"pt"}'
        self._file = path.open("wb")
        self._file.seek(8 + HEADER_BYTES)

    def has_room(self, name: str, tensor: torch.Tensor, max_bytes: int) -> bool:
        """Return whether the tensor fits, at a multiple of its items' size; an empty file takes any."""
        header = len(self._header) + len(self._entry(name, tensor)) + 1
        fits = self.num_bytes + tensor.nbytes <= max_bytes and header <= HEADER_BYTES
        return not self.names or (fits and self.num_bytes % tensor.itemsize == 0)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor behind the others."""
        self._header += self._entry(name, tensor)
        self.names.append(name)
        self.num_bytes += tensor.nbytes
        self._file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())

    def finish(self) -> None:
        """Write the header, and close the file."""
        header = (self._header + "}").encode().ljust(HEADER_BYTES)
        self._file.seek(0)
        self._file.write(len(header).to_bytes(8, "little") + header)
        self._file.close()

    def _entry(self, name: str, tensor: torch.Tensor) -> str:
        place = [self.num_bytes, self.num_bytes + tensor.nbytes]
        entry = {
            "dtype": DTYPES[dtype_name(tensor.dtype)].safetensors,
            "shape": list(tensor.shape),
            "data_offsets": place,
        }
        return f",{json.dumps(name)}:{json.dumps(entry)}"

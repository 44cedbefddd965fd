"""Reading and writing Hugging Face folders of safetensors: lazily, and a bounded number of bytes at a time."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class WeightsError(ValueError):
    """What is wrong with a folder of weights, and what to do about it."""


class HFFolder:
    """The tensors of a Hugging Face folder by name; only the slices asked for are read.

    A context manager: the files stay open (memory-mapped) inside it.

    Raises:
        FileNotFoundError: the folder, its safetensors, or a file its index names is missing.
        WeightsError: a file is damaged or truncated, or holds other tensors than the index says.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._file_of = _index(self.folder)
        self._name_in_file: dict[str, str] = {}  # of tensors that were renamed
        self._files = {file: _open(self.folder / file) for file in sorted(set(self._file_of.values()))}
        for file, handle in self._files.items():
            _check_names(self.folder / file, {n for n, f in self._file_of.items() if f == file}, set(handle.keys()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._files.clear()

    def rename(self, names: Mapping[str, str]) -> None:
        """Call tensors by other names from now on: `names` maps the file's name to the new one."""
        for old, new in names.items():
            self._file_of[new] = self._file_of.pop(old)
            self._name_in_file[new] = self._name_in_file.pop(old, old)

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the file's header."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Dtype of a tensor, as safetensors spells it: F32, BF16, ..."""
        return self._slice(name).get_dtype()

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements start:stop (default: all) of a tensor along dimension 0 or 1, on the CPU in the file's dtype."""
        part = slice(start, stop)
        return self._slice(name)[part] if dim == 0 else self._slice(name)[:, part]

    def _slice(self, name: str) -> Any:
        return self._files[self._file_of[name]].get_slice(self._name_in_file.get(name, name))


def _index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    if (folder / INDEX).is_file():
        file_of = _weight_map(folder / INDEX)
        missing = sorted({file for file in file_of.values() if not (folder / file).is_file()})
        if missing:
            raise FileNotFoundError(
                f"{folder / INDEX} names files that are missing: {', '.join(missing)}; copy them too"
            )
        return file_of
    if (folder / SINGLE).is_file():
        return dict.fromkeys(_open(folder / SINGLE).keys(), SINGLE)
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else "no such folder"
    raise FileNotFoundError(
        f"expected {SINGLE} or {INDEX} in {folder}, found {found}; "
        "weights in another format must be saved as safetensors first"
    )


def _weight_map(path: Path) -> dict[str, str]:
    try:
        file_of = json.loads(path.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(
            f"{path} is not a safetensors index with a weight_map ({error!r}); copy the file again"
        ) from error
    outside = [file for file in file_of.values() if Path(file).name != file]
    if outside:
        raise WeightsError(f"{path} names {outside[0]}, which is not a file of its own folder")
    return file_of


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        size = path.stat().st_size
        raise WeightsError(f"{path} ({size} bytes) is damaged or truncated ({error}); copy it again") from error


def _check_names(path: Path, indexed: set[str], found: set[str]) -> None:
    if indexed != found:
        raise WeightsError(
            f"{path} and the index disagree: missing from the file {sorted(indexed - found)}, "
            f"missing from the index {sorted(found - indexed)}; copy both from the same checkpoint"
        )


class ShardedWriter:
    """Writes tensors into a folder as numbered safetensors files with an index, or as one file when they fit.

    Args:
        folder: an existing folder.
        max_shard_bytes: bytes of tensors kept in host memory and put into one file; a larger tensor has its own.
    """

    def __init__(self, folder: Path, max_shard_bytes: int):
        self.folder = folder
        self.max_shard_bytes = max_shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def add(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take copies of the tensors; write a file whenever the next one would not fit."""
        for name, tensor in tensors:
            pending = sum(kept.nbytes for kept in self._pending.values())
            if self._pending and pending + tensor.nbytes > self.max_shard_bytes:
                self._flush()
            self._pending[name] = tensor.to("cpu", copy=True).contiguous()

    def finish(self) -> None:
        """Write what is left, then give the files their final names, and the index."""
        self._flush()
        if len(self._shards) == 1:
            self._part(0).rename(self.folder / SINGLE)
            return
        weight_map = {}
        for number, names in enumerate(self._shards):
            file = f"model-{number + 1:05d}-of-{len(self._shards):05d}.safetensors"
            self._part(number).rename(self.folder / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _part(self, number: int) -> Path:
        return self.folder / f"part-{number}.safetensors"

    def _flush(self) -> None:
        if not self._pending:
            return
        path = self._part(len(self._shards))
        try:
            save_file(self._pending, path, metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk comes as this, too
            raise OSError(f"cannot write {path}: {error}") from error
        self._shards.append(list(self._pending))
        self._total_bytes += sum(tensor.nbytes for tensor in self._pending.values())
        self._pending = {}

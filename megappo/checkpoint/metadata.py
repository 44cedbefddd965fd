"""The contents of a component's checkpoint folder, from its metadata alone: reads no tensor and runs no code of it."""

import pickle
from dataclasses import dataclass, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from megappo.checkpoint.folders import CheckpointError

METADATA = ".metadata"
OPTIMIZER_PREFIX = "optimizer."
EMBEDDING = "embedding.word_embeddings.weight"
LAYERS = "decoder.layers."
EXTRA_STATE = "._extra_state"  # objects of modules that have nothing to keep
# The metadata is a pickle. It may name only these, which describe tensors and their places; of the modules only
# dataclasses and enumerations.
_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner")
_NAMES = {
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath",),
}


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a checkpoint: the layers of a model are stacked along dimension 0.

    Attributes:
        pieces: how many pieces each dimension is cut into.
        files: files that hold its pieces, by offset along dimension 0.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[int, ...]
    files: dict[int, frozenset[str]]


@dataclass(frozen=True)
class ComponentInfo:
    """A component's tensors by name, and the names of its other objects."""

    tensors: dict[str, TensorInfo]
    objects: tuple[str, ...]

    @property
    def layout(self) -> tuple[int, int]:
        """(tensor-parallel ranks, pipeline stages) it was written in, as its pieces show; it loads in any other."""
        tensor = self.tensors[EMBEDDING].pieces[0] if EMBEDDING in self.tensors else 1
        stages: set[frozenset[str]] = set()
        for name, info in self.model.items():
            if name.startswith(LAYERS):
                stages |= {frozenset(file.split("_")[2] for file in files) for files in info.files.values()}
                break
        return tensor, max(1, len(stages))

    @property
    def model(self) -> dict[str, TensorInfo]:
        """The model's tensors, without the optimizer's."""
        return {name: info for name, info in self.tensors.items() if not name.startswith(OPTIMIZER_PREFIX)}


def is_component(folder: Path) -> bool:
    """Return whether a folder is a component of a checkpoint, or a converted model."""
    return (folder / "metadata.json").is_file() or (folder / METADATA).is_file()


def components_of(folder: Path) -> list[Path]:
    """Folders of the components in a training checkpoint, step_XXXXXXXX; none in a component's own folder."""
    if is_component(folder) or not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if is_component(path))


def read_component(folder: Path) -> ComponentInfo:
    """The contents of a component's folder.

    Raises:
        CheckpointError: it is no such folder, its metadata is damaged or names anything but tensors, or a file that
            the metadata names is missing or too short.
    """
    metadata = read_metadata(folder)
    try:
        files = _files(metadata.storage_data)
        entries = metadata.state_dict_metadata.items()
        objects = tuple(name for name, entry in entries if isinstance(entry, BytesStorageMetadata))
        tensors = {name: _tensor(entry, files.get(name, {})) for name, entry in entries if name not in objects}
    except Exception as error:  # it was another object than it should be
        raise _damaged(folder / METADATA, error) from error
    return ComponentInfo(tensors, objects)


def read_metadata(folder: Path) -> Metadata:
    """A component's metadata as torch has it.

    Raises:
        CheckpointError: as `read_component`.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
        _check_files(folder, metadata.storage_data)
    except CheckpointError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(
            f"{folder} is no Megatron checkpoint of one component: it has no {METADATA}; "
            "name a folder such as step_00000010/actor, or one that convert.py wrote"
        ) from error
    except Exception as error:  # a damaged pickle raises nearly anything
        raise _damaged(path, error) from error
    return metadata


def _damaged(path: Path, error: Exception) -> CheckpointError:
    why = " ".join(f"{type(error).__name__}: {error}".split())
    return CheckpointError(f"{path} is damaged ({why}); copy it again")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = module in _MODULES or name in _NAMES.get(module, ())
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            known = True
        found = super().find_class(module, name) if known and "." not in name else None
        if module in _MODULES and not _holds_data(found):
            found = None
        if found is None or getattr(found, "__module__", module) != module:  # not what the module itself imports
            raise CheckpointError(
                f"the checkpoint's {METADATA} names {module}.{name}, which describes no tensor: it may be an attack, "
                "do not load it"
            )
        return found


def _holds_data(found: Any) -> bool:
    return isinstance(found, type) and (is_dataclass(found) or issubclass(found, Enum))


def _files(places: dict[Any, Any]) -> dict[str, dict[int, frozenset[str]]]:
    """Name -> offset along dimension 0 -> files that hold pieces of it."""
    files: dict[str, dict[int, frozenset[str]]] = {}
    for index, place in places.items():
        of_name, offset = files.setdefault(index.fqn, {}), index.offset[0] if index.offset else 0
        of_name[offset] = of_name.get(offset, frozenset()) | {place.relative_path}
    return files


def _tensor(entry: Any, files: dict[int, frozenset[str]]) -> TensorInfo:
    offsets = [chunk.offsets for chunk in entry.chunks]
    pieces = tuple(len({offset[dim] for offset in offsets}) for dim in range(len(entry.size)))
    return TensorInfo(tuple(entry.size), entry.properties.dtype, pieces, files)


def _check_files(folder: Path, places: dict[Any, Any]) -> None:
    """Check that all data that the metadata describes exists."""
    ends: dict[str, int] = {}
    for place in places.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in ends.items():
        path = folder / name
        if Path(name).name != name:
            raise CheckpointError(
                f"{folder / METADATA} names {name}, which is no file of its own folder: do not load it"
            )
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            raise CheckpointError(f"{path} is missing; copy the checkpoint again")
        if size < end:
            raise CheckpointError(f"{path} is cut off: it has {size} bytes of {end}; copy the checkpoint again")

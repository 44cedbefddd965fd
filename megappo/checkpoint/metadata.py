"""The contents of a component's checkpoint folder, from its metadata alone: reads no tensor and runs no code of it."""

import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from megappo.checkpoint.folders import METADATA, CheckpointError
from megappo.config.text_files import open_file

OPTIMIZER_PREFIX = "optimizer."
_OF_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
EMBEDDING = "embedding.word_embeddings.weight"
EXTRA_STATE = "._extra_state"  # objects of modules that have nothing to keep
_NAMES = {
    "torch.distributed.checkpoint.metadata": (
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.planner": (
        *("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath",),
}
"""The metadata is a pickle. It may name only these, which describe tensors and their places, and torch's dtypes."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a checkpoint: the layers of a model are stacked along dimension 0.

    Attributes:
        num_parts: how many parts dimension 0 is cut into.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    num_parts: int


@dataclass(frozen=True)
class ComponentInfo:
    """A component's tensors by name, and the names of its other objects."""

    tensors: dict[str, TensorInfo]
    objects: tuple[str, ...]

    @property
    def model(self) -> dict[str, TensorInfo]:
        """The model's tensors, without the optimizer's."""
        return {name: info for name, info in self.tensors.items() if not _OF_OPTIMIZER.match(name)}


def read_component(folder: Path) -> ComponentInfo:
    """Return the contents of a component's folder.

    Raises:
        CheckpointError: it is not such a folder, its metadata is damaged or names anything but tensors, or a file that
            the metadata names is missing or too short.
    """
    metadata = read_metadata(folder)
    try:
        objects = []
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, BytesStorageMetadata):
                objects.append(name)
            else:
                starts = {chunk.offsets[:1] for chunk in entry.chunks}
                tensors[name] = TensorInfo(tuple(entry.size), entry.properties.dtype, len(starts))
    except Exception as error:  # it was another object than it should be
        raise _damaged(folder / METADATA, error) from error
    return ComponentInfo(tensors, tuple(objects))


def read_metadata(folder: Path) -> Metadata:
    """Return a component's metadata as torch has it.

    Raises:
        CheckpointError: as `read_component`.
    """
    path = folder / METADATA
    try:
        with open_file(path) as file:
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
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _NAMES.get(module, ()):
            raise CheckpointError(
                f"the checkpoint's {METADATA} names {module}.{name}, which describes no tensor: it may be an attack, "
                "do not load it"
            )
        return super().find_class(module, name)


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
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; copy the checkpoint again")
        size = path.stat().st_size
        if size < end:
            raise CheckpointError(f"{path} is cut off: it has {size} bytes of {end}; copy the checkpoint again")

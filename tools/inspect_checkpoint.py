"""Print what is in a checkpoint, without loading it: names, shapes, dtypes, step.

    megappo inspect FOLDER

FOLDER is a run's output folder, its checkpoints/, one step_XXXXXXXX, one component of it (step_XXXXXXXX/actor), a
folder that convert.py wrote, or a Hugging Face folder.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megappo.architecture.architecture import BY_SAFETENSORS, DTYPES
from megappo.architecture.model_folder import named_architecture, newest_iteration
from megappo.checkpoint.checksums import refuse_altered
from megappo.checkpoint.folders import (
    METADATA,
    STATE,
    CheckpointError,
    candidates,
    components_of,
    is_component,
    no_folder,
    read_state,
)
from megappo.checkpoint.metadata import TensorInfo, read_component
from megappo.commands.arguments import inspect_arguments
from megappo.config.text_files import TextFileError
from megappo.errors import ActionableError
from megappo.table import resolved
from megappo.weights.safetensors_io import INDEX, SINGLE, HFFolder

BITS = re.compile(r"\d+")  # float8_e4m3fn, F8_E4M3, int64, U8: the first number of a dtype's name
Entry = tuple[str, tuple[int, ...], str]  # name, shape, dtype


def describe(folder: Path) -> Iterator[str]:
    """Yield lines that describe a folder of any supported kind."""
    folder = newest_iteration(folder)
    if not folder.is_dir():
        raise CheckpointError(no_folder(folder))
    if is_component(folder):
        yield from _component(folder)
    elif (folder / INDEX).is_file() or (folder / SINGLE).is_file():
        yield from _hugging_face(folder)
    elif components_of(folder):
        yield from _step(folder)
    elif any(folder.glob("step_*")):
        yield from _run(folder)
    elif (folder / "checkpoints").is_dir():
        yield from _run(folder / "checkpoints")
    else:
        raise CheckpointError(f"{folder} holds neither checkpoints of a run, nor a component's, nor {SINGLE}, {INDEX}")


def _run(folder: Path) -> Iterator[str]:
    """Yield the names of all checkpoints, and the details of the one that a run would resume from."""
    found, problem = candidates(folder)
    named = found[0] if found and not problem else None
    for path in sorted(path for path in folder.glob("step_*") if path.is_dir()):
        complete = "" if (path / STATE).is_file() else ", incomplete"
        yield f"{path.name}{' (latest)' if path == named else ''}{complete}"
    if problem:
        yield problem
    if found:
        yield ""
        yield from _step(found[0])


def _step(folder: Path) -> Iterator[str]:
    if (folder / STATE).is_file():
        refuse_altered(folder, STATE)
        yield f"{folder}: step {read_state(folder)['step']}"
    else:
        yield f"{folder}: incomplete, it has no {STATE}"
    for component in components_of(folder):
        yield ""
        yield from _component(component)


def _component(folder: Path) -> Iterator[str]:
    refuse_altered(folder.resolve().parent, f"{folder.resolve().name}/{METADATA}")
    info = read_component(folder)
    yield f"{folder}: Megatron; loads in any layout"
    yield from _summary("model", _entries(info.model))
    states = {name: entry for name, entry in info.tensors.items() if name not in info.model}
    if states:
        yield from _summary("optimizer", _entries(states))
    yield from _table(_entries(info.tensors))


def _entries(tensors: dict[str, TensorInfo]) -> list[Entry]:
    return [(name, entry.shape, str(entry.dtype).removeprefix("torch.")) for name, entry in sorted(tensors.items())]


def _hugging_face(folder: Path) -> Iterator[str]:
    with HFFolder(folder) as source:
        names = sorted(source.names())
        entries = [(name, source.shape(name), _in_torch(source.dtype(name))) for name in names]
    yield f"{folder}: Hugging Face, architecture {_architecture(folder)}"
    yield from _summary("model", entries)
    yield from _table(entries)


def _architecture(folder: Path) -> str:
    try:
        return named_architecture(folder) or "unknown"
    except TextFileError as error:
        return f"unknown ({error})"


def _in_torch(dtype: str) -> str:
    """Return torch's name of a dtype, if it is a common one."""
    return DTYPES[BY_SAFETENSORS[dtype]].torch if dtype in BY_SAFETENSORS else dtype


def _summary(what: str, entries: list[Entry]) -> Iterator[str]:
    elements = sum(prod(shape) for _, shape, _ in entries)
    size = sum(prod(shape) * _bits(dtype) for _, shape, dtype in entries) / 2**23
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in Counter(dtype for _, _, dtype in entries).most_common())
    yield f"  {what}: {len(entries)} tensors ({kinds}), {elements:,} elements, {size:,.2f} MiB"


def _bits(dtype: str) -> int:
    found = BITS.search(dtype)
    return int(found[0]) if found else 8  # bool


def _table(entries: list[Entry]) -> Iterator[str]:
    width = max((len(name) for name, _, _ in entries), default=0)
    for name, shape, dtype in entries:
        yield f"  {name.ljust(width)}  {dtype.ljust(8)}  {[*shape]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Describe the folder or the config given on the command line; return 2 if it cannot be read."""
    args = inspect_arguments(arguments)
    if args.path.suffix in (".yaml", ".yml"):
        return resolved("megappo_tools.inspect_data:run")(args)
    try:
        for line in describe(args.path):
            print(line)
    except BrokenPipeError:  # head has seen enough
        sys.stderr.close()
    except (ActionableError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

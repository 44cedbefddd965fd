"""Contents of a model folder: whether it is a model at all, its JSON files, its tensors, and the files beside them."""

import json
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from megappo.architecture.architecture import DTYPES, Architecture
from megappo.architecture.families import RawValues
from megappo.architecture.vision import TEXT, VISION
from megappo.config.config_error import looked_in, shorten
from megappo.config.hub import HUB_ID
from megappo.config.text_files import MissingFileError, TextFileError, read_json
from megappo.errors import own_command

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTERS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
"""Beginning of PEFT's names, before the model's names."""
FLOATS = {DTYPES[name].safetensors for name in ("fp64", "fp32", "bf16", "fp16")}
GIT_LFS = b"version https://git-lfs"
SHAPES = Path(__file__).parent / "shapes"
"""Folders with the config.json of published models: for estimates without a download."""
HEAD_MODULES = ("score", "classifier", "v_head", "v_head.summary")
"""Names in reward models of the layer that reads the last hidden states; the last is TRL's value head."""
UNQUANTIZED = "choose the model's weights in bf16 or fp16, or convert these"
"""Remedy for quantised weights."""
TRACKER = "latest_checkpointed_iteration.txt"
"""Names the newest iteration in a folder of checkpoints that Megatron-LM wrote; slime's and Megatron-Bridge's, too."""
RELEASE = "release"
"""Stands for an iteration in TRACKER and in the folder's name: weights to start from."""
COMPANIONS = ("*", "additional_chat_templates/*", "custom_generate/*")
"""Places of the files that transformers reads (utils/hub.py and generation/utils.py of 5.19)."""
NO_COMPANIONS = re.compile(
    r"""(?x) (\..* | README.* | config\.json | adapter_.* | metadata\.json | trainer_state\.json | .*\.(index\.json
    |safetensors|bin|pt|pth|gguf|onnx|h5|msgpack|distcp|ckpt|jsonl|parquet|arrow|log|zip|tar|gz|pkl|npz))$"""
)
"""Files among them that an export does not copy: weights, data, and descriptions of the old folder."""
OTHER_FOLDERS = {
    "adapter_config.json": "holds an adapter, {}: merge it into its base (merge_and_unload, save_pretrained) and name "
    "that folder; remove the file where it is merged already",
    "adapter_model.*": "holds an adapter, {}: merge it into its base and name that folder",
    "snapshots/*": "is a repository in a Hugging Face cache: name the folder of a revision, such as {}",
    "models--*": "is a Hugging Face cache: name the folder of a revision, such as {}/snapshots/REVISION",
    "hf_actor": "is the output folder of a run: name {}",
    "step_*": "holds training checkpoints, {}: name the run's hf_actor, or convert one's actor (megappo convert)",
    "state.json": "is a training checkpoint: name the run's hf_actor, or convert its actor (megappo convert)",
    "*.distcp": "is a component of a training checkpoint: name the run's hf_actor, or convert it (megappo convert)",
    "checkpoints/step_*": "is the output folder of a run: convert one's actor, {}/actor (megappo convert)",
    ".metadata": "is a Megatron checkpoint: set dist_checkpointing_path (of model or critic) to it, or convert it with "
    "megappo convert megatron-to-hf",
    TRACKER: "holds Megatron checkpoints: set dist_checkpointing_path (of model or critic) "
    "to it, or convert one with megappo convert megatron-to-hf",
    "zero_to_fp32.py": "is a DeepSpeed checkpoint: convert it to safetensors with {}",
    "fsdp_config.json": "is a checkpoint of FSDP shards: merge them into the Hugging Face format",
    "model_index.json": "holds a diffusion pipeline: choose a language model",
    "*.gguf": "holds GGUF weights, {}: download the model as safetensors",
    "*/config.json": "holds the folders of models: name one of them, such as the folder of {}",
    "consolidated*": "holds weights in their author's format, {}: download the model in the Hugging Face format",
    "pytorch_model*": "holds weights as pickles, {}: save them as safetensors, or download those",
    "*.pt*": "holds weights as pickles, {}: save them as safetensors, or download those",
}
"""File in a folder -> what the folder is instead of a model, and the remedy."""


def shape_folder(folder: str | Path) -> Path:
    """Return the folder with a model's config.json: the folder itself, or the shape that ships where it has none."""
    return Path(folder) if (Path(folder) / CONFIG_FILE).is_file() else shipped_shape(folder) or Path(folder)


def shipped_shape(name: str | Path) -> Path | None:
    """Return the folder of the shape that ships by the last name of a path or hub id; None if there is none."""
    last = Path(name).name.lower().removesuffix("-instruct").removesuffix("-chat")
    return SHAPES / last if last and (SHAPES / last / CONFIG_FILE).is_file() else None


def hub_id(shape: Path) -> str:
    """Return the id on the hub of the model whose shape ships."""
    return str(read_json_file(shape / CONFIG_FILE)["_name_or_path"])


def download_command(path: str) -> str:
    """Return the command that downloads the model which a path or a hub id stands for."""
    shape = shipped_shape(path)
    name = hub_id(shape) if shape else "NAME"
    command = f"{own_command('hf')} download"
    if path == name:
        return f"{command} {name}"
    if not shape and HUB_ID.fullmatch(path):
        return f"{command} {path}, or {command} NAME --local-dir {path}"
    return f"{command} {name} --local-dir {path if shape else 'FOLDER'}"


def no_model(folder: Path, wanted: str) -> str:
    """Return the error of a command for a folder that is missing; its name may be the id of a model of the hub."""
    download = f"; a model of the hub: {own_command('hf')} download {folder}" if HUB_ID.fullmatch(str(folder)) else ""
    return f"no folder {folder}{looked_in(folder)}: name {wanted}{download}"


def other_kind(folder: Path) -> str | None:
    """Return what a folder is instead of a model, and the remedy, for an error after its path; None for a model.

    A model with an adapter beside it is none either: transformers would add the adapter.

    Raises:
        OSError: the folder cannot be listed.
    """
    next(folder.iterdir(), None)  # raises the errors that `glob` hides
    has_model = (folder / CONFIG_FILE).is_file() and any(folder.glob("model*.safetensors*"))
    for pattern in list(OTHER_FOLDERS)[: 1 if has_model else None]:
        for path in sorted(folder.glob(pattern)):
            return OTHER_FOLDERS[pattern].format(path)
    return None


def newest_iteration(folder: Path) -> Path:
    """Return the newest checkpoint in a folder that Megatron-LM wrote; another folder as it is."""
    tracker = folder / TRACKER
    if tracker.is_file():
        name = tracker.read_text("utf-8", errors="replace").strip()
        return folder / (name if name == RELEASE else f"iter_{name:0>7}")
    return max(folder.glob("iter_*"), default=folder)


def read_json_file(file: Path) -> dict[str, Any]:
    """Read one of a model's JSON files.

    Raises:
        TextFileError: it cannot be read.
    """
    try:
        return read_json(file)
    except TextFileError as error:
        raise TextFileError(f"cannot use {file}: {error}") from error


def named_architecture(folder: Path) -> str | None:
    """Return the first of `architectures` in config.json, without a check of anything else.

    Raises:
        TextFileError: it cannot be read.
    """
    return first_architecture(read_json_file(folder / CONFIG_FILE))


def first_architecture(raw: RawValues) -> str | None:
    """Return the first of `architectures`; None where there is none."""
    named = raw.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else None


def write_model_config(architecture: Architecture, folder: Path, dtype: str | None = None) -> None:
    """Write config.json of an exported model.

    Args:
        dtype: dtype of the weights, one of DTYPES; None = as in the config.json that was read.
    Raises:
        OSError: it cannot be written.
    """
    written = architecture.hf_config()
    if dtype is not None:
        names = dict.fromkeys(("torch_dtype", "dtype"), DTYPES[dtype].torch)
        for section in (TEXT, VISION):
            if section in written:
                written[section] = written[section] | names
        written |= names
    (folder / CONFIG_FILE).write_text(json.dumps(written, indent=2) + "\n")


def end_tokens(folder: Path) -> list[int]:
    """Read eos_token_id of generation_config.json and config.json: SGLang ends a response at the tokens of either.

    Raises:
        TextFileError: one cannot be read, or the key holds something else.
    """
    found: list[int] = []
    for file in (folder / GENERATION_FILE, folder / CONFIG_FILE):
        value = read_json_file(file).get("eos_token_id") if file.is_file() else None
        tokens = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and token >= 0 for token in tokens):
            written = shorten(json.dumps(value))
            raise TextFileError(f"cannot use {file}: eos_token_id: expected token id or list of them, found {written}")
        found += tokens
    return found


def read_weight_map(folder: Path) -> dict[str, str]:
    """Read the file of each tensor from the index of a folder's safetensors.

    Raises:
        TextFileError: it cannot be read, or does not list files in its own folder.
    """
    file = folder / INDEX
    weight_map = read_json_file(file).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or any(Path(str(name)).name != name for name in weight_map.values())
    ):
        raise TextFileError(
            f"cannot use {file}: weight_map: expected object of names of files in its own folder, found "
            f"{shorten(json.dumps(weight_map))}: copy it again"
        )
    return weight_map


def companions(folder: Path) -> list[Path]:
    """Return the files beside config and weights, for tokenizer and generation, as paths in the folder."""
    paths = sorted(path for pattern in COMPANIONS for path in folder.glob(pattern) if not path.is_dir())
    return [path.relative_to(folder) for path in paths if not NO_COMPANIONS.match(path.name)]


def check_companions(folder: Path) -> None:
    """Check that companions can be read.

    Raises:
        TextFileError: one cannot.
    """
    for name in companions(folder):
        _check_readable(folder / name)


def tensor_files(folder: Path, single: str = SINGLE, *, floats_only: bool = False) -> dict[str, str]:
    """Return the file of each tensor that transformers and SGLang load from a folder, from the files' headers.

    As in transformers, all tensors of a shard count, whether the index lists them or not.

    Args:
        single: the file of a folder without an index.
        floats_only: refuse quantised weights.
    Raises:
        TextFileError: a file is missing, unreadable, truncated or not safetensors, the two libraries would read
            different files, or weights are quantised.
    """
    has_index = (folder / INDEX).is_file()
    listed = read_weight_map(folder) if has_index else {}
    files = sorted(set(listed.values()) or {single})
    if SINGLE not in files and (folder / SINGLE).is_file():
        raise TextFileError(
            f"{folder} holds {SINGLE}, which transformers reads, and {INDEX}, which SGLang reads: remove the one that "
            "is out of date"
        )
    paths = [folder / file for file in files]
    if lacking := [path.name for path in paths if not path.is_file() and not path.is_symlink()]:
        what = f"lacks {shorten(', '.join(lacking))}" if has_index else f"holds no {single} and no {INDEX}"
        raise MissingFileError(f"{folder} {what}: complete the download; other weight formats are not read")
    file_of: dict[str, str] = {}
    for file in files:
        _add(file_of, folder / file, floats_only)
    if lost := sorted(listed.keys() - file_of.keys()):
        raise TextFileError(
            f"{folder / listed[lost[0]]} lacks {shorten(', '.join(lost))}, which {INDEX} lists: copy both from "
            "the same checkpoint"
        )
    for path in () if has_index else sorted(folder.glob("*.safetensors")):  # SGLang reads them all
        if path.name != single:
            _add(dict(file_of), path, floats_only)
    return file_of


def num_head_outputs(folder: Path) -> int:
    """Return the outputs of a folder's value head, from its file's header; 0 if it has none.

    Raises:
        TextFileError: as `tensor_files`.
    """
    weights = {f"{module}.weight" for module in HEAD_MODULES}
    for name, file in tensor_files(folder).items():
        if name in weights:
            with safe_open(folder / file, framework="np") as tensors:
                return tensors.get_slice(name).get_shape()[0]
    return 0


def check_tensors(folder: Path) -> None:
    """Check the headers of all files of weights.

    Raises:
        TextFileError: as `tensor_files`.
    """
    tensor_files(folder, floats_only=True)


def _add(file_of: dict[str, str], path: Path, floats_only: bool) -> None:
    """Add the tensors of a file to the tensors found before; none may be in both."""
    _check_readable(path)
    try:
        with safe_open(path, framework="np") as file:
            names = file.keys()
            dtypes = {name: file.get_slice(name).get_dtype() for name in names} if floats_only else {}
    except SafetensorError as error:
        size = path.stat().st_size
        raise TextFileError(f"{path} ({size:,} bytes) is damaged or truncated ({error}): copy it again") from error
    if again := sorted(file_of.keys() & names):
        raise TextFileError(
            f"{path} holds {shorten(', '.join(again))}, as {file_of[again[0]]} does: remove the file that is not "
            "the model's"
        )
    if quantized := [f"{name} ({dtype})" for name, dtype in dtypes.items() if dtype not in FLOATS]:
        raise TextFileError(
            f"{path} holds quantised weights, {shorten(', '.join(quantized))}, which are not read: {UNQUANTIZED}"
        )
    file_of.update(dict.fromkeys(names, path.name))


def _check_readable(path: Path) -> None:
    if not path.is_symlink() and not path.is_file():  # opening a pipe would wait for a writer
        return
    try:
        with path.open("rb") as file:
            start = file.read(len(GIT_LFS))
    except OSError as error:
        remedy = "let this user read it, copy it, or complete the download"
        raise TextFileError(f"cannot read {path} ({error.strerror}): {remedy}") from error
    if start == GIT_LFS:
        raise TextFileError(f"{path} is a pointer of Git LFS, not the file: download it with git lfs pull")

"""Check the files and folders of a config: they exist and fit its layouts. Reads headers only."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from megappo.architecture.architecture import Architecture
from megappo.architecture.config_json import end_tokens
from megappo.architecture.fit import adapter_errors, dense_stage_errors, engine_fit_errors, fit_errors
from megappo.architecture.model_folder import check_companions, other_kind, tensor_files
from megappo.architecture.parsing import ArchitectureError, read_architecture
from megappo.config.config_error import looked_in, shorten
from megappo.config.data_section import OTHER_KIND, ending
from megappo.config.eval_sets import context_errors, eval_sets, longest_request
from megappo.config.schema import Config
from megappo.config.text_files import TextFileError
from megappo.placement.components import ComponentSpec, Setting, components_of


def file_errors(config: Config) -> list[str]:
    """Return missing or unusable files, one line each, with the key, the path and the remedy."""
    data, output_dir = config.data, config.trainer.output_dir
    checks = [(*folder, _model_folder(config, *folder, specs)) for folder, specs in _by_folder(config).items()]
    held_out = ((one.key, one.files) for one in eval_sets(config).values())
    read = () if config.trainer.eval_only else (("data.train_files", data.files),)
    for key, paths in (*read, *held_out):
        checks += [(key, path, _data_file(key, Path(path))) for path in paths]
    checks.append(("trainer.output_dir", output_dir, _output_folder("trainer.output_dir", output_dir)))
    if folder := config.trainer.record_rollouts:
        checks.append(("trainer.record_rollouts", folder, _output_folder("trainer.record_rollouts", folder)))
    return [error for check in checks for error in _path_errors(*check)]


def _by_folder(config: Config) -> dict[Setting[str], list[ComponentSpec]]:
    """Return the components of each model folder; of those that share a layout the first."""
    found: dict[Setting[str], dict[str, ComponentSpec]] = {}
    for spec in components_of(config).values():
        found.setdefault(spec.folder, {}).setdefault(spec.parallel.key, spec)
    return {folder: list(specs.values()) for folder, specs in found.items()}


def _path_errors(key: str, path: str, faults: Iterator[str]) -> Iterator[str]:
    """Yield the errors of a path's files, or of the path itself: too long, a loop of links, no permission."""
    if "\0" in path:
        yield f"{key}: no path holds a NUL, found {shorten(repr(path))}: correct it"
        return
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.stat(path)
        yield from faults
    except OSError as error:
        yield f"{key}: cannot look at {shorten(path)}: {error.strerror}: correct the path or its permissions"


def _model_folder(config: Config, key: str, path: str, specs: list[ComponentSpec]) -> Iterator[str]:
    folder = Path(path)
    if not folder.is_dir():
        remedy = (
            f"download the model ({Path(sys.prefix).name}/bin/hf download NAME --local-dir FOLDER) or correct the path"
        )
        yield f"{key}: no folder {folder}{looked_in(folder)}: {remedy}"
        return
    if kind := other_kind(folder):
        yield f"{key}: {folder} {kind}"
        return
    if not (folder / "tokenizer_config.json").is_file():
        yield f"{key}: {folder} holds no tokenizer_config.json: complete the download"
    for read in (tensor_files, check_companions, end_tokens):
        try:
            read(folder)
        except TextFileError as error:
            yield f"{key}: {error}"
    try:
        values_only = all(spec.head == "value" for spec in specs)
        architecture = read_architecture(folder, head="value" if values_only else "policy")
    except ArchitectureError as faulty:
        yield from (f"{key}: {error}" for error in faulty.errors)
    else:
        yield from _fit_errors(config, key, architecture, specs)


def _fit_errors(config: Config, key: str, architecture: Architecture, specs: list[ComponentSpec]) -> Iterator[str]:
    """Yield where the model does not fit layouts, engines and the length of rows."""
    for spec in specs:
        (parallel_key, parallel), training = spec.parallel, spec.training
        yield from fit_errors(architecture, parallel, f"{parallel_key}.{{}}".format)
        if spec.lora is not None:
            yield from adapter_errors(architecture, spec.lora, parallel_key.removesuffix(".parallel"))
        if training is not None and not training.section.optim.distributed:
            yield from dense_stage_errors(architecture, parallel, training.key)
    if key == "model.path":
        yield from engine_fit_errors(architecture, config.rollout.tensor_parallel)
    file, window = architecture.file, architecture.sliding_window
    positions = architecture.max_positions
    yield from context_errors(config, f"{key}: {file}'s max_position_embeddings", positions, "lower these")
    longest = longest_request(config)
    if window and longest.tokens > window:
        yield (
            f"{key}: {file}'s sliding_window {window} is below {longest.prompt_key} {longest.prompt} + "
            f"{longest.response_key} {longest.response}: lower these, as neither trainer nor engine limits attention "
            "to a window"
        )


def _data_file(key: str, path: Path) -> Iterator[str]:
    if path.is_dir():
        yield f"{key}: {path} is a folder: name its files"
        return
    if not ending(path.name):
        yield f"{key}: {path} {OTHER_KIND}"
        return
    if not path.is_file():  # nor a pipe, which would be waited for
        yield f"{key}: no file {path}{looked_in(path)}: create it or correct the path"
        return
    try:
        with path.open("rb") as file:
            if not file.read(1):
                yield f"{key}: {path} is empty: put prompts in it"
    except OSError as error:
        yield f"{key}: cannot read {path} ({error.strerror}): correct the path, or its rights"


def _output_folder(key: str, folder: str) -> Iterator[str]:
    """Check that the folder can be written to, or created."""
    path = Path(folder)
    there = next(parent for parent in (path, *path.absolute().parents) if os.path.lexists(parent))
    if not there.is_dir():
        yield f"{key}: {there} is a file: name a folder"
        return
    try:
        with tempfile.TemporaryFile(dir=there):  # without a name, and gone at once
            for made in (path, *(there / name for name in path.parts)):
                with suppress(FileNotFoundError):
                    os.lstat(made)  # names may be too long
    except OSError as error:
        yield f"{key}: cannot write in {there} ({error.strerror}): name a folder that you may write to"

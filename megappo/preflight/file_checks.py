"""Check the files and folders of a config: they exist and fit its layouts. Reads headers only."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from megappo.architecture.architecture import Architecture
from megappo.architecture.fit import adapter_errors, dense_stage_errors, engine_fit_errors, fit_errors
from megappo.architecture.model_folder import check_companions, end_tokens, other_kind, tensor_files
from megappo.architecture.parsing import ArchitectureError, read_architecture
from megappo.config.config_error import looked_in, shorten
from megappo.config.eval_sets import context_errors, eval_sets, longest_request
from megappo.config.schema import Config
from megappo.config.sections import OTHER_KIND, ending
from megappo.config.text_files import TextFileError
from megappo.placement.components import ComponentSpec, components_of


def file_errors(config: Config) -> list[str]:
    """Return missing or unusable files, one line each, with the key, the path and the remedy."""
    errors: list[str] = []
    for spec in components_of(config).values():
        errors += _path_errors(*spec.folder, _model_folder(config, spec))
    files = {} if config.trainer.eval_only else {"data.train_files": config.data.files}
    for one in eval_sets(config).values():
        files[one.key] = (*files.get(one.key, ()), *one.files)
    for key, paths in files.items():
        for path in paths:
            errors += _path_errors(key, path, _data_file(key, Path(path)))
    trainer = config.trainer
    folders = {"trainer.output_dir": trainer.output_dir, "trainer.record_rollouts": trainer.record_rollouts}
    for key, folder in folders.items():
        if folder is not None:
            errors += _path_errors(key, folder, _output_folder(key, Path(folder)))
    return list(dict.fromkeys(errors))  # several components may have one model and one layout


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


def _model_folder(config: Config, spec: ComponentSpec) -> Iterator[str]:
    key, folder = spec.folder.key, Path(spec.folder.value)
    if not folder.is_dir():
        command = f"{Path(sys.prefix).name}/bin/hf download NAME --local-dir FOLDER"
        yield f"{key}: no folder {folder}{looked_in(folder)}: download the model ({command}) or correct the path"
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
        architecture = read_architecture(folder, head="value" if spec.head == "value" else "policy")
    except ArchitectureError as faulty:
        yield from (f"{key}: {error}" for error in faulty.errors)
    else:
        yield from _fit_errors(config, spec, architecture)


def _fit_errors(config: Config, spec: ComponentSpec, architecture: Architecture) -> Iterator[str]:
    """Yield where the model does not fit layouts, engines and the length of rows."""
    key, (parallel_key, parallel), training = spec.folder.key, spec.parallel, spec.training
    yield from fit_errors(architecture, parallel, f"{parallel_key}.{{}}".format)
    if spec.lora is not None:
        yield from adapter_errors(architecture, spec.lora, parallel_key.removesuffix(".parallel"))
    if training is not None and not training.section.optim.distributed:
        yield from dense_stage_errors(architecture, parallel, training.key)
    if key == "model.path":
        yield from engine_fit_errors(architecture, config.rollout.tensor_parallel)
    file, window = architecture.file, architecture.sliding_window
    positions = architecture.max_positions
    yield from context_errors(config, f"{key}: {file}'s max_position_embeddings", positions)
    longest = longest_request(config)
    if window and longest.tokens > window:
        yield (
            f"{key}: {file}'s sliding_window {window} is below {longest.lengths}: lower these, as neither trainer "
            "nor engine limits attention to a window"
        )


def _data_file(key: str, path: Path) -> Iterator[str]:
    if path.is_dir():
        yield f"{key}: {path} is a folder: name its files"
    elif not ending(path.name):
        yield f"{key}: {path} {OTHER_KIND}"
    elif not path.is_file():  # nor a pipe, which would be waited for
        yield f"{key}: no file {path}{looked_in(path)}: create it or correct the path"
    elif not path.stat().st_size:
        yield f"{key}: {path} is empty: put prompts in it"
    elif not os.access(path, os.R_OK):
        yield f"{key}: cannot read {path}: correct the path, or its rights"


def _output_folder(key: str, path: Path) -> Iterator[str]:
    """Check that the folder can be written to, or created."""
    there = next(parent for parent in (path, *path.absolute().parents) if os.path.lexists(parent))
    if not there.is_dir():
        yield f"{key}: {there} is a file: name a folder"
        return
    try:
        with tempfile.TemporaryFile(dir=there):  # without a name, and gone at once
            for name in path.parts:
                with suppress(FileNotFoundError):
                    (there / name).lstat()  # names may be too long
    except OSError as error:
        yield f"{key}: cannot write in {there} ({error.strerror}): name a folder that you may write to"

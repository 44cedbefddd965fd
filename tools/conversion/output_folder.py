"""Check the folders of a conversion before anything slow: torch is not imported, and no weights are read."""

import argparse
import os
from pathlib import Path

from megappo.checkpoint.folders import no_folder


def folder_fault(args: argparse.Namespace) -> str | None:
    """Return why a command cannot read --input or write --output, with the remedy; None if it can."""
    try:
        return _folder_fault(args)
    except OSError as error:
        return str(error)


def _folder_fault(args: argparse.Namespace) -> str | None:
    source, output = args.input, args.output
    if not source.is_dir():
        return f"--input: {no_folder(source)}"
    if args.command == "verify":
        return None if output.is_dir() else f"--output: {no_folder(output)}"
    inner, outer = source.resolve(), output.resolve()
    if outer == inner or outer in inner.parents or inner in outer.parents:
        return f"--output {output} and --input {source} lie in each other: name another folder to write to"
    if output.is_file():
        return f"--output {output} is a file: name a folder to write to"
    if output.is_dir() and any(output.iterdir()) and not args.force:
        return f"--output {output} is not empty: --force replaces it, when the conversion has gone well"
    return _parent_fault(output)


def _parent_fault(output: Path) -> str | None:
    """The new folder is written beside `output`, then renamed."""
    parent = next(path for path in output.absolute().parents if path.exists())
    if not parent.is_dir():
        return f"--output {output}: {parent} is a file: name another folder to write to"
    if not os.access(parent, os.W_OK | os.X_OK):
        return f"--output {output}: no permission to write to {parent}: name another folder to write to"
    return None

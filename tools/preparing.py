"""Shared code of the tools that prepare published data sets: command line, reading, and writing prompts."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from megappo.config.sections import stem
from megappo.data.records import RecordsError, open_records

Record = dict[str, Any]


class PrepareError(Exception):
    """Raised for unusable files; the message names the fault and the remedy."""


def run(description: str, read: Callable[[Path], Iterable[Record]], prepare: Callable[[Record], Record]) -> int:
    """Turn each input into OUTPUT/NAME.jsonl and return the exit code.

    Args:
        read: returns the records of an input, as published.
        prepare: returns a record with its label and a text as "prompt". It may raise ValueError, or KeyError for a
            missing field.
    """
    args = _arguments(description)
    try:
        for source, target in _targets(args.input, args.output).items():
            records = [_prompt(record, args) for record in _prepared(source, read, prepare)]
            args.output.mkdir(parents=True, exist_ok=True)
            target.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), "utf-8")
            print(f"{target}: {len(records):,} prompts from {source}")
    except PrepareError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        what = f"cannot use {error.filename} ({error.strerror}): correct the path, or its rights"
        print(f"error: {what if error.filename else error}", file=sys.stderr)
        return 1
    return 0


def _targets(sources: Sequence[Path], output: Path) -> dict[Path, Path]:
    """Return the output file of each input."""
    targets = {source: output / f"{stem(str(source))}.jsonl" for source in sources}
    twice = [path for path, count in Counter(targets.values()).items() if count > 1]
    if twice:
        raise PrepareError(f"several inputs would become {twice[0]}: prepare them one by one, each to its own --output")
    there = [path for path in targets.values() if path.exists()]
    if there:
        raise PrepareError(f"{there[0]} is there already: remove it, or choose another --output")
    return targets


def records_of(file: Path) -> Iterator[Record]:
    """Yield the records of a jsonl or parquet file."""
    try:
        records = open_records(str(file), None)
        yield from records.at(range(len(records)))
    except RecordsError as error:
        raise PrepareError(f"{file} {error}") from error


def _arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, nargs="+", required=True, help="what was published")
    parser.add_argument("--output", type=Path, required=True, help="folder for the prompts: a .jsonl for each input")
    parser.add_argument("--system", default="", help="a system prompt before each question")
    parser.add_argument("--text", action="store_true", help="prompts as texts, for a model without a chat template")
    args = parser.parse_args()
    if args.text and args.system:
        parser.error("--system is of chat messages: leave it out, or --text")
    return args


def _prepared(
    source: Path, read: Callable[[Path], Iterable[Record]], prepare: Callable[[Record], Record]
) -> Iterator[Record]:
    for number, record in enumerate(read(source), 1):
        try:
            if isinstance(record, ValueError):
                raise record
            if not isinstance(record, dict):
                raise ValueError(f"expected an object, found {type(record).__name__}")
            yield prepare(record)
        except KeyError as error:
            raise PrepareError(
                f"{source}, record {number}: no field {error}; it has {', '.join(record)}: is this the right data set?"
            ) from error
        except (ValueError, TypeError, AttributeError) as error:  # the last two: a field is no text
            raise PrepareError(f"{source}, record {number}: {error}") from error


def _prompt(record: Record, args: argparse.Namespace) -> Record:
    if args.text:
        return record
    system = [{"role": "system", "content": args.system}] if args.system else []
    return record | {"prompt": [*system, {"role": "user", "content": record["prompt"]}]}

"""What the tools that prepare published data sets share: their command line, reading, and writing prompts."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from megappo.data.records import RecordsError, open_records

Record = dict[str, Any]


class PrepareError(Exception):
    """What is wrong with the files, and what to do."""


def run(description: str, read: Callable[[Path], Iterable[Record]], prepare: Callable[[Record], Record]) -> int:
    """A tool that turns each input into OUTPUT/NAME.jsonl; gives its exit code.

    Args:
        read: the records of an input, as published.
        prepare: a record with a text as "prompt", and its label. It may raise KeyError, of a field that is not there,
            or ValueError.
    """
    args = _arguments(description)
    try:
        for source in args.input:
            target = args.output / f"{source.stem}.jsonl"
            if target.exists():
                raise PrepareError(f"{target} is there already: remove it, or choose another --output")
            records = [_prompt(record, args) for record in _prepared(source, read, prepare)]
            args.output.mkdir(parents=True, exist_ok=True)
            target.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), "utf-8")
            print(f"{target}: {len(records):,} prompts from {source}")
    except (PrepareError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def records_of(file: Path) -> Iterator[Record]:
    """The records of a jsonl or parquet file."""
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
            yield prepare(record)
        except KeyError as error:
            raise PrepareError(
                f"{source}, record {number}: no field {error}; it has {', '.join(record)}: is this the right data set?"
            ) from error
        except ValueError as error:
            raise PrepareError(f"{source}, record {number}: {error}") from error


def _prompt(record: Record, args: argparse.Namespace) -> Record:
    if args.text:
        return record
    system = [{"role": "system", "content": args.system}] if args.system else []
    return record | {"prompt": [*system, {"role": "user", "content": record["prompt"]}]}

"""Measure the loading of prompts from a large file.

Reported are the time that two ranks take until the first step has its prompts, with every record checked, the memory
that each rank holds, and the time of a later step. The records are synthetic: a prompt of about 150 characters, a label
and a field that nothing reads.

    .venv/bin/python tools/bench/data.py --rows 5000000
"""

import gzip
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

import pyarrow
import pyarrow.parquet
import torch.distributed as dist
from peak_memory import PeakMemory
from timed import Row, on_ranks, parser_of, report, seconds
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megappo.batch.exchange import Exchange
from megappo.config.schema import Config
from megappo.data.prompts import open_datasets
from megappo.data.tokenizer import RenderedText, encode, load_tokenizer
from megappo.rollouts.datasets import Datasets, unpacked_once

KINDS = ("jsonl", "jsonl.gz", "parquet")
RANKS = 2
STEP = 256
STEPS = 20
ROWS_AT_ONCE = 10_000
WORDS = ("Tom", "Ann", "has", "gives", "apples", "coins", "each", "day", "then", "how many", "are left", "if", "twice")
BYTES_A_ROW = 16


def main() -> None:
    parser = parser_of(__doc__, repeats=3)
    parser.add_argument("--rows", type=int, default=500_000, help="of a file (default %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder)
        for number in (args.rows // 10, args.rows):
            write(folder, number)
        found = (measured(folder, kind, args.rows, args.repeats) for kind in KINDS)
        report(list(chain.from_iterable(found)), args.json)


def measured(folder: Path, kind: str, rows: int, repeats: int) -> Iterator[Row]:
    """Yield the rows of the table for one kind of file."""
    few = on_ranks(RANKS, on_rank, str(folder), f"{rows // 10}.{kind}")
    runs = [on_ranks(RANKS, on_rank, str(folder), f"{rows}.{kind}") for _ in range(repeats)]
    found = {name: statistics.median(run[name] for run in runs) for name in few}
    loop = statistics.median(seconds(lambda: loaded(folder / f"{rows}.jsonl")) for _ in range(repeats))
    title = f"{rows:,} rows of {kind}, {RANKS} ranks"
    yield Row(f"{title}: start", found["start"] / loop, "at most 3", "json.loads of each", found["start"])
    growth = (found["bytes"] - few["bytes"]) / (rows - rows // 10)
    yield Row(f"{title}: memory", growth / BYTES_A_ROW, "at most 1", f"{BYTES_A_ROW} bytes a row of each rank", 0)
    yield Row(f"{title}: {STEP} of them", found["step"] / found["encode"], "at most 4", "tokenising", found["step"])


def loaded(file: Path) -> None:
    """Parse a file line by line with json.loads, the baseline."""
    with open(file, "rb") as lines:
        for line in lines:
            json.loads(line)


def on_rank(rank: int, folder: str, file: str) -> dict[str, float]:
    """Return the seconds of the start, of a step and of its tokenization alone, and the memory of the largest rank."""
    exchange = Exchange(dist.group.WORLD)
    tokenizer = load_tokenizer(folder)
    sections = {
        "model": {"path": folder},
        "data": {"train_files": [f"{folder}/{file}"]},
        "trainer": {"output_dir": "o"},
    }
    config = Config.model_validate(sections)
    memory, found = PeakMemory(), []

    def start() -> None:
        opened = open_datasets(config, tokenizer, unpack=partial(unpacked_once, exchange))
        datasets = Datasets(tokenizer, (), len(tokenizer), *opened)
        datasets.check(exchange)
        exchange.all_gather(datasets.train.batch(0))
        found.append(datasets.train)

    took = seconds(start)
    [train] = found
    size = config.data.draw_size
    places = range(size, size * (1 + STEPS), size)
    texts = [prompt.text for place in places for prompt in train.batch(place)]
    return {
        "start": took,
        "bytes": max(exchange.all_gather(memory.take())),
        "step": seconds(lambda: [train.batch(place) for place in places]) / STEPS,
        "encode": seconds(lambda: encode([RenderedText(text, is_chat=False) for text in texts], tokenizer)) / STEPS,
    }


def records(rows: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the records in batches."""
    choose = random.Random(0)
    sentences = [" ".join(choose.choices(WORDS, k=26)) for _ in range(1000)]
    for start in range(0, rows, ROWS_AT_ONCE):
        yield [
            {"prompt": f"{sentences[i % 1000]} {i} + {i % 977} =", "label": str(i + i % 977), "source": "made up"}
            for i in range(start, min(start + ROWS_AT_ONCE, rows))
        ]


def write(folder: Path, rows: int) -> None:
    """Write the same records as a file of each kind."""
    schema = pyarrow.schema({name: pyarrow.string() for name in ("prompt", "label", "source")})
    plain = folder / f"{rows}.jsonl"
    with open(plain, "w") as lines, pyarrow.parquet.ParquetWriter(folder / f"{rows}.parquet", schema) as table:
        for part in records(rows):
            lines.writelines(json.dumps(record) + "\n" for record in part)
            table.write_table(pyarrow.Table.from_pylist(part, schema))
    with open(plain, "rb") as content, gzip.open(f"{plain}.gz", "wb", compresslevel=1) as packed:
        packed.writelines(content)


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE tokenizer."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, show_progress=False)
    texts: Sequence[str] = [record["prompt"] for record in next(records(ROWS_AT_ONCE))]
    backend.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)


if __name__ == "__main__":
    main()

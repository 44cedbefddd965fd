"""Measure the bytes that a rank sends in the exchange of a step's rows, in a world and in one four times as large.

    .venv/bin/python tools/bench/exchange.py --ranks 8 32 --rows 16

Real ranks over gloo, with the same number of rows each. All ranks agree on the table of rows; each row goes with its
tokens and mask to the ranks of one shard (two tensor-parallel ones), and values for its tokens come back. The bytes are
what the kernel counts as written by the process, plus the bytes of rows that stayed on the rank (an eighth of the rows
by chance with 8 ranks). A ratio of 1 is a flat curve.
"""

import statistics
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from timed import Row, on_ranks, parser_of, report, seconds

from megappo.batch.balance import balanced_partitions
from megappo.batch.exchange import Batch, Exchange, output_sources, shard_destinations
from megappo.batch.rows import Rows
from megappo.placement.layout import Layout

LONGEST, TENSOR, FACTOR = 1024, 2, 1.1


def make_rows(num_rows: int, rank: int) -> Rows:
    """Return rows of log-normal lengths; the rows of a prompt are on one rank."""
    torch.manual_seed(rank)
    prompts = torch.full((num_rows,), 64)
    responses = (400 * (0.6 * torch.randn(num_rows)).exp()).clamp(1, LONGEST).long()
    responses[0] = LONGEST  # the same width everywhere
    mask = (torch.arange(LONGEST) < responses[:, None]).float()
    input_ids = torch.arange(int((prompts + responses).sum()))
    prompt_ids = rank * num_rows + torch.arange(num_rows)
    return Rows(torch.arange(num_rows), prompt_ids, prompts, responses, input_ids, {"response_mask": mask})


def exchange_rows(exchange: Exchange, rows: Rows) -> int:
    """Send rows with their tokens, return values, and give the bytes of the rows that stayed on this rank."""
    layout = Layout(tuple(range(exchange.world_size)), tensor=TENSOR)
    batch = exchange.number(rows)
    table, sources = batch.table, batch.owners
    shards = balanced_partitions(table.lengths.tolist(), layout.data)
    destinations = shard_destinations(layout, shards, exchange.world_size)
    moved = exchange.move(batch, destinations, ["response_mask"]).rows
    held = output_sources(layout, shards, exchange.world_size)
    outputs = moved.select(range(len(held[exchange.rank])))
    outputs = replace(outputs, fields={"values": outputs.response_mask})
    exchange.move_fields(Batch(outputs, table, held), ["values"], batch)
    mine = set(sources[exchange.rank])
    there, back = (list(mine.intersection(part[exchange.rank])) for part in (destinations, held))
    tokens, responses = table.prompt_lengths + table.response_lengths, table.response_lengths
    return int(4 * tokens[there].sum() + 4 * responses[there].sum() + 4 * responses[back].sum())


def written_bytes() -> int:
    """Return the bytes that this process has written since its start."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("wchar")).split()[1])


def measure(rank: int, num_rows: int, repeats: int) -> tuple[float, float]:
    """Return the mean bytes per exchange over all ranks, and this rank's median seconds."""
    exchange, rows = Exchange(dist.group.WORLD), make_rows(num_rows, rank)
    kept = exchange_rows(exchange, rows)
    before = written_bytes()
    took = [seconds(lambda: exchange_rows(exchange, rows)) for _ in range(repeats)]
    sent = exchange.all_gather((written_bytes() - before) / repeats + kept)
    return statistics.mean(sent), statistics.median(took)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs=2, default=[8, 32], help="of both worlds (default 8 32)")
    parser.add_argument("--rows", type=int, default=64, help="of each rank (default %(default)s)")
    args = parser.parse_args()
    (few, _), (many, took) = (on_ranks(ranks, measure, args.rows, args.repeats) for ranks in args.ranks)
    name = f"Bytes a rank sends, {args.rows} rows each, {args.ranks[1]} ranks"
    report(
        [Row(name, many / few, f"at most {FACTOR}", f"{args.ranks[0]} ranks: {few / 2**20:.2f} MiB", took)], args.json
    )


if __name__ == "__main__":
    main()

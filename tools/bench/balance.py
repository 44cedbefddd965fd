"""Measure how evenly megappo balances ragged rows over ranks, and how full the micro-batches are.

    .venv/bin/python tools/bench/balance.py --rows 2048 --ranks 8 --max-tokens 8192

There are two workloads: lengths drawn from one log-normal distribution, and from a mixture of two, short responses and
long ones that are mostly cut at the maximum. Everything is measured in tokens, as the balancer counts.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from timed import Row, medians, parser_of, report

from megappo.batch.balance import balanced_partitions, micro_batches

LONGEST_PROMPT, LONGEST_RESPONSE = 1024, 4096


def lengths(num_rows: int) -> dict[str, list[int]]:
    """Return the length of each row in tokens, prompt and response together, by distribution."""

    def log_normal(median: float, spread: float, longest: int) -> torch.Tensor:
        return (median * (spread * torch.randn(num_rows)).exp()).clamp(1, longest).int()

    prompts = log_normal(150, 0.5, LONGEST_PROMPT)
    short, long = log_normal(250, 0.4, LONGEST_RESPONSE), log_normal(3500, 0.3, LONGEST_RESPONSE)
    one = log_normal(650, 0.8, LONGEST_RESPONSE)
    two = torch.where(torch.rand(num_rows) < 0.7, short, long)
    return {"one peak": (prompts + one).tolist(), "two peaks": (prompts + two).tolist()}


def measure(name: str, tokens: list[int], args: argparse.Namespace) -> list[Row]:
    """Return the rows of the table: balance and fill, as shares of the ideal ones."""
    parts = [[tokens[row] for row in part] for part in balanced_partitions(tokens, args.ranks)]
    bins = sum(len(micro_batches(part, args.max_tokens)) for part in parts)
    took = medians(
        {
            "balance": lambda: balanced_partitions(tokens, args.ranks),
            "fill": lambda: [micro_batches(part, args.max_tokens) for part in parts],
        },
        args.repeats,
    )
    balance = sum(tokens) / (args.ranks * max(map(sum, parts)))
    fill = sum(tokens) / (bins * args.max_tokens)
    rows = f"{len(tokens)} rows, {name}"
    return [
        Row(f"{rows}, over {args.ranks} ranks", balance, "at least 0.97", "the largest rank's tokens", took["balance"]),
        Row(f"{rows}, in {bins} micro-batches", fill, "at least 0.95", f"{args.max_tokens} tokens each", took["fill"]),
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=2048, help="of a step (default %(default)s)")
    parser.add_argument("--ranks", type=int, default=8, help="data-parallel shards (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=8192, help="of a micro-batch (default %(default)s)")
    args = parser.parse_args()
    torch.manual_seed(0)
    report([row for name, tokens in lengths(args.rows).items() for row in measure(name, tokens, args)], args.json)


if __name__ == "__main__":
    main()

"""Time a reward function that takes a millisecond per response against the ideal, that time divided by the workers.

    .venv/bin/python tools/bench/rewards.py
    .venv/bin/python tools/bench/rewards.py --rows 100000 --workers 2 --repeats 1

The function sleeps, so that workers need no core of their own; the excess is the pool's overhead. Measured twice: with
all rows available at the beginning, and with rows that arrive in groups of 8.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

from timed import Row, medians, parser_of, report

from megappo.userland import signatures
from megappo.userland.rewards import RewardPool, load_reward

FUNCTION = """
import time
def f(solution_str, ground_truth):
    time.sleep(0.001)
    return ground_truth
"""
GROUP = 8
BAR = "at most 1.3"


def score(pool: RewardPool, rows: list[signatures.Row], together: int) -> None:
    """Score all rows, adding `together` of them at a time."""
    scoring = pool.begin()
    for start in range(0, len(rows), together):
        scoring.add(rows[start : start + together])
    found = [one.scores for one in scoring.results()]
    if found != [[float(row.label)] for row in rows]:
        raise ValueError("rows have others' scores")


def main() -> None:
    parser = parser_of(__doc__, repeats=3)
    parser.add_argument("--rows", type=int, default=10_000, help="responses (default %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default %(default)s)")
    args = parser.parse_args()
    rows = [signatures.Row("What is 37 plus 45?", "It is 82.", i, {}) for i in range(args.rows)]
    ideal = args.rows * 0.001 / args.workers
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "reward.py").write_text(FUNCTION)
        with load_reward(f"{folder}/reward.py:f", num_workers=args.workers, timeout_seconds=10.0) as pool:
            ways = {"at once": args.rows, f"in groups of {GROUP}": GROUP}
            took = medians({way: lambda n=n: score(pool, rows, n) for way, n in ways.items()}, args.repeats)
    name = f"{args.rows} rewards of 1 ms by {args.workers} workers"
    report([Row(f"{name}, {way}", took[way] / ideal, BAR, f"{ideal:g} s", took[way]) for way in ways], args.json)


if __name__ == "__main__":
    main()

"""Time the creation of a run's process groups in a large world, and count the groups that a rank is in.

    .venv/bin/python tools/bench/groups.py --ranks 4096
    .venv/bin/python tools/bench/groups.py --processes 16

By default one process is one rank of the world, and the other ranks do not exist: torch's fake backend. With
--processes all ranks are real, over gloo, and each group does an all-reduce.
"""

import argparse
import os
import sys
from itertools import chain
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from timed import Row, medians, on_ranks, parser_of, report, seconds
from torch.testing._internal.distributed.fake_pg import FakeStore

from megappo.runtime import megatron_setup

megatron_setup.install()

from megappo.placement.groups import build_groups  # noqa: E402
from megappo.placement.layout import Layout  # noqa: E402
from megappo.runtime import platform  # noqa: E402

ALLOWED_SECONDS, ALLOWED_GROUPS = 5, 20


def layouts(world_size: int) -> dict[str, Layout]:
    """Return the layouts of a dense actor, its reference, and a critic with a different layout."""
    ranks = tuple(range(world_size))
    large = world_size >= 1024
    actor = Layout(ranks, tensor=8, pipeline=8, context=2) if large else Layout(ranks, tensor=2, pipeline=2, context=2)
    critic = Layout(ranks, tensor=4, pipeline=4) if large else Layout(ranks, tensor=4)
    return {"actor": actor, "critic": critic, "reference": actor}


def own_groups(world_size: int) -> dict[str, dist.ProcessGroup]:
    """Return all groups of this rank, by name."""
    made = build_groups(layouts(world_size), seed=0)
    groups = chain.from_iterable(component._groups() for component in made.values() if component.member)
    return {group.group_name: group for group in [*groups, dist.group.WORLD]}


def simulate(args: argparse.Namespace) -> list[Row]:
    """Measure group creation on the first rank, which is in as many groups as any other."""
    platform.backend = lambda **_: "fake"
    counts = []

    def world() -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.ranks)
        counts.append(len(own_groups(args.ranks)))
        dist.destroy_process_group()

    took = medians({"groups": world}, args.repeats)["groups"]
    name = f"Groups of {args.ranks} ranks"
    return [
        Row(f"{name}, making them", took / ALLOWED_SECONDS, "at most 1", f"{ALLOWED_SECONDS} s", took),
        Row(f"{name}, of one rank", max(counts), f"at most {ALLOWED_GROUPS}", "1", 0.0),
    ]


def sum_up(rank: int, world_size: int) -> tuple[float, int]:
    """Create this rank's groups and all-reduce in each; return the seconds of their creation and their number."""
    made: dict[str, dist.ProcessGroup] = {}
    took = seconds(lambda: made.update(own_groups(world_size)))
    for _, group in sorted(made.items(), key=lambda one: int(one[0])):  # in the same order on all ranks
        members = dist.get_process_group_ranks(group)
        total = torch.tensor([rank])
        dist.all_reduce(total, group=group)
        if total.item() != sum(members):
            raise ValueError(f"rank {rank}: the group of {members} summed them up to {total.item()}")
    return took, len(made)


def real(world_size: int) -> list[Row]:
    """Measure group creation with one real process per rank."""
    took, count = on_ranks(world_size, sum_up, world_size)
    name = f"Groups of {world_size} processes over gloo"
    return [
        Row(f"{name}, making them", took / ALLOWED_SECONDS, "at most 1", f"{ALLOWED_SECONDS} s", took),
        Row(f"{name}, of one rank", count, f"at most {ALLOWED_GROUPS}", "1", 0.0),
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=4096, help="of the world (default %(default)s)")
    parser.add_argument("--processes", type=int, help="ranks that are real, a multiple of 8, instead")
    args = parser.parse_args()
    report(real(args.processes) if args.processes else simulate(args), args.json)


if __name__ == "__main__":
    main()

"""A save that training does not wait for has what was there when it began."""

from contextlib import nullcontext
from pathlib import Path

import torch
from commands import assert_equal
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.validation import StrictHandling
from spawn import run_ranks

from megappo.checkpoint.sharded import Writing, begin_sharded, load_sharded


def sharded(tensors: dict[str, torch.Tensor]) -> dict[str, ShardedTensor]:
    return {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in tensors.items()}


def check_files(rank: int, world_size: int, root: Path) -> None:
    """Three saves begin before the first is written, and one after; each holds what was there when it began."""
    live = {"whole": torch.randn(30, 20), "a view": torch.randn(40, 20)[5:35]}
    expected: list[dict[str, torch.Tensor]] = []

    def begin() -> Writing:
        folder = root / str(len(expected))
        folder.mkdir()
        expected.append({name: tensor.clone() for name, tensor in live.items()})
        writing = begin_sharded(sharded(live), folder, nullcontext, copies=True)
        for tensor in live.values():
            tensor += 1
        return writing

    begun = [begin() for _ in range(3)]
    for writing in begun:
        writing.write()
    begun.append(begin())
    begun[-1].write()
    for writing in begun:
        writing.finish()
    for number, tensors in enumerate(expected):
        empty = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
        found = load_sharded(sharded(empty), root / str(number), nullcontext, StrictHandling.RAISE_ALL)
        assert_equal(found, tensors)


def test_each_save_has_what_was_there_when_it_began(tmp_path: Path) -> None:
    run_ranks(1, check_files, tmp_path)

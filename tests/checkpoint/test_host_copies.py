"""A save's copies lie in memory of earlier ones, but of none that is still being written."""

import itertools
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
from commands import assert_equal
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.validation import StrictHandling
from spawn import run_ranks

from megappo.checkpoint import host_copies
from megappo.checkpoint.host_copies import HostCopies
from megappo.checkpoint.sharded import Writing, begin_sharded, load_sharded


def sharded(tensors: dict[str, torch.Tensor]) -> dict[str, ShardedTensor]:
    return {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in tensors.items()}


def check_files(rank: int, world_size: int, root: Path) -> None:
    """Three saves begin before the first is written, and one after; each holds what was there when it began."""
    copies, live = HostCopies(), {"whole": torch.randn(30, 20), "a view": torch.randn(40, 20)[5:35]}
    expected: list[dict[str, torch.Tensor]] = []

    def begin() -> Writing:
        folder = root / str(len(expected))
        folder.mkdir()
        expected.append({name: tensor.clone() for name, tensor in live.items()})
        writing = begin_sharded(sharded(live), folder, nullcontext, copies)
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
        found = load_sharded(sharded(empty), root / str(number), nullcontext(), StrictHandling.RAISE_ALL)
        assert_equal(found, tensors)


def test_each_save_has_what_was_there_when_it_began(tmp_path: Path) -> None:
    run_ranks(1, check_files, tmp_path)


def test_memory_is_used_again_when_it_was_given_back() -> None:
    copies, tensor = HostCopies(), torch.randn(4, 6)
    first, second = copies.copy(tensor), copies.copy(tensor[:, ::2].repeat(1, 2))
    assert len({first.data_ptr(), second.data_ptr(), tensor.data_ptr()}) == 3
    copies.give_back([first])
    others = [copies.copy(tensor.bfloat16()), copies.copy(tensor.T)]
    third, fourth = copies.copy(tensor + 1), copies.copy(tensor + 2)
    assert third.data_ptr() == first.data_ptr()
    assert all(other.is_contiguous() and other.data_ptr() != third.data_ptr() for other in (*others, fourth))
    assert torch.equal(third, tensor + 1) and torch.equal(fourth, tensor + 2)
    assert torch.equal(others[1], tensor.T) and torch.equal(second, tensor[:, ::2].repeat(1, 2))


def test_new_memory_takes_little_more_than_the_copies_in_powers_of_two() -> None:
    """torch rounds each allocation of pinned memory up to a power of two."""
    copies, sizes = HostCopies(), [3 * 2**10 + 4, 2**16 + 4, 4, 2**17 + 8] * 8
    with patch.object(host_copies, "BLOCK_BYTES", 2**16), patch.object(torch, "empty", wraps=torch.empty) as empty:
        made = [copies.copy(torch.zeros(size // 4)) for size in sizes]
    taken = [call.args[0] for call in empty.call_args_list]
    assert all(size.bit_count() == 1 for size in taken)
    assert 1.9 * sum(sizes) < sum(1 << (size - 1).bit_length() for size in sizes), "each by itself"
    assert sum(taken) < 1.45 * sum(sizes)
    places = sorted((copy.data_ptr(), copy.nbytes) for copy in made)
    assert all(begin + nbytes <= after for (begin, nbytes), (after, _) in itertools.pairwise(places))
    assert all(copy.untyped_storage().nbytes() == copy.nbytes for copy in made), "torch.save writes whole storages"

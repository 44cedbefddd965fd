"""A save that training does not wait for has what was there when it began, in the memory of the save before."""

import itertools
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
from commands import assert_equal
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.validation import StrictHandling
from spawn import run_ranks

from megappo.checkpoint.sharded import HostCopies, begin_sharded, load_sharded


def sharded(tensors: dict[str, torch.Tensor]) -> dict[str, ShardedTensor]:
    return {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in tensors.items()}


def check_files(rank: int, world_size: int, root: Path) -> None:
    """Each save holds what was there when it began; the state has changed before it is written."""
    copies, live = HostCopies(), {"whole": torch.randn(30, 20), "a view": torch.randn(40, 20)[5:35]}
    for number in range(3):
        folder = root / str(number) / "actor"
        folder.mkdir(parents=True)
        expected = {name: tensor.clone() for name, tensor in live.items()}
        writing = begin_sharded(sharded(live), folder, nullcontext, copies)
        for tensor in live.values():
            tensor += 1
        writing.write()
        writing.finish()
        empty = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
        assert_equal(load_sharded(sharded(empty), folder, nullcontext, StrictHandling.RAISE_ALL), expected)


def test_each_save_has_what_was_there_when_it_began(tmp_path: Path) -> None:
    run_ranks(1, check_files, tmp_path)


def test_memory_is_used_again_for_the_same_name() -> None:
    copies, tensor = HostCopies(), torch.randn(4, 6)
    first, other = copies.copy("first", tensor), copies.copy("other", tensor.T)
    assert len({first.data_ptr(), other.data_ptr(), tensor.data_ptr()}) == 3
    assert other.is_contiguous() and torch.equal(other, tensor.T)
    again = copies.copy("first", tensor + 1)
    assert again.data_ptr() == first.data_ptr() and torch.equal(again, tensor + 1)


def test_new_memory_takes_little_more_than_the_copies_in_powers_of_two() -> None:
    """torch rounds each allocation of pinned memory up to a power of two."""
    copies, sizes = HostCopies(), [3 * 2**10 + 4, 2**16 + 4, 4, 2**17 + 8] * 8
    with (
        patch("megappo.runtime.host_memory.BLOCK_BYTES", 2**16),
        patch.object(torch, "empty", wraps=torch.empty) as empty,
    ):
        made = [copies.copy(str(number), torch.zeros(size // 4)) for number, size in enumerate(sizes)]
    taken = [call.args[0] for call in empty.call_args_list]
    assert all(size.bit_count() == 1 for size in taken)
    assert 1.9 * sum(sizes) < sum(1 << (size - 1).bit_length() for size in sizes), "each by itself"
    assert sum(taken) < 1.45 * sum(sizes)
    places = sorted((copy.data_ptr(), copy.nbytes) for copy in made)
    assert all(begin + nbytes <= after for (begin, nbytes), (after, _) in itertools.pairwise(places))
    assert all(copy.untyped_storage().nbytes() == copy.nbytes for copy in made), "torch.save writes whole storages"

"""A load reads the checkpoint once over all ranks, and each rank holds only the tensors that it keeps."""

import io
import itertools
import sys
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from commands import assert_equal
from component_engines import build, train
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from ppo_engines import Case
from saved import save_checkpoint
from spawn import run_ranks
from tiny_models import hf_folder
from tiny_shapes import EXPERTS
from torch.distributed.checkpoint.utils import _create_file_view

from megappo.batch.exchange import Exchange
from megappo.checkpoint.safe_reading import _numbers
from megappo.checkpoint.store import CheckpointStore
from megappo.models.sharding import boxes
from megappo.models.train_engine import TrainedEngine
from megappo.placement.layout import Layout

sys.path.append(str(Path(__file__).parents[2] / "tools" / "bench"))
from peak_memory import MIB, PeakMemory, bytes_read

WIDE = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 8192}
SLACK = 2**21
"""Metadata, and what files are read ahead."""
EARLY = frozenset({"overlap_grad_reduce"})
FOUR = (0, 1, 2, 3)


@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (3, 1, 4), (2, 3, 4), (1, 6, 2, 2)], ids=str)
def test_boxes_cover_any_range_once_and_in_order(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(prod(shape)).reshape(shape)
    for start, stop in itertools.combinations_with_replacement(range(prod(shape) + 1), 2):
        found = [
            numbers[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))].flatten()
            for offsets, sizes in boxes(shape, start, stop)
        ]
        assert torch.cat([torch.empty(0, dtype=torch.int64), *found]).tolist() == list(range(start, stop))
        assert len(found) <= max(1, 2 * len(shape) - 1)


def states(engine: TrainedEngine) -> list[torch.Tensor]:
    """Weights, and this rank's main parameters and moments."""
    found = [parameter.data for chunk in engine.chunks for parameter in chunk.parameters()]
    for part in engine.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                found += [parameter.data, state["exp_avg"], state["exp_avg_sq"]]
    return found


def check_read_once(rank: int, world_size: int, model: Path, folder: Path, switches: frozenset[str]) -> None:
    exchange = Exchange(dist.group.WORLD)
    case = Case(Layout(tuple(range(world_size))), switches=switches)
    engines = build({"actor": model}, {"actor": case})
    train(engines, 1)
    engine, store = engines["actor"], CheckpointStore(folder, 0, exchange)
    path = save_checkpoint(store, 1, engines, {})
    expected = [tensor.clone() for tensor in states(engine)]
    for tensor in states(engine):
        tensor.fill_(torch.nan)
    memory, before = PeakMemory(), bytes_read()
    store.load(path, engines)
    read, held = bytes_read() - before, memory.take()
    assert all(map(torch.equal, states(engine), expected))
    size = sum(file.stat().st_size for file in path.rglob("*.distcp"))
    largest = max(tensor.nbytes for tensor in states(engine))
    everyone = exchange.all_gather((read, held))
    assert size > 16 * 2**20
    assert sum(read for read, _ in everyone) == pytest.approx(size, rel=0.2), (everyone, size)
    assert all(read < 1.2 * size / world_size + SLACK for read, _ in everyone), (everyone, size)
    assert all(held < 4 * largest + 16 * MIB for _, held in everyone), (everyone, largest)


@pytest.mark.parametrize(
    ("world_size", "switches"), [(1, frozenset()), (2, frozenset()), (4, frozenset()), (4, EARLY)], ids=str
)
def test_all_ranks_read_a_checkpoint_once_and_hold_what_they_keep(
    world_size: int, switches: frozenset[str], tmp_path: Path
) -> None:
    """No rank reads or holds more where there are more: neither with one bucket, in which most parameters lie whole on
    one rank, nor with many, where each of them is cut over all."""
    model = hf_folder(tmp_path / "model", "qwen2", **WIDE)
    run_ranks(world_size, check_read_once, model, tmp_path / "checkpoints", switches)


MOVES = {
    "qwen2": (Layout(FOUR), Layout(FOUR, tensor=2), Layout(FOUR, pipeline=2), Layout((2,)), Layout((0, 1, 2))),
    "qwen3_moe": (
        Layout(FOUR, expert=2),
        Layout(FOUR, tensor=2, expert=2),
        Layout(FOUR, pipeline=2, expert=2),
        Layout(FOUR, context=2, expert_tensor=2),
        Layout((1, 3)),
    ),
}


def check_moved(rank: int, world_size: int, model: Path, root: Path, layouts: list[Layout], case: Case) -> None:
    """From each layout to the next and back to the first, where nothing may have changed."""
    exchange = Exchange(dist.group.WORLD)
    for number, layout in enumerate([*layouts, layouts[0]]):
        engines = build({"actor": model}, {"actor": replace(case, layout=layout, sequence=layout.tensor > 1)})
        store = CheckpointStore(root / str(number), 0, exchange)
        if number:
            store.load(CheckpointStore(root / str(number - 1), 0, exchange).latest(), engines)
        else:
            train(engines, 2)
            first = [tensor.clone() for tensor in states(engines["actor"])]
        save_checkpoint(store, 1, engines, {})
    assert any(isinstance(part, DistributedOptimizer) for part in engines["actor"].optimizer.chained_optimizers)
    assert_equal(dict(enumerate(states(engines["actor"]))), dict(enumerate(first)))


@pytest.mark.parametrize(
    ("family", "dtype", "switches"),
    [
        ("qwen3_moe", "bf16", frozenset()),
        pytest.param("qwen2", "fp32", EARLY, marks=pytest.mark.slow),
        pytest.param("qwen2", "bf16", frozenset(), marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "fp32", EARLY, marks=pytest.mark.slow),
    ],
)
def test_states_keep_every_bit_through_other_layouts(
    family: str, dtype: str, switches: frozenset[str], tmp_path: Path
) -> None:
    model = hf_folder(tmp_path / "model", family, **(EXPERTS if family == "qwen3_moe" else {}))
    case = Case(Layout(FOUR), dtype=dtype, switches=switches)
    run_ranks(4, check_moved, model, tmp_path, list(MOVES[family]), case)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 3, 5),
        torch.randn(6, 5).T,
        torch.randn(9, 4)[2:8:2],
        torch.randn(7).bfloat16(),
        torch.tensor(3.5),
        torch.arange(12).view(3, 4),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}",
)
def test_any_box_of_a_stored_tensor_is_read(tensor: torch.Tensor) -> None:
    file = io.BytesIO(b"before it")
    file.seek(0, io.SEEK_END)
    begin = file.tell()
    torch.save(tensor, file)
    length = file.tell() - begin
    file.write(b"after it")
    every = [[(at, to - at) for at in range(size) for to in range(at + 1, size + 1)] for size in tensor.shape]
    for box in itertools.product(*every):
        offsets, lengths = [offset for offset, _ in box], [length for _, length in box]
        expected = tensor[tuple(slice(offset, offset + length) for offset, length in box)]
        assert torch.equal(_numbers(_create_file_view(file, begin, length), offsets, lengths), expected)

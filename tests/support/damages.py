"""Damages that disks and copies do to the files of a checkpoint."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from megappo.batch.exchange import Exchange
from megappo.checkpoint.store import CheckpointStore


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 16
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a bit": flip,
    "the end": cut,
    "all but the name": lambda path: os.truncate(path, 0),
    "the file": Path.unlink,
}


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def check_one_by_one(rank: int, world_size: int, whole: Path, folder: Path) -> None:
    """Damage each file of the newest checkpoint in each way, and repair it.

    The folder has copies of the intact checkpoints of steps 1 to 3. A damaged one is named, and the one before is used.
    """
    exchange = Exchange(dist.group.WORLD)
    for name, damage in DAMAGES.items():
        for original in files_of(whole / "step_00000003"):
            file = folder / original.relative_to(whole)
            if rank == 0:
                damage(file)
            exchange.all_gather(None)
            warnings: list[str] = []
            found = CheckpointStore(folder, 0, exchange, warnings.append).latest()
            assert found == folder / "step_00000002", (name, file)
            assert rank or file.name in warnings[0], (name, file)
            exchange.all_gather(None)
            if rank == 0:
                shutil.copyfile(original, file)
            exchange.all_gather(None)
        assert CheckpointStore(folder, 0, exchange).latest() == folder / "step_00000003"

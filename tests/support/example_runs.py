"""Whole runs that learn from examples in place of rollouts: fine-tuning, and training of a reward model."""

import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from program import START_SECONDS, Program


def megappo(name: str) -> tuple[str, ...]:
    """Return a command of megappo."""
    return (sys.executable, "-m", "megappo", name)


def write_config(path: Path, kind: str, component: str, max_tokens: int, files: Sequence[Path]) -> Path:
    """Write a config of four steps for the tiny model beside it.

    Args:
        component: the trained one.
        max_tokens: most tokens of its micro-batches.
        files: training and held-out data.
    """
    train, held_out = map(str, files)
    settings = {
        "model": {"path": str(path.parent / "model"), "dtype": "fp32"},
        component: {"parallel": {"tensor": 2}, "optim": {"lr": 1e-2}, "max_tokens_per_micro_batch": max_tokens},
        "data": {
            "train_files": train,
            "val_files": held_out,
            "train_batch_size": 8,
            "max_length": 12,
            "shuffle": False,
        },
        "trainer": {"kind": kind, "total_steps": 4, "save_interval": 2, "eval_interval": 2},
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def finish(
    folder: Path,
    config: Path,
    name: str,
    *overrides: str,
    command: tuple[str, ...],
    seconds: float = START_SECONDS,
) -> Path:
    """Make a run to its end; return its output folder, `name` in `folder`."""
    with Program(folder / "program", config, f"trainer.output_dir={folder / name}", *overrides, command=command) as one:
        assert one.wait(seconds) == 0, one.output
    return folder / name

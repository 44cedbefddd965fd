"""A checkpoint that cannot be written does not end the training: it is reported, counted and retried."""

import resource
from pathlib import Path

import pytest
from recorder import recorder_in
from spawn import run_ranks

from megappo.batch.exchange import OtherRankError
from megappo.checkpoint.folders import CheckpointError
from megappo.config.schema import Config
from megappo.recipes.ppo import ppo_step


def limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def failing_saves(rank: int, world_size: int, folder: Path) -> None:
    """First the ranks of one component cannot write, unknown to the ranks of the other; then rank 0 cannot."""
    bench = recorder_in(folder)
    changes = {"trainer": {"output_dir": str(folder / "run")}}
    layout = bench.LAYOUTS["actor dp2, critic elsewhere tp2 sp"]
    run = bench.build(Config.model_validate(bench.merged(bench.settings(folder), layout, changes)))
    lines = []
    run.observer.message = lines.append
    run.observer.checkpoint = lambda step, path: lines.append(f"{step} {path}")
    for failing, size in ((3, 2000), (0, 2000)):
        if rank == failing:
            limit_files(size)
        run.save(may_fail=True)
        run.exchange.all_gather(None)
        assert run.progress.is_overdue
        assert list((folder / "run" / "checkpoints").glob("step*")) == []
        with pytest.raises((CheckpointError, OtherRankError)):
            run.save()
        limit_files(resource.RLIM_INFINITY)
        run.exchange.all_gather(None)
    assert run.progress.failed_saves == 2 and len(lines) == 2
    assert all(line.startswith("WARNING: ") and "the save is retried after the next step" in line for line in lines)
    assert "cannot save critic to " in lines[0] and "cannot save actor to " in lines[1]
    metrics = ppo_step(run, 1)
    run.save(may_fail=True)
    assert not run.progress.is_overdue and run.progress.is_saved and metrics
    assert lines[2].startswith("1 /") and lines[2].endswith("checkpoints/step_00000001")


def test_it_is_reported_counted_and_retried(tmp_path: Path) -> None:
    run_ranks(4, failing_saves, tmp_path, timeout=60)

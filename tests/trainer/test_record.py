"""A record that a run goes on with: which of its steps are as the run would write them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megappo.batch.folders import rows_file
from megappo.batch.rows import Rows
from megappo.config.schema import Config
from megappo.data.prompts import Prompt
from megappo.trainer.record import Record

ROWS = Rows(
    *(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)),
    torch.ones(1, dtype=torch.int64),
    [torch.tensor([1, 2])],
    {"response_mask": torch.ones(1, 1), "scores": torch.ones(1)},
)
BATCH = SimpleNamespace(at_rank_0=lambda exchange: ROWS)
PROMPTS = SimpleNamespace(indices=lambda step: [2 * step, 2 * step + 1])


def record(folder: Path, *, model: str = "m", top_k: int = -1, rollout_only: bool = True) -> Record:
    config = Config.model_validate(
        {
            "model": {"path": model},
            "rollout": {"top_k": top_k},
            "data": {"train_files": ["f"], "train_batch_size": 2},
            "trainer": {"output_dir": "o", "total_steps": 4, "rollout_only": rollout_only},
        }
    )
    return Record(folder, config, SimpleNamespace(on_rank_0=lambda action: action()))


def write(into: Record, *steps: int) -> None:
    for step in steps:
        into.write(step, BATCH, [Prompt(i, [1], "", float("nan")) for i in PROMPTS.indices(step - 1)], 1)


def test_steps_from_the_first_on_count_that_are_as_the_run_would_write_them(tmp_path):
    ours = record(tmp_path / "record")
    assert ours.num_written(PROMPTS) == 0
    write(ours, 1, 2, 4)
    assert ours.num_written(PROMPTS) == 2, "the third is missing"
    write(ours, 3)
    assert ours.num_written(PROMPTS) == 4
    assert ours.num_written(SimpleNamespace(indices=lambda step: [step])) == 0, "of other prompts"
    rows_file(ours.folder, 3).write_bytes(b"cut off")
    assert ours.num_written(PROMPTS) == 2


@pytest.mark.parametrize("other", [{"model": "n"}, {"top_k": 3}, {"rollout_only": False}])
def test_steps_that_were_sampled_otherwise_are_written_anew(tmp_path, other):
    ours = record(tmp_path)
    write(ours, 1, 2, 3, 4)
    write(record(tmp_path, **other), 2)  # a run that trains has other weights by then
    assert ours.num_written(PROMPTS) == 1

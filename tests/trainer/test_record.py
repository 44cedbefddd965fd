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


def record(
    folder: Path, *, model: str = "m", top_k: int = -1, reward: str = "exact_match", rollout_only: bool = True
) -> Record:
    config = Config.model_validate(
        {
            "model": {"path": model},
            "rollout": {"top_k": top_k},
            "reward": {"function": reward},
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
    assert ours.going_on(PROMPTS) == (0, [])
    write(ours, 1, 2, 4)
    assert ours.going_on(PROMPTS) == (2, []), "the third is missing"
    write(ours, 3)
    assert ours.going_on(PROMPTS) == (4, [])
    assert ours.going_on(SimpleNamespace(indices=lambda step: [step])) == (0, ["prompts"])
    rows_file(ours.folder, 3).write_bytes(b"cut off")
    assert ours.going_on(PROMPTS) == (2, [])


OTHERWISE = {"model": "n", "top_k": 3, "rollout_only": False}
CHANGED = {"model": "model", "top_k": "sampling", "rollout_only": "weights_step"}


@pytest.mark.parametrize("key", OTHERWISE)
def test_steps_that_were_sampled_otherwise_are_written_anew(tmp_path, key):
    ours = record(tmp_path)
    write(ours, 1, 2, 3, 4)
    write(record(tmp_path, **{key: OTHERWISE[key]}), 2)  # a run that trains has other weights by then
    assert ours.going_on(PROMPTS) == (1, [CHANGED[key]])


def test_steps_that_were_scored_by_another_version_of_the_function_are_written_anew(tmp_path):
    (tmp_path / "reward.py").write_text("def f(prompts, responses, labels): return [0.0] * len(labels)\n")
    ours = record(tmp_path, reward=f"{tmp_path}/reward.py:f")
    write(ours, 1)
    assert ours.going_on(PROMPTS) == (1, [])
    (tmp_path / "reward.py").write_text("def f(prompts, responses, labels): return [1.0] * len(labels)\n")
    write(ours, 2)  # by workers that have loaded the one before
    assert ours.going_on(PROMPTS) == (2, [])
    assert record(tmp_path, reward=f"{tmp_path}/reward.py:f").going_on(PROMPTS) == (0, ["reward_file"])

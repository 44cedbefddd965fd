"""A run on files with weights, in the order of a field."""

import json
from pathlib import Path

import pytest
from program import Program
from safetensors import safe_open

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


def test_a_run_takes_of_each_file_its_share_from_the_easiest_on(config: Path, folder: Path):
    """The files have 24 and 12 records, numbered from 0 and 24, each in descending difficulty."""
    lines = list(map(json.loads, (config.parent / "train.jsonl").read_text().splitlines()[:36]))
    for name, part in {"sums.jsonl": lines[:24], "more.jsonl": lines[24:]}.items():
        records = [record | {"difficulty": -number} for number, record in enumerate(part)]
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    record = folder / "record"
    settings = (
        *(f"trainer.output_dir={folder / 'out'}", f"trainer.record_rollouts={record}", "trainer.total_steps=2"),
        f"data.train_files={{{folder}/sums.jsonl: 3, {folder}/more.jsonl: 1}}",
        *("data.order_by=difficulty", "data.train_batch_size=8", "trainer.eval_interval=0", "data.val_files=[]"),
        *("actor.ppo_mini_batch_size=8", "critic.ppo_mini_batch_size=8"),
    )
    with Program(folder / "program", config, *settings) as program:
        assert program.wait() == 0, program.output
    for step, expected in ((1, [35, 34, *range(18, 24)]), (2, [33, 32, *range(12, 18)])):
        with safe_open(record / f"step_{step:08}.safetensors", framework="pt") as file:
            assert sorted(json.loads(file.metadata()["facts"])["prompts"]) == sorted(expected)

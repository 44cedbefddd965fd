"""A run on data with skipped records and truncated prompts: reported once, and trained on the remaining rows."""

import json
from pathlib import Path

import pytest
from program import Program
from safetensors import safe_open

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


def test_a_run_goes_on_without_bad_records(config: Path, folder: Path):
    """One step takes all remaining prompts; the one of 11 tokens keeps its last 8."""
    lines = (config.parent / "train.jsonl").read_text().splitlines()[:30]
    lines[5:5] = ["{broken", json.dumps({"prompt": "1+2+3+4+5+6", "label": "21"}), json.dumps({"prompt": "no label"})]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    record = folder / "record"
    settings = (
        *(f"trainer.output_dir={folder / 'out'}", f"trainer.record_rollouts={record}", "trainer.total_steps=1"),
        *(f"data.train_files={folder / 'train.jsonl'}", "data.train_batch_size=31", "actor.ppo_mini_batch_size=31"),
        *("critic.ppo_mini_batch_size=31", "data.on_bad_row=skip", "data.too_long=truncate_left"),
    )
    with Program(folder / "program", config, *settings) as program:
        assert program.wait() == 0, program.output
    reported = [line for line in program.output.splitlines() if "train.jsonl line" in line]
    assert [line.partition(": data.train_files")[0] for line in reported] == [
        "left out",
        "left out",
        "cut to its last tokens",
    ]
    assert " line 6: not valid JSON" in reported[0] and " line 8: no field 'label'" in reported[1]
    assert " line 7: " in reported[2]
    with safe_open(record / "step_00000001.safetensors", framework="pt") as file:
        of_prompts, lengths = file.get_tensor("prompt_ids").tolist(), file.get_tensor("prompt_lengths").tolist()
        taken = json.loads(file.metadata()["facts"])["prompts"]
    assert sorted(taken) == [0, 1, 2, 3, 4, 6, *range(8, 33)]
    assert {length for prompt, length in zip(of_prompts, lengths, strict=True) if taken[prompt] == 6} == {8}

"""A run that trains only on groups whose scores differ, and chooses the same prompts after a restart."""

import json
from pathlib import Path

import pytest
import yaml
from program import Program, logged
from safetensors import safe_open

from megappo.config.schema import Data
from megappo.data.prompts import PromptDataset
from megappo.data.tokenizer import load_tokenizer

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
FUNCTION = """
import zlib
def f(solution_str, ground_truth):
    return 0 if int(ground_truth) % 2 else 1 + zlib.crc32(solution_str.encode()) % 1000
"""
"""All responses to an odd sum have the same score."""


def test_steps_take_as_many_prompts_as_they_need_and_go_on_behind_them(config: Path, folder: Path):
    (folder / "reward.py").write_text(FUNCTION)
    record = folder / "record"
    settings = (
        *(f"trainer.output_dir={folder / 'out'}", f"trainer.record_rollouts={record}", "trainer.eval_interval=0"),
        *(f"reward.function={folder / 'reward.py'}:f", "algorithm.filter_groups.enable=true"),
    )
    for total in (1, 3):
        with Program(folder / str(total), config, *settings, f"trainer.total_steps={total}") as program:
            assert program.wait() == 0, program.output
    given = yaml.safe_load(config.read_text())
    files = [given["data"]["train_files"]]
    labels = [int(json.loads(line)["label"]) for line in Path(files[0]).read_text().splitlines()]
    data = Data(train_files=tuple(files), train_batch_size=32)
    dataset = PromptDataset(files, load_tokenizer(given["model"]["path"]), data, 0)
    num_drawn = 0
    for step, metrics in enumerate(logged(folder / "out")[-3:], start=1):
        drawn: list[int] = []
        begun = num_drawn
        while sum(labels[index] % 2 == 0 for index in drawn) < 32:
            drawn += dataset.indices(num_drawn)
            num_drawn += 32
        even = [index for index in drawn if labels[index] % 2 == 0]
        with safe_open(record / f"step_{step:08d}.safetensors", framework="pt") as file:
            assert json.loads(file.metadata()["facts"])["prompts"] == even[:32]
            scores = file.get_tensor("fields.scores").reshape(32, 4)
        assert (scores.min(dim=1).values < scores.max(dim=1).values).all()
        assert 32 * metrics["filter_groups/num_gen_batches"] == num_drawn - begun > 32
        assert metrics["filter_groups/equal_groups"] == len(drawn) - len(even)
        assert metrics["filter_groups/surplus_groups"] == len(even) - 32
        assert metrics["filter_groups/equal_groups_kept"] == 0

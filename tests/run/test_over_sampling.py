"""Runs that draw more prompts than a step trains on, and train on the first to finish."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from program import Program, logged
from safetensors import safe_open

from megappo.config.schema import Data
from megappo.data.prompts import PromptDataset
from megappo.data.tokenizer import load_tokenizer

pytestmark = pytest.mark.timeout(600)
DRAWN, TAKEN, N = 56, 8, 4
AT_ONCE = 12
"""Prompts that the engine gets in its first request: four of them, at least, are begun in vain."""
FUNCTION = """
import zlib
def f(solution_str, ground_truth):
    return 0 if int(ground_truth) % 2 else 1 + zlib.crc32(solution_str.encode()) % 1000
"""
"""All responses to an odd sum have the same score."""


def settings(folder: Path, *further: str) -> list[str]:
    """Return settings with few concurrent requests, so that most prompts are still waiting when there are enough."""
    return [
        *(f"trainer.output_dir={folder / 'out'}", f"trainer.record_rollouts={folder / 'record'}"),
        *("trainer.eval_interval=0", f"data.train_batch_size={TAKEN}", f"data.gen_batch_size={DRAWN}"),
        *(f"rollout.max_running_requests={AT_ONCE * N}", "rollout.max_response_length=20"),
        *(f"actor.ppo_mini_batch_size={TAKEN}", *further),
    ]


def drawn(config: Path, first: int, last: int) -> list[int]:
    """Return the prompts between two positions of the data."""
    given = yaml.safe_load(config.read_text())
    data = Data(train_files=(given["data"]["train_files"],), train_batch_size=DRAWN)
    dataset = PromptDataset(data.train_files, load_tokenizer(given["model"]["path"]), data, 0)
    return [index for place in range(first, last, DRAWN) for index in dataset.indices(place)]


def recorded(folder: Path, step: int) -> dict:
    """Return a recorded step's facts, its scores and its number of response tokens."""
    with safe_open(folder / "record" / f"step_{step:08d}.safetensors", framework="pt") as file:
        facts = json.loads(file.metadata()["facts"])
        written = int(file.get_tensor("fields.response_mask").sum())
        return facts | {"scores": file.get_tensor("fields.scores").reshape(TAKEN, N), "written": written}


@pytest.mark.slow  # tests/rollouts/test_over_sampling.py has the engine, tests/trainer/test_filtering.py the choice
def test_a_step_trains_on_the_prompts_that_are_finished_first(config: Path, folder: Path):
    """Only these get greedy responses for the estimator."""
    greedy = ("algorithm.adv_estimator=remax", "trainer.total_steps=2")
    with Program(folder / "program", config, *settings(folder, *greedy)) as program:
        assert program.wait() == 0, program.output
    for step, metrics in enumerate(logged(folder / "out"), start=1):
        found, batch = recorded(folder, step), drawn(config, (step - 1) * DRAWN, step * DRAWN)
        assert len(found["prompts"]) == TAKEN
        places = [batch.index(prompt) for prompt in found["prompts"]]
        assert all(one < other for one, other in pairwise(places)) and places[-1] < DRAWN - 8
        unfinished, surplus = (metrics[f"over_sampling/{what}_groups"] for what in ("unfinished", "surplus"))
        assert 8 < unfinished <= DRAWN - TAKEN and 0 <= surplus == DRAWN - TAKEN - unfinished
        in_vain = metrics["over_sampling/dropped_tokens"]
        assert in_vain >= N * max(surplus, AT_ONCE - TAKEN), "a token of each response that was begun"
        greedy_tokens = metrics["rollout/num_tokens"] - found["written"] - in_vain
        assert TAKEN <= greedy_tokens <= 20 * TAKEN
        assert metrics["rollout/engine_restarts"] == 0
    assert step == 2 and found["prompts_drawn"] == 2 * DRAWN


@pytest.mark.slow  # the run above has what they share, tests/trainer/test_filtering.py the choice
def test_rollouts_alone_whose_scores_differ_go_on_where_they_were(config: Path, folder: Path):
    (folder / "reward.py").write_text(FUNCTION)
    of_scores = (f"reward.function={folder / 'reward.py'}:f", "algorithm.filter_groups.enable=true")
    of_scores += (f"critic.ppo_mini_batch_size={TAKEN}",)
    for total in (1, 3):
        further = ("trainer.rollout_only=true", *of_scores, f"trainer.total_steps={total}")
        with Program(folder / str(total), config, *settings(folder, *further)) as program:
            assert program.wait() == 0, program.output
    assert "continuing after step 1, the last one in " in program.output
    num_drawn = 0
    for step, metrics in enumerate(logged(folder / "out")[-3:], start=1):
        found = recorded(folder, step)
        assert (found["scores"].min(dim=1).values < found["scores"].max(dim=1).values).all()
        assert found["prompts_drawn"] - num_drawn == DRAWN * metrics["filter_groups/num_gen_batches"]
        assert set(found["prompts"]) <= set(drawn(config, num_drawn, num_drawn := found["prompts_drawn"]))
        groups = [f"filter_groups/{what}_groups" for what in ("equal", "surplus")] + ["over_sampling/unfinished_groups"]
        total = DRAWN * metrics["filter_groups/num_gen_batches"]
        assert sum(metrics[name] for name in groups) == total - TAKEN
        assert metrics["over_sampling/unfinished_groups"] > 0

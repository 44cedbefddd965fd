"""A run on verl's data with a reward function of verl's signature.

It gets each row's fields, and a failure on one record affects that record only.
"""

import json
import shutil
from pathlib import Path

import pytest
from program import Program, logged
from safetensors import safe_open
from transformers import AutoTokenizer
from verl_style import CHAT_TEMPLATE, write_gsm8k

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
FUNCTION = """
async def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    assert data_source == "openai/gsm8k" and int(ground_truth) == 82 + 8 * extra_info["index"]
    assert extra_info["index"] != 3
    return {"score": extra_info["index"] + len(solution_str) / 100, "acc": False}
"""


def test_each_rows_fields_reach_its_score(config: Path, folder: Path):
    """Scores equal those computed independently of the program; the record has the indices of the sampled rows."""
    model, record = folder / "model", folder / "record"
    shutil.copytree(config.parent / "model", model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(model)
    (folder / "reward.py").write_text(FUNCTION)
    settings = (
        *(f"trainer.output_dir={folder / 'out'}", f"trainer.record_rollouts={record}", f"model.path={model}"),
        *("trainer.total_steps=1", "trainer.eval_interval=1", "reward.num_workers=2"),
        *(f"data.train_files={write_gsm8k(folder / 'train.parquet')}", "data.label_key=reward_model.ground_truth"),
        *(f"data.val_files={write_gsm8k(folder / 'held_out.parquet', 8)}",),
        *(f"reward.function={folder / 'reward.py'}:compute_score", "reward.on_error=zero"),
    )
    with Program(folder / "program", config, *settings) as program:
        assert program.wait() == 0, program.output
    with safe_open(record / "step_00000001.safetensors", framework="pt") as file:
        tokens, scores, of_prompts = (file.get_tensor(name) for name in ("tokens", "fields.scores", "prompt_ids"))
        prompts, responses = file.get_tensor("prompt_lengths"), file.get_tensor("response_lengths")
        taken = json.loads(file.metadata()["facts"])["prompts"]
    rows = tokens.split((prompts + responses).tolist())
    texts = [tokenizer.decode(row[start:], skip_special_tokens=True) for row, start in zip(rows, prompts, strict=True)]
    of_texts = [(taken[i], text) for i, text in zip(of_prompts.tolist(), texts, strict=True)]
    expected = [0.0 if index == 3 else index + len(text) / 100 for index, text in of_texts]
    assert len(set(taken)) == 32 and len(expected) == 32 * 4
    assert scores.tolist() == pytest.approx(expected)
    metrics = logged(folder / "out")[-1]
    assert 3.125 < metrics["val/held_out/score/mean"] < 3.225, "the mean of 0 to 7 without 3, and of some lengths"
    assert (metrics["val/held_out/errors"], metrics["val/held_out/timeouts"]) == (1, 0)
    assert metrics["reward/errors"] == 4 * taken.count(3)
    assert "1 responses have score 0: reward function " in program.output, program.output
    assert "raised AssertionError" in program.output and "parquet row 4)" in program.output

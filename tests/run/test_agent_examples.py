"""The examples of agents: the calculator in four forms gives the same rows, and a compaction is learned."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from program import REPOSITORY, Program, logged
from safetensors.torch import load_file

from megappo.observe.files import rows_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500), pytest.mark.xdist_group("agent_examples")]
FORMS = {
    "tools": (),
    "environment": ("rollout.environment={folder}/forms.py:Calculator", "rollout.tools=[]"),
    "agent": ("rollout.agent={folder}/forms.py:solve", "rollout.tools=[]"),
    "command": ("rollout.agent_command={python} {folder}/forms.py", "rollout.tools=[]"),
}
CODE = """
import asyncio
import json
import os
import sys

sys.path.insert(0, {configs!r})
from calculator import calculator
from calculator_agent import CALCULATOR, OPENAI, solve as whole


class Calculator:
    columns = ()
    tools = [CALCULATOR]

    def reset(self, row):
        return None

    def step(self, message):
        text = message["content"]
        if "<tool_call>" not in text:
            return None, 0.0, True, {{"tool_calls": 0, "tool_errors": 0}}
        called = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        return {{"role": "tool", "content": calculator(**called["arguments"])}}, 0.0, False


async def solve(base_url, api_key, row):
    await whole(base_url, api_key, row)  # reward.function scores the text, as it does for tools


if __name__ == "__main__":
    with open(os.environ["MEGAPPO_ROW"]) as file:
        asyncio.run(solve(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], json.load(file)))
"""


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> Path:
    """Return a model that greedily calls the calculator, and its data."""
    output = tmp_path_factory.mktemp("example") / "compaction"
    command = [sys.executable, REPOSITORY / "tools" / "make_example.py", "compaction", "--output", output]
    subprocess.run(command, check=True, timeout=900)
    return output


def test_four_forms_of_the_calculator_give_the_same_rows(example: Path, folder: Path):
    (folder / "forms.py").write_text(CODE.format(configs=str(REPOSITORY / "configs")))
    record: dict[str, dict[str, torch.Tensor]] = {}
    for form, keys in FORMS.items():
        settings = (
            *(f"model.path={example / 'model'}", f"data.train_files={example / 'train.jsonl'}"),
            *("data.val_files=[]", "data.train_batch_size=16", "rollout.top_k=1", "trainer.eval_interval=0"),
            *("trainer.total_steps=1", "trainer.rollout_only=true", "actor.ppo_mini_batch_size=16"),
            *("critic.ppo_mini_batch_size=16", f"trainer.output_dir={folder / form}"),
            *(f"trainer.record_rollouts={folder / form / 'record'}", "rollout.environment_timeout_seconds=100"),
            *(key.format(folder=folder, python=sys.executable) for key in keys),
        )
        with Program(folder / f"{form}_program", REPOSITORY / "configs" / "calculator.yaml", *settings) as program:
            assert program.wait(300) == 0, program.output
        record[form] = load_file(rows_file(folder / form / "record", 1))
    assert record["tools"]["fields.turns"].max() > 1
    for form, tensors in record.items():
        assert tensors.keys() == record["tools"].keys()
        for name, values in tensors.items():
            tolerance = 1e-5 if "log_probs" in name else 0
            torch.testing.assert_close(values, record["tools"][name], rtol=0, atol=tolerance, msg=f"{form}: {name}")


def test_a_compaction_is_learned(example: Path, folder: Path):
    settings = (f"model.path={example / 'model'}", f"trainer.output_dir={folder / 'run'}", "trainer.total_steps=12")
    data = (f"data.train_files={example / 'train.jsonl'}", f"data.val_files={example / 'val.jsonl'}")
    config = REPOSITORY / "configs" / "compaction.yaml"
    with Program(folder / "program", config, *settings, *data, "trainer.eval_interval=12") as program:
        assert program.wait(1000) == 0, program.output
    first, *_, last = logged(folder / "run")
    assert first["val/val/score/mean"] < 0.1 and last["val/val/score/mean"] > 0.9
    assert last["episode/segments"] == 2 and 0 < last["rollout/log_prob_diff/max"] < 1e-4

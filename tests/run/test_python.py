"""The programs of docs/python.md, written on the public names: PPO by hand, and a critic of scored texts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from exported_adapters import LORA, check_merged, exported_adapters
from program import ONE_RANK_EACH, REPOSITORY, Program, logged
from transformers import AutoModelForTokenClassification, AutoTokenizer

from megappo.config.loading import load_config

PAGE = (REPOSITORY / "docs" / "python.md").read_text("utf-8")
BY_HAND, CRITIC_BY_HAND = (block.split("```")[0] for block in PAGE.split("```python\n")[1:])
REFUSED = """
import sys
import megappo
from megappo.config.config_error import ConfigError

try:
    with megappo.Trainer(megappo.load_config(sys.argv[1], [*sys.argv[2:], "model.path=/missing"])):
        pass
except ConfigError as error:
    print("refused:", error)
"""
AGAIN = """
try:
    with megappo.Trainer(megappo.load_config(sys.argv[1], sys.argv[2:])):
        pass
except RuntimeError as error:
    print("again:", error)
"""
LAUNCHER = ("-m", "megappo.torchrun", "--standalone", "--nproc-per-node", "2")
ALONE = pytest.param((), ONE_RANK_EACH, marks=pytest.mark.slow, id="alone")
pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(("launcher", "settings"), [pytest.param(LAUNCHER, (), id="torchrun"), ALONE])
def test_ppo_by_hand_trains_adapters_which_engines_get_alone(config, folder, launcher, settings):
    assert len(BY_HAND.splitlines()) <= 75
    script, extension, out = folder / "my_ppo.py", folder / "extension.py", folder / "out"
    script.write_text(REFUSED + BY_HAND + AGAIN)
    extension.write_text("import megatron.core\n")
    old = [out / "timeline" / "rank_00001.jsonl", out / "rollouts" / "step_00000001.parquet"]
    for file in old:  # of an earlier run, which left no checkpoint
        file.parent.mkdir(parents=True)
        file.write_text('{"step": 7, "phases": []}\n')
    words = [config, f"trainer.output_dir={out}", "trainer.total_steps=2", "trainer.eval_interval=0", *LORA, *settings]
    words.append(f"trainer.extensions=[{extension}]")
    with Program(folder / "program", *words, command=(sys.executable, *launcher, script)) as program:
        assert program.wait() == 0, program.output
        assert "refused: command line: model.path: no folder /missing" in program.output
        assert "again: this process has had a run, or a process group: start another process" in program.output
    steps = logged(out)
    assert [step["step"] for step in steps] == [1, 2]
    exported = out / "hf_actor"
    num_bytes = sum(tensor.nbytes for tensor in exported_adapters(exported).values())
    # The second step's sync compares the engine with an actor whose weights the loss above has changed.
    assert all(step["sync/bytes"] == num_bytes for step in steps)
    check_merged(exported, config.parent / "model")
    assert load_config(out / "config.yaml").trainer.total_steps == 2
    assert '"step": 7' not in old[0].read_text() and not old[1].exists()


def scored_texts(file: Path) -> list[dict]:
    """Write sums with a right and a wrong answer each, whose scores are 1 and 0."""
    texts = []
    for a in range(10, 42):
        for b in range(10, 14):
            for answer in (a + b, 7):
                score = float(answer != 7)
                texts.append({"prompt": f"{a}+{b}=", "response": str(answer), "score": score})
    file.write_text("".join(json.dumps(one) + "\n" for one in texts))
    return texts


@torch.no_grad()
def probabilities(folder: Path, texts: list[dict]) -> torch.Tensor:
    """Return transformers' probability of score 1 after the last character of each text."""
    critic, tokenizer = AutoModelForTokenClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    found = [
        critic(torch.tensor([tokenizer.encode(one["prompt"] + one["response"])])).logits[0, -1, 0] for one in texts
    ]
    return torch.stack(found).sigmoid()


@pytest.mark.slow
def test_a_critic_by_hand_learns_the_scores_of_texts(config, folder):
    texts = scored_texts(folder / "texts.jsonl")
    (folder / "my_critic.py").write_text(CRITIC_BY_HAND)
    files = (f"data.train_files={folder / 'texts.jsonl'}", "data.val_files=[]", "data.max_length=12")
    words = [config, "trainer.kind=critic", *files, "data.train_batch_size=32", "data.shuffle=false"]
    words += ["trainer.total_steps=8", "trainer.eval_interval=0", f"trainer.output_dir={folder / 'out'}"]
    command = (sys.executable, *LAUNCHER, folder / "my_critic.py")
    with Program(folder / "program", *words, command=command) as program:
        assert program.wait() == 0, program.output
    assert [step["step"] for step in logged(folder / "out")] == [*range(1, 9)]
    is_right = torch.tensor([one["score"] for one in texts]).bool()
    found = probabilities(folder / "out" / "hf_critic", texts)
    assert found[is_right].median() > 0.8 and found[~is_right].median() < 0.2


def test_importing_megappo_is_light():
    heavy = "{'torch', 'pydantic', 'yaml', 'numpy', 'typer', 'transformers'}"
    code = f"import megappo, sys; print(*{heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "\n", done.stderr

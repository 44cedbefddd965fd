"""A critic that is trained alone, on recorded rollouts and on rollouts of a policy that stays as it is; PPO from it."""

import json
import shutil
import statistics
from pathlib import Path

import pytest
import torch
from program import Program, logged
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification

from megappo.batch.rows_file import RowsFile

pytestmark = pytest.mark.timeout(600)
CRITIC = ("trainer.train=[critic]", "trainer.eval_interval=1", "trainer.save_interval=0")


def train(folder: Path, config: Path, *overrides: str) -> str:
    with Program(folder / "program", config, f"trainer.output_dir={folder / 'run'}", *overrides) as program:
        assert program.wait() == 0, program.output
        return program.output


def hf_values(model: Path, recorded: Path) -> tuple[list[float], list[float]]:
    """Return transformers' value before each recorded token, and the score of its response: its return, as gamma and
    lambda are 1."""
    critic = AutoModelForTokenClassification.from_pretrained(model)
    support = getattr(critic.config, "value_support", {"size": 1, "centers": []})
    assert critic.config.num_labels == support["size"]
    values, scores = [], []
    with RowsFile(recorded) as file, torch.no_grad():
        rows = file.rows(0, len(file.table))
    for tokens, length, score in zip(rows.sequences, rows.prompt_lengths.tolist(), rows.fields["scores"], strict=True):
        of_row = critic(tokens[None]).logits[0, length - 1 : -1].detach()
        if support["centers"]:
            of_row = of_row.softmax(-1) @ torch.tensor(support["centers"])
        values += of_row.flatten().tolist()
        scores += [float(score)] * len(of_row)
    return values, scores


def test_a_critic_of_recorded_rollouts_is_kept_and_ppo_starts_from_it(config, run, folder):
    held_out = folder / "held_out"
    held_out.mkdir()
    shutil.copy(run / "record" / "step_00000010.safetensors", held_out / "step_00000001.safetensors")
    replay = (f"trainer.replay_rollouts={run / 'record'}", f"trainer.replay_held_out={held_out}")
    gate = ("critic.gate={explained_variance: 0.95}", "trainer.total_steps=3")
    output = train(folder, config, *CRITIC, *replay, *gate)
    assert "actor: none (trainer.train, trainer.replay_rollouts)" in output
    assert "critic.gate 0.95 is not reached: the critic explains at most " in output
    steps = logged(folder / "run")
    assert [one["step"] for one in steps] == [0, 1, 2, 3]
    assert not (folder / "run" / "hf_actor").exists() and not (folder / "run" / "engines").exists()
    assert not any(name.startswith(("actor/", "reward/kl", "sync/")) for name in steps[-1])
    critic = folder / "run" / "hf_critic"
    values, scores = hf_values(critic, held_out / "step_00000001.safetensors")
    errors = [value - score for value, score in zip(values, scores, strict=True)]
    explained = 1 - statistics.variance(errors) / (statistics.variance(scores) + 1e-5)
    assert steps[-1]["val/held_out/critic/vf_explained_var"] == pytest.approx(explained, abs=1e-4)
    assert steps[-1]["val/held_out/critic/vf_bias"] == pytest.approx(statistics.fmean(errors), abs=1e-5)
    ppo = (replay[0], "trainer.eval_interval=0", "trainer.total_steps=1")
    train(folder / "ppo", config, f"critic.model_path={critic}", *ppo)
    (first,) = logged(folder / "ppo" / "run")
    values, scores = hf_values(critic, run / "record" / "step_00000001.safetensors")
    assert first["values/mean"] == pytest.approx(statistics.fmean(values), abs=1e-5)
    assert first["actor/num_optimizer_steps"] == 2
    before, after = (load_file(path / "model.safetensors") for path in (critic, folder / "ppo" / "run" / "hf_critic"))
    assert before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)
    trained, _ = hf_values(folder / "ppo" / "run" / "hf_critic", run / "record" / "step_00000001.safetensors")
    errors, errors_before = (sum((a - b) ** 2 for a, b in zip(of, scores, strict=True)) for of in (trained, values))
    assert errors < errors_before, "the folder has the critic after the step"
    assert (folder / "ppo" / "run" / "hf_actor").is_dir()


@pytest.mark.slow  # tests/models/test_train_engine.py and tests/weights/test_critic.py have the parts
def test_a_critic_of_classes_is_kept_and_a_scalar_one_gets_a_new_head(config, run, folder):
    held_out = folder / "held_out"
    held_out.mkdir()
    shutil.copy(run / "record" / "step_00000010.safetensors", held_out / "step_00000001.safetensors")
    replay = (f"trainer.replay_rollouts={run / 'record'}", f"trainer.replay_held_out={held_out}")
    classes = ("critic.value_loss=hl_gauss", "critic.value_bins=11", "critic.value_range=[0,1]", "critic.optim.lr=1e-2")
    train(folder, config, *CRITIC, *replay, *classes, "trainer.total_steps=3")
    last = logged(folder / "run")[-1]
    critic = folder / "run" / "hf_critic"
    values, scores = hf_values(critic, held_out / "step_00000001.safetensors")
    bias = statistics.fmean(value - score for value, score in zip(values, scores, strict=True))
    assert last["val/held_out/critic/vf_bias"] == pytest.approx(bias, abs=1e-5)
    assert last["critic/vf_entropy"] > 0 and last["critic/vf_outside"] == 0 and "critic/vf_clipfrac" not in last
    ppo = (replay[0], "trainer.eval_interval=0", "trainer.total_steps=1", f"critic.model_path={critic}")
    values, _ = hf_values(critic, run / "record" / "step_00000001.safetensors")
    output = train(folder / "classes", config, *ppo, *classes)
    assert "new value head" not in output
    assert logged(folder / "classes" / "run")[0]["values/mean"] == pytest.approx(statistics.fmean(values), abs=1e-5)
    output = train(folder / "scalar", config, *ppo)
    assert f"critic: a new value head, with one output, as the head in {critic} has 11 classes from 0 to 1" in output


@pytest.mark.slow  # tests/trainer/test_scored_files.py has its steps
def test_a_critic_on_files_resumes_to_the_bit(config, folder):
    lines = []
    for a in range(10, 26):
        for answer, score in ((str(2 * a), 1), ("7", 0)):
            lines.append({"prompt": f"{a}+{a}=", "response": answer, "score": score, "steps": [[1, 0.5]]})
    data = folder / "scored.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = (f"data.train_files={data}", f"data.val_files={data}", "data.max_length=12", "data.train_batch_size=8")
    kind = ("trainer.kind=critic", "trainer.eval_interval=2", "critic.ppo_mini_batch_size=4", *files)
    train(folder / "whole", config, *kind, "trainer.total_steps=4")
    output = train(folder / "parts", config, *kind, "trainer.total_steps=2")
    assert "actor: none (trainer.kind)" in output and "finished; to start PPO from it: critic.model_path=" in output
    train(folder / "parts", config, *kind, "trainer.total_steps=4")
    whole, parts = (logged(folder / name / "run") for name in ("whole", "parts"))
    assert [one["step"] for one in parts] == [0, 1, 2, 3, 4]
    for name in ("critic/vf_loss", "critic/grad_norm", "returns/mean", "data/epochs"):
        assert [one.get(name) for one in whole] == [one.get(name) for one in parts]
    assert whole[-1]["val/scored/critic/vf_explained_var"] == parts[-1]["val/scored/critic/vf_explained_var"]
    assert (folder / "parts" / "run" / "hf_critic").is_dir() and not (folder / "parts" / "run" / "hf_actor").exists()


@pytest.mark.slow  # the run on recorded rollouts shows all but the engines
def test_a_critic_of_a_policy_that_stays_as_it_is_ends_at_its_gate(config, folder):
    gate = ("critic.gate={explained_variance: -1e6, patience: 2}", "trainer.total_steps=4")
    output = train(folder, config, *CRITIC, *gate, "trainer.total_steps=4")
    assert "critic.gate -1e+06 is reached: at step 0 " in output
    assert [one["step"] for one in logged(folder / "run")] == [0]
    output = train(folder / "further", config, *CRITIC, "trainer.total_steps=4", "critic.optim.lr=1e-3")
    steps = logged(folder / "further" / "run")
    assert [one["sync/bytes"] for one in steps[1:]] == [0.0] * 4
    explained = [one["val/held_out/critic/vf_explained_var"] for one in steps]
    assert len(explained) == 5 and explained[-1] > explained[0]
    assert "finished; to start PPO from it: critic.model_path=" in output
    again = train(folder / "further", config, *CRITIC, "trainer.total_steps=4", "critic.optim.lr=1e-3")
    assert "already finished" in again

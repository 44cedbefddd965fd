"""Runs with an environment, or an agent: episodes of five turns under a template that rewrites history."""

import json
import re
import shutil
import signal
from pathlib import Path

import commands
import psutil
import pytest
import torch
from commands import assert_equal
from program import REPOSITORY, Program, has_logged, logged
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoTokenizer

from megappo.observe.files import rows_file

pytestmark = pytest.mark.timeout(600)
TEMPLATE = (
    "{% for one in messages %}{% if one.role == 'assistant' %}{{ '-' + one.content[-4:] + '<eos>' }}"
    "{% else %}{{ '+' + one.content + '=' }}{% endif %}{% endfor %}{% if add_generation_prompt %}-{% endif %}"
)
"""Keeps only the last four characters of the policy's turns."""
ENVIRONMENT = """
class Sevens:
    columns = ("size",)

    async def reset(self, row):
        self.turns = 0
        return "8" * row["size"]

    async def step(self, message):
        self.turns += 1
        return str(self.turns) * 2, message["content"].count("7") / len(message["token_ids"]), self.turns == 5
"""

AGENT = """
from openai import OpenAI

OPENAI = OpenAI(base_url="", api_key="", max_retries=0, timeout=None)


def play(base_url, api_key, row):
    client = OPENAI.with_options(base_url=base_url, api_key=api_key)
    messages = [*row["prompt"], {"role": "user", "content": "8" * row["size"]}]
    for turn in range(1, 6):
        reply = client.chat.completions.create(model="policy", messages=messages)
        [answer] = reply.choices
        if answer.finish_reason == "length":
            return 0
        reward = answer.message.content.count("7") / reply.usage.completion_tokens
        client.post("/reward", cast_to=object, body={"id": reply.id, "reward": reward})
        messages += [{"role": "assistant", "content": answer.message.content}]
        messages += [{"role": "user", "content": str(turn) * 2}]
    return 0
"""
"""Does what the environment does."""


@pytest.fixture
def settings(config: Path, folder: Path) -> list[str]:
    """Return the settings of a recorded run of episodes."""
    model = folder / "model"
    shutil.copytree(config.parent / "model", model)
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(values | {"max_position_embeddings": 512}))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    records = [{"prompt": [{"role": "user", "content": f"{i}"}], "label": None, "size": i % 3} for i in range(10, 42)]
    for name, part in (("train", records), ("val", records[:8])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in part))
    (folder / "environment.py").write_text(ENVIRONMENT)
    return [
        *(f"model.path={model}", f"rollout.environment={folder / 'environment.py'}:Sevens", "reward.function=null"),
        *("rollout.max_response_length=128", "data.max_prompt_length=64", "rollout.n=2", "data.train_batch_size=16"),
        *(f"data.train_files={folder / 'train.jsonl'}", f"data.val_files={folder / 'val.jsonl'}"),
        *(f"trainer.output_dir={folder / 'out'}", f"trainer.record_rollouts={folder / 'record'}"),
        *("trainer.total_steps=2", "trainer.eval_interval=2", "actor.max_tokens_per_micro_batch=1024"),
        "critic.max_tokens_per_micro_batch=1024",
    ]


def test_trainer_and_engine_agree_about_every_token_of_five_turns(config: Path, folder: Path, settings: list[str]):
    """Prompts, masks and rewards of the record equal those computed independently of the program.

    One data set has another environment, and one has single responses.
    """
    adaptive = "algorithm.kl_ctrl={type: adaptive, kl_coef: 0.1, target_kl: 0.1, horizon: 64}"
    (folder / "short.py").write_text(ENVIRONMENT.replace("self.turns == 5", "self.turns == 2"))
    reward, files = f"{config.parent / 'reward.py'}:share_of_sevens", str(folder / "val.jsonl")
    datasets = {
        "short": {"files": files, "environment": f"{folder / 'short.py'}:Sevens", "temperature": 1.0},
        "single": {"files": files, "environment": "none", "reward": reward},
    }
    with Program(folder / "program", config, *settings, adaptive, f"eval.datasets={json.dumps(datasets)}") as program:
        assert program.wait() == 0, program.output
    steps = [metrics for metrics in logged(folder / "out") if metrics["step"]]
    assert len(steps) == 2
    error = min(max(steps[0]["reward/kl_penalty/mean"] / 0.1 - 1, -0.2), 0.2)
    changed = steps[1]["reward/kl_coef"] / steps[0]["reward/kl_coef"] - 1
    assert changed == pytest.approx(error * 32 / 64), "episodes count, not their segments"
    for metrics in steps:
        assert 0 < metrics["rollout/log_prob_diff/max"] < 1e-4
        assert 4 < metrics["episode/turns"] <= 5 and 1.5 < metrics["episode/segments"] <= metrics["episode/turns"]
        assert metrics["episode/done_frac"] + metrics["episode/length_frac"] == 1
    last = steps[-1]
    assert 0 <= last["val/val/score/mean"] <= 5
    assert "val/val/episode/turns" in last and 1 < last["val/short/episode/turns"] <= 2
    assert last["val/single/score/max"] <= 1 and not any(name.startswith("val/single/episode") for name in last)
    with safe_open(folder / "record" / "step_00000001.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    prompts, responses = tensors["prompt_lengths"], tensors["response_lengths"]
    rows = tensors["tokens"].split((prompts + responses).tolist())
    per_token = {
        name: tensors[f"fields.{name}"].split(responses.tolist())
        for name in ("response_mask", "turns", "turn_rewards", "rollout_log_probs")
    }
    shown = commands.run(
        REPOSITORY / "tools" / "show_rollouts.py", folder / "record", "--step", "1", "--num", "100"
    ).stdout
    assert "[turn 1, reward 0" in shown and "\n[environment] +11=-\n" in shown
    segments, tokenizer = tensors["fields.segments"].tolist(), AutoTokenizer.from_pretrained(folder / "model")
    assert segments.count(0) == 32 and len(segments) > 64
    history, rewards = "", 0.0
    for row, number in enumerate(segments):
        ids, start = rows[row].tolist(), int(prompts[row])
        mask, turns = per_token["response_mask"][row], per_token["turns"][row]
        assert mask.equal((turns > 0).float()) and mask.equal((per_token["rollout_log_probs"][row] < 0).float())
        assert mask[-1] == 1, "what nobody answers is no part of an episode"
        prompt = tokenizer.decode(ids[:start])
        history, rewards = (prompt, 0.0) if number == 0 else (history, rewards)
        assert prompt == history, "a segment begins with the whole history, as the template has it"
        pieces = [[]]
        for token, turn in zip(ids[start:], turns.tolist(), strict=True):
            if pieces[-1] and pieces[-1][-1][1] != turn:
                pieces.append([])
            pieces[-1].append((token, turn))
        for piece in pieces:
            text = tokenizer.decode([token for token, _ in piece])
            if turn := piece[0][1]:
                content = text.removesuffix("<eos>")
                reward, answer = content.count("7") / len(piece), str(int(turn)) * 2
                kept = re.sub("[^0-9+=-]", "", content[-4:])  # the tokenizer drops the rest
                history += f"{kept}<eos>+{answer}=-"
                rewards += reward if text.endswith("<eos>") else 0.0  # else it was cut off
            else:
                assert text == f"+{answer}=-"
        is_last = row + 1 == len(segments) or segments[row + 1] == 0
        assert not is_last or tensors["fields.scores"][row] == pytest.approx(rewards, abs=1e-5)


def test_an_agent_and_an_environment_that_do_the_same_are_trained_on_the_same_rows(
    config: Path,
    folder: Path,
    settings: list[str],
):
    (folder / "agent.py").write_text(AGENT)
    greedy = ("rollout.top_k=1", f"rollout.stop={list('0123456789+-=')}")  # a greedy model would repeat itself
    records = [folder / "record", folder / "record_of_agent"]
    with Program(folder / "1", config, *settings, *greedy, "trainer.rollout_only=true") as program:
        assert program.wait() == 0, program.output
    agent = ("rollout.environment=null", f"rollout.agent={folder / 'agent.py'}:play")
    outputs = (f"trainer.output_dir={folder / 'agents'}", f"trainer.record_rollouts={records[1]}")
    with Program(folder / "2", config, *settings, *greedy, *agent, *outputs) as program:
        assert program.wait() == 0, program.output
    by_environment, by_agent = (load_file(rows_file(record, 1)) for record in records)
    del by_environment["fields.truncated"], by_agent["fields.truncated"]  # the agent stops after a truncated turn
    assert by_environment.keys() == by_agent.keys() and by_agent["fields.turns"].max() == 5
    for name, values in by_environment.items():
        torch.testing.assert_close(by_agent[name], values, rtol=0, atol=1e-5 if "log_probs" in name else 0, msg=name)
    _, first, second = logged(folder / "agents")
    assert all(0 < metrics["rollout/log_prob_diff/max"] < 1e-4 for metrics in (first, second))
    assert 4 < first["agent/requests"] <= 5 and 0 <= first["agent/new_segment_frac"] < 1
    assert first["agent/superseded_frac"] == 0 and "val/val/agent/requests" in second


@pytest.mark.slow
def test_agents_ahead_of_training_survive_a_kill(config: Path, folder: Path, settings: list[str]):
    """After a kill the steps since the checkpoint are done again, with the same groups. Turns of an episode are written
    by several versions of the weights."""
    (folder / "agent.py").write_text(AGENT)
    agent = ("rollout.environment=null", f"rollout.agent={folder / 'agent.py'}:play")
    ahead = ("placement={actor: 0, critic: 0, rollout: 1}", "actor.parallel.tensor=1", "critic.parallel.pipeline=1")
    further = ("rollout.max_staleness=2", "trainer.total_steps=6", "trainer.save_interval=2", "trainer.eval_interval=0")
    arguments = (config, *settings, *agent, *ahead, *further)
    with Program(folder / "1", *arguments) as program:
        program.wait_until(lambda: has_logged(folder / "out", 4))
        for process in [*program.ranks, psutil.Process(program.process.pid)]:
            process.send_signal(signal.SIGKILL)
        program.wait(30)
    shutil.copytree(folder / "record", folder / "copy")
    with Program(folder / "2", *arguments) as program:
        assert program.wait() == 0, program.output
    for step in range(1, 5):
        assert_equal(load_file(rows_file(folder / "record", step)), load_file(rows_file(folder / "copy", step)))
    ages = [load_file(rows_file(folder / "record", step)) for step in range(1, 7)]
    mixed = 0
    for tensors in ages:
        lengths = tensors["response_lengths"].tolist()
        for age, turn in zip(
            *(tensors[f"fields.{name}"].split(lengths) for name in ("staleness", "turns")), strict=True
        ):
            mixed += len(set(age[turn > 0].tolist())) > 1
    assert mixed, "some sessions go through a weight sync"
    assert all(metrics["rollout/response_staleness/max"] <= 2 for metrics in logged(folder / "out")[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        ("algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false", "actor.parallel.tensor=1"),
        ("algorithm.adv_estimator=remax", "actor.parallel={tensor: 1, pipeline: 2}"),
        ("algorithm.gae_level=turn", "algorithm.mask_truncated=true", "rollout.max_response_length=96"),
        ("algorithm.adv_estimator=rloo", "algorithm.mask_truncated=true", "rollout.max_response_length=96"),
        (
            *("algorithm.gae_level=turn", "algorithm.bootstrap_truncated=true", "rollout.max_turns=4"),
            *("actor.policy_loss=clip_turn", "critic.value_loss=hl_gauss", "critic.value_range=[-0.5,4]"),
        ),
        (
            *("algorithm.shared_backbone=true", "actor.parallel.tensor=1"),
            *("placement={actor: 0-1, critic: 0-1, rollout: 0-1}",),
        ),
    ],
)
def test_other_methods_and_layouts(config: Path, folder: Path, settings: list[str], method: tuple[str, ...]):
    settings = [key for key in settings if not key.startswith("critic.") or method[0].startswith("algorithm.gae")]
    with Program(folder / "program", config, *settings, *method) as program:
        assert program.wait() == 0, program.output
    assert all(0 < m["rollout/log_prob_diff/max"] < 1e-4 for m in logged(folder / "out") if m["step"])


HOSTILE = """
import os
import time


class Sevens:
    def reset(self, row):
        self.number = int(row["prompt"][0]["content"])

    def step(self, message):
        if self.number % 4 == 0:
            time.sleep(100)
        if self.number % 16 == 1:
            os._exit(1)
        return "1", 1.0, self.number % 4 == 2
"""


@pytest.mark.slow
def test_episodes_whose_environment_hangs_dies_or_never_ends_are_counted(
    config: Path, folder: Path, settings: list[str]
):
    (folder / "environment.py").write_text(HOSTILE)
    further = ("rollout.environment_timeout_seconds=2", "rollout.max_turns=3", "algorithm.mask_truncated=true")
    further += ("rollout.num_environment_workers=8",)  # with a process its other episodes are lost, too
    with Program(folder / "program", config, *settings, *further, "trainer.total_steps=2") as program:
        assert program.wait() == 0, program.output
    for metrics in (one for one in logged(folder / "out") if one["step"]):
        assert metrics["episode/lost_frac"] > 0 and metrics["episode/turns_frac"] + metrics["episode/length_frac"] > 0
        assert 0 < metrics["episode/done_frac"] == 1 - metrics["rollout/truncated_frac"]


@pytest.mark.slow
def test_an_environment_that_raises_ends_the_run_with_a_message(config: Path, folder: Path, settings: list[str]):
    (folder / "environment.py").write_text(ENVIRONMENT.replace("self.turns += 1", "self.turns /= 0"))
    with Program(folder / "program", config, *settings) as program:
        assert program.wait() == 1, program.output
    assert program.output.count("Sevens step raised ZeroDivisionError: division by zero") == 1
    assert "fix it, or choose another environment" in program.output

"""Runs made unhealthy on purpose: each fault is one that users make, and its rules report it within ten steps."""

import re
import shutil
from pathlib import Path

import pytest
from program import Program, logged
from safetensors.torch import load_file, save_file
from tiny_run import latest

from megappo.lab.report.health import RULES

REWARDS = """
def zero(prompts, responses, labels):
    return [0.0] * len(responses)


def fails_for_some(prompts, responses, labels):
    return [float(int(label) % 2) / (int(label) % 3 > 0) for label in labels]


def far_from_zero(prompts, responses, labels):
    return [20 + response.count("7") / max(1, len(response)) for response in responses]


calls = 0


def grows_suddenly(prompts, responses, labels):
    global calls
    calls += 1
    return [(1000.0 if calls > 7 else 1.0) * response.count("7") for response in responses]
"""
AGENT = """
import asyncio

from openai import AsyncOpenAI

OPENAI = AsyncOpenAI(base_url="", api_key="", max_retries=0, timeout=None)


async def changes_its_history(base_url, api_key, row):
    client = OPENAI.with_options(base_url=base_url, api_key=api_key)
    for turn in "123":
        messages = [{"role": "user", "content": turn + row["prompt"]}]
        reply = await client.chat.completions.create(model="policy", messages=messages)
    return reply.choices[0].message.content.count("7")


async def stops_working(base_url, api_key, row):
    client = OPENAI.with_options(base_url=base_url, api_key=api_key)
    await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": row["prompt"]}])
    await asyncio.sleep(100)
"""
STALE = """
from megappo.config.methods import TRANSPORTS, Transport


def forgetful(link, client):
    from megappo.sync.ipc import HandleSender

    class Forgetful(HandleSender):
        num_syncs = 0

        def open(self):
            super().open()
            self.num_syncs += 1

        def _post(self, payloads):
            if self.num_syncs <= 3:
                super()._post(payloads)

    return Forgetful(link, client)


TRANSPORTS.register("forgetful", Transport(forgetful))
"""
STEPS = 10

pytestmark = pytest.mark.timeout(600)


def train(folder: Path, config: Path, *overrides: str, code: int = 0) -> str:
    """Train in folder/run without evaluations; return what the program printed."""
    (folder / "reward.py").write_text(REWARDS)
    (folder / "stale.py").write_text(STALE)
    (folder / "agent.py").write_text(AGENT)
    always = ("trainer.eval_interval=0", "trainer.save_interval=0", "trainer.export_hf=false")
    steps = f"trainer.total_steps={STEPS}"
    with Program(folder, config, f"trainer.output_dir={folder / 'run'}", steps, *always, *overrides) as program:
        assert program.wait() == code, program.output
        return program.output


def held(run: Path) -> dict[str, int]:
    """Return rule -> the first step in which it held."""
    found: dict[str, int] = {}
    for metrics in logged(run):
        for rule in RULES:
            if metrics.get(f"health/{rule}"):
                found.setdefault(rule, metrics["step"])
    return found


def peaked_model(folder: Path, like: Path) -> Path:
    """Copy a model with logits thirty times as large, so nearly deterministic, and give it a chat template."""
    shutil.copytree(like, folder, ignore=shutil.ignore_patterns("*.pt", "*.bin"))
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 30
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    return folder


REWARD = "reward.function={folder}/reward.py"
FAULTS = {
    "a reward that fails, or does not depend on the response": (
        (f"{REWARD}:fails_for_some", "reward.on_error=zero", "actor.optim.lr=0.1"),
        {"reward_failures", "equal_groups", "update_kl", "reference_kl", "repetition"},
    ),
    "many large steps on the same rollouts, and scores that the critic learns too slowly": (
        ("actor.optim.lr=0.05", "actor.ppo_epochs=4", f"{REWARD}:far_from_zero", "critic.optim.lr=1e-6"),
        {"clip_fraction", "update_kl", "value_loss"},
    ),
    "many large steps of dis on the same rollouts": (
        (
            *("actor.optim.lr=0.05", "actor.ppo_epochs=4", "actor.policy_loss=dis", "algorithm.old_log_probs=engine"),
            *("actor.clip_ratio_low=0.3", "actor.clip_ratio_high=5"),
        ),
        {"left_out_tokens"},
    ),
    "an entropy bonus that is too large": (
        ("model.path={peaked}", "actor.entropy_coeff=1", "actor.optim.lr=2e-3"),
        {"entropy_explosion"},
    ),
    "classes of values that do not reach the scores": (
        (f"{REWARD}:far_from_zero", "critic.value_loss=two_hot", "critic.value_range=[0,1]"),
        {"value_support"},
    ),
    "a critic that diverges": (("critic.optim.lr=0.9",), {"explained_variance", "value_range"}),
    "a KL penalty that outweighs the scores": (
        ("algorithm.kl_ctrl.kl_coef=20", "actor.optim.lr=0.05"),
        {"return_drift"},
    ),
    "an agent whose turns do not follow each other": (
        (
            *("model.path={peaked}", "rollout.agent={folder}/agent.py:changes_its_history", "reward.function=null"),
            *("data.train_batch_size=8", "actor.ppo_mini_batch_size=8", "critic.ppo_mini_batch_size=8"),
        ),
        {"new_segments"},
    ),
    "an agent that stops working": (
        (
            *("model.path={peaked}", "rollout.agent={folder}/agent.py:stops_working", "reward.function=null"),
            *("rollout.environment_timeout_seconds=1", "data.train_batch_size=8"),
            *("actor.ppo_mini_batch_size=8", "critic.ppo_mini_batch_size=8"),
        ),
        {"lost_episodes"},
    ),
    "rewards that grow suddenly": ((f"{REWARD}:grows_suddenly",), {"gradient_norm"}),
    "engines that get no weights": (
        (
            *("trainer.extensions={folder}/stale.py", "rollout.sync.transport=forgetful"),
            *("rollout.sync.probe_tolerance=100", "actor.optim.lr=0.05", "algorithm.rollout_correction.level=token"),
            "actor.ppo_epochs=2",
        ),
        {"log_prob_diff", "staleness", "ratio", "entropy_collapse"},
    ),
}
STOPPED = {"no_reward_signal", "truncation"}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_within_ten_steps(config, folder, fault):
    overrides, rules = FAULTS[fault]
    peaked = peaked_model(folder / "peaked", config.parent / "model")
    output = train(folder, config, *(one.format(folder=folder, peaked=peaked) for one in overrides))
    print(fault, held(folder / "run"))
    assert rules <= held(folder / "run").keys()
    for rule in rules:
        assert len(re.findall(rf"^unhealthy \({rule}\): ", output, re.M)) == 1
        assert re.search(rf"^unhealthy .*\b{rule} in \d+ steps", output, re.M)


def test_the_faults_show_all_rules():
    others = {"expert_load", "accuracy"}  # by the plan of a GPU's memory; in runs on pairs
    assert STOPPED.union(*(rules for _, rules in FAULTS.values())) == RULES.keys() - others


@pytest.mark.slow  # the rules' conditions and the agreement of the ranks have fast tests
def test_a_run_without_a_reward_signal_stops_where_stop_on_names_it(config, folder):
    """Nothing is lost, and the run continues if it is started again."""
    stops = ("trainer.stop_on=[no_reward_signal,staleness]", f"reward.function={folder}/reward.py:zero")
    output = train(folder, config, *stops, code=5)
    run = folder / "run"
    assert held(run) == {"truncation": 3, "no_reward_signal": 5}
    assert [metrics["step"] for metrics in logged(run)] == [1, 2, 3, 4, 5] and latest(run) == "step_00000005"
    [shown] = re.findall(r"^unhealthy \(no_reward_signal\): .*\n((?:  score 0: \".*\n)*)", output, re.M)
    assert len(shown.splitlines()) == 3 and "unhealthy (truncation)" in output
    assert "every response of the last 5 steps has score 0" in output
    reason = "trainer.stop_on (no_reward_signal at step 5)"
    assert f"stopped by {reason}: everything is saved\n" in output and "error" not in output
    assert output.splitlines()[-1].startswith(f"ended by {reason}: resumes after step 5; nothing is lost. To resume: ")

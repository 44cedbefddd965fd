"""A run whose reward function returns scores of steps and loss weights: its record and its training."""

from pathlib import Path

import pytest
import torch
from program import Program, logged, trained_on
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoTokenizer

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
REWARD = """
def of_sevens(solution_str, ground_truth):
    steps = [[place, 0.125 * place] for place, letter in enumerate(solution_str, 1) if letter == "7"]
    number = len(steps)
    return {"score": len(solution_str), "step_scores": steps, "loss_weight": number, "sevens": number}


def heavy(responses):
    return [{"score": 0, "loss_weight": 2} if response else 0 for response in responses]
"""
METHOD = ("algorithm.adv_estimator=reinforce_plus_plus", "algorithm.whiten_advantages=false", "algorithm.gamma=0.5")


def plain_advantages(path: Path, model: Path) -> tuple[list[float], list[float], list[float]]:
    """Return (advantages of all tokens, weights, sums of steps) from the texts; the record has the tokens' rewards."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    prompts, responses = tensors["prompt_lengths"].tolist(), tensors["response_lengths"].tolist()
    rows = tensors["tokens"].split([a + b for a, b in zip(prompts, responses, strict=True)])
    rewards, tokenizer = tensors["fields.turn_rewards"].split(responses), AutoTokenizer.from_pretrained(model)
    advantages, weights, sums = [], [], []
    for i, (row, start) in enumerate(zip(rows, prompts, strict=True)):
        tokens = row[start:].tolist()
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        expected = [0.0] * len(tokens)
        for place, letter in enumerate(text, 1):
            if letter == "7":
                prefixes = (tokenizer.decode(tokens[: n + 1], skip_special_tokens=True) for n in range(len(tokens)))
                expected[next(n for n, prefix in enumerate(prefixes) if len(prefix) >= place)] += 0.125 * place
        assert rewards[i].tolist() == expected
        assert float(tensors["fields.scores"][i]) == len(text) + sum(expected)
        sums.append(sum(expected))
        weights.append(text.count("7") * (2.0 if text else 1.0))
        assert float(tensors["fields.loss_weights"][i]) == weights[-1]
        rest = [3 * reward for reward in expected]
        rest[-1] += 3 * len(text)
        for n in reversed(range(len(rest) - 1)):
            rest[n] += 0.5 * rest[n + 1]
        advantages += rest
    return advantages, weights, sums


def test_tokens_have_the_rewards_of_their_steps_and_rows_their_weights(config: Path, folder: Path):
    (folder / "reward.py").write_text(REWARD)
    functions = f"reward.function={{{folder / 'reward.py'}:of_sevens: 1, {folder / 'reward.py'}:heavy: 1}}"
    settings = (functions, "reward.scale=3", *METHOD, "algorithm.use_kl_in_reward=false", "trainer.total_steps=2")
    first = (f"trainer.record_rollouts={folder / 'record'}", f"trainer.output_dir={folder / 'out'}")
    with Program(folder / "one", config, *settings, *first, "trainer.eval_interval=1") as program:
        assert program.wait() == 0, program.output
    steps = [metrics for metrics in logged(folder / "out") if metrics["step"]]
    assert len(steps) == 2
    for metrics in steps:
        path = folder / "record" / f"step_{metrics['step']:08d}.safetensors"
        advantages, weights, sums = plain_advantages(path, config.parent / "model")
        assert metrics["advantages/min"] == pytest.approx(min(advantages))
        assert metrics["advantages/max"] == pytest.approx(max(advantages))
        assert metrics["advantages/mean"] == pytest.approx(sum(advantages) / len(advantages))
        assert metrics["reward/loss_weight/mean"] == pytest.approx(sum(weights) / len(weights)) and 0 in weights
        assert metrics["reward/step_scores"] == pytest.approx(sum(sums) / len(list(filter(None, sums))))
        assert metrics["val/held_out/score/max"] == int(metrics["val/held_out/score/max"]), "it is the outcome's alone"
        assert "reward/part/sevens" in metrics and "reward/part/loss_weight" not in metrics
    again = (f"trainer.replay_rollouts={folder / 'record'}", f"trainer.output_dir={folder / 'again'}")
    again += ("trainer.eval_interval=0",)
    with Program(folder / "two", config, *settings, *again) as program:
        assert program.wait() == 0, program.output
    rewards = ("reward/part/sevens", "reward/step_scores")
    kept = [{key: value for key, value in one.items() if key not in rewards} for one in trained_on(folder / "out")]
    assert trained_on(folder / "again") == kept
    clipped = ("reward.clip=5", f"trainer.output_dir={folder / 'clipped'}")
    with Program(folder / "three", config, *settings, *again, *clipped) as program:
        assert program.wait() == 2, program.output
    assert "reward.clip 5.0 changes the score of a response, not the scores of its steps" in program.output
    assert kept[0]["actor/grad_norm"] > 0
    path = folder / "record" / "step_00000001.safetensors"
    with safe_open(path, framework="pt") as file:
        facts, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors | {"fields.loss_weights": torch.zeros_like(tensors["fields.loss_weights"])}, path, facts)
    nothing = ("trainer.total_steps=1", f"trainer.output_dir={folder / 'nothing'}")
    with Program(folder / "four", config, *settings, *again, *nothing) as program:
        assert program.wait() == 0, program.output
    assert logged(folder / "nothing")[-1]["actor/grad_norm"] == 0

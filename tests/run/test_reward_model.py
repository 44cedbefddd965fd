"""Runs with actor, critic, reference, reward model and engine at once."""

import json
import shutil
from pathlib import Path

import hf_oracle  # noqa: F401  # before transformers' models
import pytest
import torch
from program import Program, logged, trained_on
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from megappo.batch.rows_file import RowsFile

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
PLACED = (
    "algorithm.use_kl_in_reward=true",
    "placement.reward_model=1",
    "reward_model.parallel={tensor: 1}",
    "trainer.eval_interval=2",
)
WEIGHT = 0.5


@pytest.fixture(scope="module")
def reward_model(config: Path) -> Path:
    """Write a random reward model with the policy's tokenizer."""
    model, folder = config.parent / "model", config.parent / "judge"
    known = json.loads((model / "config.json").read_text())
    torch.manual_seed(7)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    names = {name: known[name] for name in ("vocab_size", "pad_token_id", "eos_token_id")}
    judge = LlamaForSequenceClassification(LlamaConfig(**shape, **names, max_position_embeddings=32, num_labels=1))
    judge.score.weight.data *= 50
    judge.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def settings(reward_model: Path) -> list[str]:
    return [
        *PLACED,
        f"reward_model.model_path={reward_model}",
        f"reward_model.weight={WEIGHT}",
        "trainer.total_steps=2",
    ]


@torch.no_grad()
def scores_of(judge: torch.nn.Module, rows: list[list[int]]) -> torch.Tensor:
    return torch.cat([judge(torch.tensor([tokens])).logits[0] for tokens in rows])


def test_scores_of_a_run_are_the_functions_and_transformers(
    config: Path, reward_model: Path, settings: list[str], tmp_path
):
    run, record = tmp_path / "run", tmp_path / "record"
    folders = (f"trainer.output_dir={run}", f"trainer.record_rollouts={record}", "trainer.num_samples=8")
    with Program(tmp_path / "1", config, *settings, *folders) as program:
        assert program.wait() == 0, program.output
    judge = LlamaForSequenceClassification.from_pretrained(reward_model).eval()
    steps = logged(run)
    for metrics in steps[1:]:
        with RowsFile(record / f"step_{metrics['step']:08d}.safetensors") as file:
            rows = file.rows(0, 128)
        by_model, by_function = scores_of(judge, [row.tolist() for row in rows.sequences]), rows.fields["scores"]
        assert by_model.std() > 0.1
        for name, scores in (("model", by_model), ("score", by_function + WEIGHT * by_model)):
            for kind in ("mean", "max", "min"):
                assert metrics[f"reward/{name}/{kind}"] == pytest.approx(float(getattr(scores, kind)()), abs=1e-5)
        assert metrics["reward/score_component/0/mean"] == pytest.approx(float(by_function.mean()), abs=1e-5)
        assert metrics["reward/score_component/1/mean"] == pytest.approx(WEIGHT * float(by_model.mean()), abs=1e-5)
        assert metrics["timing_s/reward_model"] > 0
    tokenizer = AutoTokenizer.from_pretrained(config.parent / "model")
    samples = [
        json.loads(line) for path in (run / "rollouts").glob("*.jsonl") for line in path.read_text().splitlines()
    ]
    held_out = [one for one in samples if one["dataset"] == "held_out"]
    assert len(held_out) >= 16
    for one in held_out:
        tokens = tokenizer.encode(one["prompt"] + one["response"], add_special_tokens=False)
        tokens += [tokenizer.eos_token_id] * (len(one["response"]) < 6)
        by_function = one["response"].count("7") / max(1, len(one["response"]))
        expected = by_function + WEIGHT * float(scores_of(judge, [tokens]))
        assert one["score"] == pytest.approx(expected, abs=1e-4)


def test_offloading_everything_changes_no_bit(config: Path, settings: list[str], tmp_path: Path):
    record = f"trainer.record_rollouts={tmp_path / 'record'}"
    with Program(tmp_path / "1", config, *settings, record, f"trainer.output_dir={tmp_path / 'out'}") as program:
        assert program.wait() == 0, program.output
    trained, frozen = "[weights,gradients,optimizer]", "[weights]"
    offloads = [f"{name}.offload={kinds}" for name, kinds in (("actor", trained), ("critic", trained))]
    offloads += [f"{name}.offload={frozen}" for name in ("ref", "reward_model")]
    replay = (f"trainer.replay_rollouts={tmp_path / 'record'}", "trainer.eval_interval=0")
    found = []
    for name, further in (("kept", ()), ("offloaded", offloads)):
        run = tmp_path / name
        with Program(
            tmp_path / f"{name} output", config, *settings, *replay, *further, f"trainer.output_dir={run}"
        ) as program:
            assert program.wait() == 0, program.output
        found.append(trained_on(run))
    assert found[0] == found[1] == trained_on(tmp_path / "out")
    assert logged(run)[-1]["memory/offloaded_gib/sum"] > 0

"""A run whose teacher SGLang serves: its log-probs are the ones of the same folder as a model of the run."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from program import Program, logged
from served_folder import served
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from megappo.observe.kept_table import read_kept

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
SETTINGS = ("trainer.total_steps=2", "trainer.eval_interval=0", "trainer.save_interval=0", "trainer.keep_rollouts=1")


@pytest.fixture(scope="module")
def teacher(config: Path) -> Path:
    """Write a random model with the actor's tokenizer and other weights."""
    model, folder = config.parent / "model", config.parent / "teacher"
    torch.manual_seed(5)
    shape = Qwen2Config.from_pretrained(model, initializer_range=0.2)
    Qwen2ForCausalLM(shape).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def kept(config: Path, folder: Path, teachers: dict, *further: str) -> tuple[list[list[float]], float]:
    """Run; return the teachers' log-probs of the first step's rows, and the KL to the first teacher in the last."""
    given = f"teachers={json.dumps(teachers)}", f"trainer.output_dir={folder / 'run'}"
    with Program(folder / "program", config, *SETTINGS, *given, *further) as program:
        assert program.wait(300) == 0, program.output
    log_probs = read_kept(folder / "run" / "rollouts" / "step_00000001.parquet")["teacher_log_probs"].to_pylist()
    return log_probs, logged(folder / "run")[-1]["distillation/kl/teacher/far"]


def test_log_probs_of_a_server_are_the_models(config: Path, teacher: Path, tmp_path: Path) -> None:
    labels = sorted({json.loads(line)["label"] for line in (config.parent / "train.jsonl").read_text().splitlines()})
    far, near = {"when": {"label": labels[::2]}}, {"parallel": {"tensor": 1}}
    record = tmp_path / "record"
    with (
        tempfile.TemporaryDirectory(prefix="serve-") as home,
        served(teacher, Path(home), "--dtype", "float32") as (_, client),
    ):
        url = str(client.base_url)
        served_far = {"far": far | {"url": [url]}, "near": near}
        found, kl = kept(config, tmp_path / "served", served_far, f"trainer.record_rollouts={record}")
    replay = f"trainer.replay_rollouts={record}"
    expected, expected_kl = kept(
        config, tmp_path / "model", {"far": far | {"model_path": str(teacher)}, "near": near}, replay
    )
    assert kl == pytest.approx(expected_kl, abs=1e-4) and abs(kl) > 0.01
    assert len(found) == len(expected) >= 64
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)

"""The quickstart's generator: its arithmetic, its split, what it writes, and one real run of the script."""

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

SCRIPT = Path(__file__).parents[2] / "tools" / "make_quickstart.py"


def run_script(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *map(str, args)], capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_quickstart", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(maker, tmp_path_factory) -> Path:
    """Return the folder, with a model of hardly any training."""
    folder = tmp_path_factory.mktemp("made")
    with patch.object(maker, "STEPS", 2):
        maker.build(folder, seed=0)
    return folder


def read(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def numbers(record: dict[str, str]) -> list[int]:
    return [int(number) for number in record["prompt"].removesuffix("=").split("+")]


def test_a_sum_without_forgetting_is_right(maker):
    rng = random.Random(0)
    for a in range(10, 100):
        for b in range(10, 100):
            assert maker.careless_sum(a, b, 0.0, rng) == str(a + b)


@pytest.mark.parametrize(
    ("a", "b", "answer"), [(37, 45, "72"), (23, 45, "68"), (85, 47, "22"), (45, 65, "00"), (99, 99, "88")]
)
def test_the_pupil_who_forgets_every_carry(maker, a, b, answer):
    assert maker.careless_sum(a, b, 1.0, random.Random(0)) == answer


def test_the_pupil_forgets_at_the_given_rate(maker):
    rng = random.Random(0)
    right = sum(maker.careless_sum(37, 45, 0.6, rng) == "82" for _ in range(4000))
    assert right / 4000 == pytest.approx(0.4, abs=0.03)


def test_the_split_depends_on_the_seed_alone(maker):
    assert maker.split_questions(3) == maker.split_questions(3)
    assert maker.split_questions(3) != maker.split_questions(4)


def test_held_out_questions_are_new_and_labels_right(made):
    train, val = (read(made / name) for name in ("train.jsonl", "val.jsonl"))
    assert len(train) + len(val) == 90 * 90
    assert 300 < len(val) <= 400
    assert not {frozenset(numbers(record)) for record in train} & {frozenset(numbers(record)) for record in val}
    assert all(record["label"] == str(sum(numbers(record))) for record in train + val)


def test_the_tokenizer_loads_and_round_trips(made):
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    assert len(tokenizer) == 16
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    tokens = tokenizer("37+45=")["input_ids"]
    assert len(tokens) == 6
    assert tokenizer.decode(tokens) == "37+45="
    assert tokenizer.decode([*tokens[:2], tokenizer.eos_token_id], skip_special_tokens=True) == "37"


def test_the_checkpoint_is_a_small_fp32_qwen2(made):
    folder = made / "model"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert all(config[key] % 2 == 0 for key in ("vocab_size", "num_hidden_layers", "num_key_value_heads"))
    assert {str(tensor.dtype) for tensor in load_file(folder / "model.safetensors").values()} == {"torch.float32"}


@pytest.mark.slow  # supervised training for half a minute
def test_held_out_accuracy_leaves_ppo_its_work(tmp_path):
    """Sampling finds right answers, yet they are not the most likely ones; the script's own figure is checked, too."""
    folder = tmp_path / "quickstart"
    result = run_script("--output", folder)
    assert result.returncode == 0, result.stderr
    val = read(folder / "val.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokens = tokenizer([record["prompt"] for record in val], return_tensors="pt")["input_ids"]
    labels = [record["label"] for record in val]

    def share(sample: bool) -> float:
        generated = model.generate(tokens, do_sample=sample, max_new_tokens=5)[:, 6:]
        texts = tokenizer.batch_decode(generated, skip_special_tokens=True)
        return sum(text == label for text, label in zip(texts, labels, strict=True)) / len(val)

    greedy = share(sample=False)
    assert 0.15 < greedy < 0.45
    assert f"{greedy:.1%} greedy" in result.stdout
    assert share(sample=True) > 0.25


def test_an_existing_folder_is_refused(tmp_path):
    (tmp_path / "kept").write_text("mine")
    result = run_script("--output", tmp_path)
    assert result.returncode == 2
    assert "--force" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_publishing_replaces_the_parts_and_nothing_else(maker, tmp_path):
    new, output = tmp_path / "new", tmp_path / "output"
    for folder, text in ((new, "new"), (output, "old")):
        (folder / "model").mkdir(parents=True)
        for file in ("train.jsonl", "val.jsonl", "model/config.json"):
            (folder / file).write_text(text)
    (output / "model" / "stale").write_text("old")
    (output / "run").write_text("mine")
    maker.publish(new, output)
    assert sorted(path.name for path in output.iterdir()) == ["model", "run", "train.jsonl", "val.jsonl"]
    assert [path.name for path in (output / "model").iterdir()] == ["config.json"]
    assert {(output / file).read_text() for file in ("train.jsonl", "val.jsonl", "model/config.json")} == {"new"}
    assert (output / "run").read_text() == "mine"

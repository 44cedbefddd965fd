"""Data and reward of configs/smollm2.yaml; tests/run/test_smollm2.py makes and trains the model."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def imported(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_held_out_pair_is_used_in_training(tmp_path: Path) -> None:
    imported("tools/smollm2.py").write_sums(tmp_path, seed=0)
    pairs: dict[str, list[frozenset[int]]] = {}
    for name in ("train", "val"):
        records = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        numbers = [[int(number) for number in record["prompt"][-1]["content"].split(" + ")] for record in records]
        assert [str(sum(pair)) for pair in numbers] == [record["label"] for record in records]
        pairs[name] = [frozenset(pair) for pair in numbers]
    assert len(pairs["train"]) + len(pairs["val"]) == 49 * 50 / 2
    assert not set(pairs["train"]) & set(pairs["val"])


def test_what_an_interrupted_download_has_left_is_not_the_model(tmp_path: Path) -> None:
    model = tmp_path / "models--HuggingFaceTB--SmolLM2-135M-Instruct"
    (model / "snapshots" / "abc").mkdir(parents=True)
    (model / "snapshots" / "abc" / "config.json").write_text("{}")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    done = subprocess.run(
        [sys.executable, "-c", "import smollm2; print(smollm2._from_hub())"],
        env=os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{ROOT}/tools:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "None\n", done.stderr


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("70", "70", 1.0),
        (" 70\n", "70", 1.0),
        ("60", "70", 0.6),
        ("71", "70", 0.6),
        ("61", "70", 0.2),
        ("700", "70", 0.1),
        ("7", "8", 0.6),
        ("36 + 34 = 70", "70", 0.05),
        ("To add", "70", 0.0),
        ("", "70", 0.0),
    ],
)
def test_partly_right_sums_count(response: str, label: str, score: float) -> None:
    (result,) = imported("configs/sums_reward.py").sums([""], [response], [label])
    assert result == {"score": pytest.approx(score), "right": float(score == 1.0)}

"""Whole runs of PPO on images: engines and trainer see the same, in two layouts and families; people see the images."""

import json
from pathlib import Path

import pyarrow.parquet
import pytest
import tiny_vision
import yaml
from program import Program, logged
from tiny_vision import noise

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
REWARD = """
from PIL import Image

def bright(prompts, responses, labels, images):
    return [sum(Image.open(path).convert("RGB").getpixel((0, 0))[0] for path in paths) / 255 for paths in images]
"""
LAYOUTS = {
    "qwen2_5_vl": {
        "actor": {"parallel": {"context": 2}},
        "critic": {"parallel": {"pipeline": 2, "pipeline_split": [2, 1]}},
    },
    "qwen3_vl": {"actor": {"parallel": {"tensor": 2, "sequence": True}}, "critic": {"parallel": {}}},
}
"""Model type -> layouts of actor and critic over two ranks."""


def write_data(folder: Path) -> None:
    """Write prompts with no, one and two images, in the file and beside it."""
    rows = []
    for number in range(12):
        (folder / f"{number}.jpg").write_bytes(noise(60 + 8 * number, 120, number, "JPEG"))
        images = [{"bytes": None, "path": f"{number}.jpg"}, {"bytes": noise(40, 70, 100 + number), "path": None}]
        content = f"{'<image>' * (number % 3)}what is {number}?"
        rows.append({"prompt": [{"role": "user", "content": content}], "images": images[: number % 3], "label": ""})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "val.jsonl").write_text(json.dumps({"prompt": "<image>", "images": ["1.jpg"], "label": ""}) + "\n")


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_two_steps(tmp_path: Path, model_type: str) -> None:
    tiny_vision.vision_folder(tmp_path / "model", model_type)
    write_data(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    trained = {"optim": {"lr": 1e-3}, "ppo_mini_batch_size": 4, "max_tokens_per_micro_batch": 512}
    settings = {
        "model": {"path": str(tmp_path / "model"), "dtype": "fp32"},
        "placement": {"actor, critic, ref": "0-1", "rollout": "0"},
        **{name: section | trained for name, section in LAYOUTS[model_type].items()},
        "rollout": {"n": 2, "max_response_length": 6, "max_total_tokens": 8192, "sync": {"probe_tolerance": 1e-4}},
        "algorithm": {"use_kl_in_reward": True},
        "data": {
            "train_files": str(tmp_path / "train.parquet"),
            "val_files": str(tmp_path / "val.jsonl"),
            "train_batch_size": 8,
            "max_prompt_length": 160,
            "max_image_pixels": 64 * 64,
        },
        "reward": {"function": f"{tmp_path / 'reward.py'}:bright"},
        "trainer": {"output_dir": str(tmp_path / "run"), "total_steps": 2, "eval_interval": 1, "save_interval": 1},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    with Program(tmp_path, tmp_path / "config.yaml") as program:
        assert program.wait(500) == 0, program.output
    assert "WARNING" not in program.output
    for step in logged(tmp_path / "run")[1:]:
        assert step["rollout/log_prob_diff/max"] < 1e-4 and step["sync/log_prob_diff/max"] < 1e-4
        assert step["reward/score/max"] > 0 and step["actor/grad_norm"] > 0 and step["critic/grad_norm"] > 0
    kept = pyarrow.parquet.read_table(tmp_path / "run" / "rollouts" / "step_00000001.parquet").to_pylist()
    for row in kept:
        assert row["prompt"].count("<|image_pad|>") == len(row["images"])
        assert all((tmp_path / "run" / name).is_file() for name in row["images"])
    assert any(len(row["images"]) == 2 for row in kept)
    [shown] = (tmp_path / "run" / "rollouts" / "step_00000001.jsonl").read_text().splitlines()
    assert (
        json.loads(shown)["images"] == [name for row in kept if len(row["images"]) == 1 for name in row["images"]][:1]
    )
    assert "data:image/jpeg;base64," in (tmp_path / "run" / "report.html").read_text()

"""Every YAML that ships loads and plans."""

import importlib.util
from pathlib import Path

import pytest

from megappo.config.loading import dump_config, load_config
from megappo.lab.plan.run_checks import check_run
from megappo.placement.placing import smallest_world
from megappo.placement.run_plan import plan_run

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = sorted(CONFIGS.rglob("*.yaml"))


def test_there_are_configs():
    assert {path.name for path in SHIPPED} >= {"quickstart.yaml", "qwen2.5_7b_gsm8k_8gpu.yaml"}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_it_loads_and_plans(path, tmp_path, monkeypatch):
    """Only the model and the data may be missing here."""
    monkeypatch.chdir(CONFIGS.parent)
    config = load_config(path)
    world_size = smallest_world(config) or 8
    plan_run(config, world_size)
    missing = (
        "model.path: no folder ",
        "critic.model_path: no folder ",
        "reward_model.model_path: no folder ",
        "teachers.qwen3_32b.model_path: no folder ",
        "teachers.trained.model_path: no folder ",
        "data.train_files: no ",
        "data.val_files: no ",
        "eval.datasets.truth.files: no ",
        "eval.datasets.val.files: no ",
        "eval.datasets.gsm8k.files: no ",
    )
    errors = [error.split(": ", 1) for error in check_run(config, world_size)[1]]
    assert {Path(place.rpartition(":")[0]) for place, _ in errors} <= set(SHIPPED)
    assert [error for _, error in errors if not error.startswith(missing)] == []
    of_examples = [error for _, error in errors if " outputs/" in error]
    assert all("make the example (" in error for error in of_examples), of_examples
    (tmp_path / "dump.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "dump.yaml") == config


def test_the_gsm8k_reward_compares_last_numbers():
    spec = importlib.util.spec_from_file_location("gsm8k_reward", CONFIGS / "gsm8k_reward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    responses = ["It is 1,234.", "so 3 + 4 = 7, which is wrong", "no idea", "-5", "5.0"]
    assert module.last_number([""] * 5, responses, ["a\n#### 1234", "#### 8", "#### 1", "#### -5", "5"]) == [
        1,
        0,
        0,
        1,
        1,
    ]

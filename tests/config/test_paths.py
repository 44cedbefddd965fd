"""Paths in a config: the home folder in place of ~, wherever a key takes a path; a variable in one is an error."""

import os
from pathlib import Path

import pytest
import yaml

from megappo.config.config_error import ConfigError
from megappo.config.loading import dump_config, load_config

CONFIG = "model: {path: m}\ndata: {train_files: d.jsonl}\ntrainer: {output_dir: o}\n"
KEYS = {
    "model.path": "~/m",
    "model.dist_checkpointing_path": "~/c",
    "critic.model_path": "~/m",
    "critic.dist_checkpointing_path": "~/c",
    "data.train_files": "~/d.jsonl",
    "data.val_files": ["a.jsonl", "~/d.jsonl"],
    "reward.function": "~/r.py:f",
    "rollout.environment": "~/e.py:E",
    "rollout.tools": "~/t.py:f",
    "rollout.server_args": {"quantization_param_path": "~/q"},
    "eval.datasets": {"held": {"files": "~/d.jsonl", "reward": {"~/r.py:f": 2.0}, "environment": "~/e.py:E"}},
    "trainer.output_dir": "~/o",
    "trainer.record_rollouts": "~/o",
    "trainer.replay_rollouts": "~/o",
    "trainer.eval_checkpoint": "~/o",
}
MAPPINGS = {"data.train_files": {"~/d.jsonl": 1.0}, "reward.options": {"~/r.py:f": {"path": "~"}}}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path / "home"


@pytest.mark.parametrize(("key", "value"), [*KEYS.items(), *MAPPINGS.items()])
def test_the_home_folder_is_in_place_of_its_sign(home, key, value):
    config = load_config(home.parent / "run.yaml", [f"{key}={yaml.safe_dump(value, default_flow_style=True)}"])
    found = yaml.safe_load(dump_config(config))
    for name in key.split("."):
        found = found[name]
    assert str(home) in str(found) and "'~/" not in str(found)


@pytest.mark.parametrize(("key", "value"), [*KEYS.items(), *MAPPINGS.items()])
@pytest.mark.parametrize("start", ["$SCRATCH/", "${SCRATCH}/", "/scratch/$USER/", "~nobody-of-this-name/"])
def test_what_only_a_shell_can_read_is_an_error(home, key, value, start):
    value = yaml.safe_load(yaml.safe_dump(value).replace("~/", start))
    text = yaml.safe_dump(value, default_flow_style=True)
    with pytest.raises(ConfigError) as caught:
        load_config(home.parent / "run.yaml", [f"{key}={text}"])
    errors = caught.value.errors
    assert len(errors) == (3 if key == "eval.datasets" else 1)
    for error in errors:
        assert error.startswith(f"command line: {key}") and "write the whole path" in error, error


def test_bases_and_extensions_too(home):
    (home / "base.yaml").write_text("trainer: {seed: 7, extensions: ~/mine.py}\n")
    (home / "mine.py").write_text("import os\nos.environ['MINE_RAN'] = '1'\n")
    (home.parent / "run.yaml").write_text(f"base: ~/base.yaml\n{CONFIG}")
    config = load_config(home.parent / "run.yaml")
    assert (config.trainer.seed, config.trainer.extensions) == (7, (f"{home}/mine.py",))
    assert os.environ.pop("MINE_RAN") == "1"


@pytest.mark.parametrize("path", ["a~b/c", "./~/c", "cost$5", "100$"])
def test_other_signs_are_a_path_s_own(home, path):
    assert load_config(home.parent / "run.yaml", [f"trainer.output_dir={path}"]).trainer.output_dir == path

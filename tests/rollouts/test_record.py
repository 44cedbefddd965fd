"""Recorded steps that a run continues from: steps that it would write alike."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
import torch

from megappo.batch.rows import Rows
from megappo.batch.rows_file import write_rows
from megappo.config.config_error import ConfigError
from megappo.config.schema import Config
from megappo.data.prompts import Prompt
from megappo.observe.files import rows_file
from megappo.rollouts.record import Record, Replay

ROWS = Rows(
    *(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)),
    torch.ones(1, dtype=torch.int64),
    torch.tensor([1, 2]),
    {"response_mask": torch.ones(1, 1), "scores": torch.ones(1)},
)
BATCH = SimpleNamespace(at_rank_0=lambda exchange: ROWS)
EXCHANGE = SimpleNamespace(rank=0, world_size=1)


def prompts_of(text: str = "{}=", label: object = float("nan"), **columns: object) -> SimpleNamespace:
    """Return a data set of which two prompts are drawn at a time."""

    def batch(num_drawn: int) -> list[Prompt]:
        return [Prompt(i, [1, i], text.format(i), label, columns) for i in (num_drawn, num_drawn + 1)]

    return SimpleNamespace(batch=batch)


PROMPTS = prompts_of()
DATA = "prompts, labels or other fields of data.train_files"


def record(folder: Path, **settings: object) -> Record:
    return Record(folder, make_config(**settings), SimpleNamespace(on_rank_0=lambda action: action()))


def make_config(
    *,
    model: str = "m",
    top_k: int = -1,
    reward: str = "exact_match",
    rollout_only: bool = True,
    environment: str | None = None,
    max_turns: int = 8,
    mask_truncated: bool = False,
    adv_estimator: str = "gae",
    normalize: str = "none",
    others: Mapping[str, object] = MappingProxyType({}),
) -> Config:
    config = Config.model_validate(
        {
            "model": {"path": model},
            "rollout": {"n": 2, "top_k": top_k, "environment": environment, "max_turns": max_turns},
            "reward": {"function": reward, "normalize": normalize},
            "algorithm": {"mask_truncated": mask_truncated, "adv_estimator": adv_estimator},
            "data": {"train_files": ["f"], "train_batch_size": 2},
            "trainer": {"output_dir": "o", "total_steps": 4, "rollout_only": rollout_only},
        }
    )
    for key, value in others.items():
        config = config.changed(key, value)
    return config


def write(into: Record, *steps: int) -> None:
    for step in steps:
        into.write(step, BATCH, PROMPTS.batch(2 * (step - 1)), 1, num_drawn=2 * step)


def test_steps_from_the_first_on_count_that_are_as_the_run_would_write_them(tmp_path):
    ours = record(tmp_path / "record")
    assert ours.valid_steps(PROMPTS) == (0, 0, [])
    write(ours, 1, 2, 4)
    assert ours.valid_steps(PROMPTS) == (2, 4, []), "the third is missing"
    write(ours, 3)
    assert ours.valid_steps(PROMPTS) == (4, 8, [])
    rows_file(ours.folder, 3).write_bytes(b"cut off")
    assert ours.valid_steps(PROMPTS) == (2, 4, [])


OTHERWISE = {"model": "n", "top_k": 3, "rollout_only": False}
CHANGED = {"model": "model.path", "top_k": "rollout.top_k", "rollout_only": "weights_step"}


@pytest.mark.parametrize("key", OTHERWISE)
def test_steps_that_were_sampled_with_other_settings_are_written_again(tmp_path, key):
    ours = record(tmp_path)
    write(ours, 1, 2, 3, 4)
    write(record(tmp_path, **{key: OTHERWISE[key]}), 2)  # a run that trains has other weights by then
    assert ours.valid_steps(PROMPTS) == (1, 2, [CHANGED[key]])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("reward.options", {"exact_match": {"day": date(2026, 1, 1)}}),
        ("reward.skip_special_tokens", False),
        ("data.label_key", "answer"),
        ("data.prompt_key", "question"),
        ("trainer.seed", 7),
        ("algorithm.adv_estimator", "remax"),
    ],
)
def test_a_changed_key_is_named(tmp_path, key, value):
    write(record(tmp_path, others={key: value}), 1)
    assert record(tmp_path, others={key: value}).valid_steps(PROMPTS) == (1, 2, [])
    assert record(tmp_path).valid_steps(PROMPTS) == (0, 0, [key])


@pytest.mark.parametrize("changes", [{"text": "{}+0="}, {"label": "1"}, {"level": 3}])
def test_prompts_are_compared_by_content(tmp_path, changes):
    write(record(tmp_path), 1)
    assert record(tmp_path).valid_steps(prompts_of(**changes)) == (0, 0, [DATA])
    moved = SimpleNamespace(batch=lambda num_drawn: [replace(one, index=9) for one in PROMPTS.batch(num_drawn)])
    assert record(tmp_path).valid_steps(moved) == (1, 2, [])


def test_a_record_of_another_version_is_written_again(tmp_path):
    write_rows(rows_file(tmp_path, 1), ROWS, {"settings": {}, "prompts": [0], "prompts_drawn": 2})
    assert record(tmp_path).valid_steps(PROMPTS) == (0, 0, ["the version of megappo"])


@pytest.mark.parametrize(
    "changed", ["reward.py", "near.py", "pack/__init__.py", "pack/inner.py", "here.py", "other.py"]
)
def test_modules_that_a_reward_file_imports_count(tmp_path, monkeypatch, changed):
    """From its folder and from the working folder, in functions and by relative imports; no other file does."""
    folder, here = tmp_path / "code", tmp_path / "here"
    (folder / "pack").mkdir(parents=True)
    here.mkdir()
    monkeypatch.chdir(here)
    (folder / "reward.py").write_text("import near, torch\nfrom pack import (\n    inner,\n)\ndef f(): import here\n")
    (folder / "pack" / "inner.py").write_text("from . import inner\n")
    for name in ("near.py", "pack/__init__.py", "other.py"):
        (folder / name).write_text("text = 'to import other'\n")
    (here / "here.py").touch()
    settings = {"reward": f"{folder}/reward.py:f"}
    write(record(tmp_path / "record", **settings), 1)
    file = here / changed if changed == "here.py" else folder / changed
    file.write_text(f"{file.read_text()}# changed\n")
    name = "../here/here.py" if changed == "here.py" else changed
    expected = (1, 2, []) if changed == "other.py" else (0, 0, [f"{name} of {folder}/reward.py:f"])
    assert record(tmp_path / "record", **settings).valid_steps(PROMPTS) == expected


def test_steps_that_were_scored_by_another_version_of_the_function_are_written_again(tmp_path):
    (tmp_path / "reward.py").write_text("def f(prompts, responses, labels): return [0.0] * len(labels)\n")
    ours = record(tmp_path, reward=f"{tmp_path}/reward.py:f")
    write(ours, 1)
    assert ours.valid_steps(PROMPTS) == (1, 2, [])
    (tmp_path / "reward.py").write_text("def f(prompts, responses, labels): return [1.0] * len(labels)\n")
    write(ours, 2)  # by workers that have loaded the one before
    assert ours.valid_steps(PROMPTS) == (2, 4, [])
    changed = [f"reward.py of {tmp_path}/reward.py:f"]
    assert record(tmp_path, reward=f"{tmp_path}/reward.py:f").valid_steps(PROMPTS) == (0, 0, changed)


def test_steps_of_another_version_of_the_environment_are_written_again(tmp_path):
    (tmp_path / "guess.py").write_text("class Guess:\n    limit = 1\n")
    settings = {"environment": f"{tmp_path}/guess.py:Guess"}
    ours = record(tmp_path, **settings)
    write(ours, 1)
    assert record(tmp_path, **settings).valid_steps(PROMPTS) == (1, 2, [])
    assert record(tmp_path, **settings, max_turns=3).valid_steps(PROMPTS) == (0, 0, ["rollout.max_turns"])
    (tmp_path / "guess.py").write_text("class Guess:\n    limit = 2\n")
    assert record(tmp_path, **settings).valid_steps(PROMPTS) == (0, 0, [f"guess.py of {tmp_path}/guess.py:Guess"])


@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize("compares", [{"adv_estimator": "rloo"}, {"normalize": "group"}])
def test_a_response_that_masks_may_have_left_alone_is_not_compared(tmp_path, masks, compares):
    """By an estimator, or to normalise its score; the record's run masked each truncated response by itself."""
    write(record(tmp_path, mask_truncated=masks), 1)
    replay = Replay(tmp_path, make_config(**compares, mask_truncated=masks), 9, EXCHANGE)
    alone = pytest.raises(ConfigError, match="but this run compares responses: record the rollouts of")
    with alone if masks else nullcontext():
        replay.score(1, None, nullcontext)
    write(record(tmp_path, **compares, mask_truncated=masks), 1)
    replay.score(1, None, nullcontext)


def test_episodes_are_replayed_by_a_run_of_the_same_environment(tmp_path):
    (tmp_path / "guess.py").write_text("class Guess:\n    limit = 1\n")
    environment = f"{tmp_path}/guess.py:Guess"
    write(record(tmp_path, environment=environment), 1)
    for settings, wrong in (
        ({"environment": None}, f"rollout.environment .*{environment}.*, but here it is null: set it to the record"),
        ({"environment": environment, "max_turns": 3}, "rollout.max_turns 8, but here it is 3: set it to the record"),
    ):
        with pytest.raises(ConfigError, match=f"trainer.replay_rollouts: .* was sampled with {wrong}"):
            Replay(tmp_path, make_config(**settings), 9, None).score(1, None, nullcontext)


def test_a_record_of_another_version_is_refused(tmp_path):
    path = rows_file(tmp_path, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows(path, ROWS, {"num_tokens": 1})
    with pytest.raises(ConfigError, match=f"{path} was written by another version of this program: record the"):
        Replay(tmp_path, make_config(), 9, EXCHANGE).score(1, None, nullcontext)

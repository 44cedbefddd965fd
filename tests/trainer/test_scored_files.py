"""A critic on files of trajectories: a record, exported to JSONL, trains as the replay of the record does."""

import json
from contextlib import ExitStack
from pathlib import Path

import commands
import pytest
import torch
from spawn import run_ranks

from megappo.batch.rows import Rows
from megappo.batch.rows_file import write_rows
from megappo.config.schema import Config
from megappo.engines.handle import EngineHandle
from megappo.observe.files import rows_file
from megappo.observe.loggers import Outlook
from megappo.placement.run_plan import plan_run
from megappo.rollouts.fingerprint import rollout_settings

EXPORT = commands.REPOSITORY / "tools" / "show_rollouts.py"
SIZE, PROMPT, RESPONSE = 8, 6, 6
EPISODES = ("110111", "1", "10101", "111", "110011", "1001", "11", "111111")
"""Mask of each row's response: 0 on tokens of an environment."""


def record(folder: Path, step: int, config: Config) -> None:
    """Write a step of episodes with rewards of their turns, of which every other one was cut off."""
    generator = torch.Generator().manual_seed(step)
    mask = torch.tensor([[float(number) for number in row.ljust(RESPONSE, "0")] for row in EPISODES])
    begins = mask * (torch.cat([torch.zeros(SIZE, 1), mask[:, :-1]], 1) == 0)
    turns = mask * begins.cumsum(1)
    rewards = mask * torch.randint(-2, 3, mask.shape, generator=generator) / 4
    lengths = torch.tensor(list(map(len, EPISODES)))
    fields = {
        "response_mask": mask,
        "rollout_log_probs": -mask,
        "truncated": torch.arange(SIZE) % 2.0,
        "scores": rewards.sum(1) + torch.rand(SIZE, generator=generator),
        "episodes": torch.zeros(SIZE),
        "segments": torch.zeros(SIZE),
        "turns": turns,
        "turn_rewards": rewards,
    }
    tokens = torch.randint(2, 12, (int(lengths.sum()) + SIZE * PROMPT,), generator=generator)
    ids = torch.arange(SIZE)
    rows = Rows(ids, ids, torch.full((SIZE,), PROMPT), lengths, tokens, fields)
    facts = {"step": step, "model": config.model.path, "settings": rollout_settings(config), "num_tokens": 1}
    folder.mkdir(exist_ok=True)
    write_rows(rows_file(folder, step), rows, facts | {"compared": True, "labels": list(range(SIZE))})


def settings(folder: Path, config: Path) -> tuple[dict, dict]:
    """Return the values of a run on the record, and of one on its lines."""
    shared = {
        "model": {"path": str(config.parent / "model"), "dtype": "fp32"},
        "critic": {"optim": {"lr": 1e-2}, "max_tokens_per_micro_batch": 24, "ppo_mini_batch_size": SIZE // 2},
        "algorithm": {"gamma": 0.9, "lam": 0.8, "critic_lam": 0.7, "bootstrap_truncated": True},
        "reward": {"scale": 2.0},
    }
    trainer = {"output_dir": str(folder / "run"), "total_steps": 2, "eval_interval": 1, "loggers": []}
    files = {"train_files": str(config.parent / "train.jsonl"), "max_prompt_length": PROMPT}
    replay = {
        "data": files | {"train_batch_size": SIZE},
        "rollout": {"max_response_length": RESPONSE},
        "trainer": trainer | {"train": ["critic"], "replay_rollouts": str(folder / "record")}
        | {"replay_held_out": str(folder / "held_out")},
    }  # fmt: skip
    lines = {
        "data": {"train_files": str(folder / "record.jsonl"), "val_files": str(folder / "held_out.jsonl")}
        | {"train_batch_size": SIZE, "max_length": PROMPT + RESPONSE, "shuffle": False},
        "rollout": {"max_response_length": RESPONSE},
        "trainer": trainer | {"kind": "critic"},
    }
    return shared | replay, shared | lines


def steps(rank: int, world_size: int, values: dict, file: Path) -> None:
    from megappo.recipes.ppo import ppo_step
    from megappo.trainer.main import build_run  # of the ranks: this process has imported Megatron otherwise

    config = Config.model_validate(values)
    with ExitStack() as cleanup:
        run = build_run(plan_run(config, world_size), EngineHandle(), Outlook(), cleanup)
        metrics = [ppo_step(run, step) for step in (1, 2)]
    if rank == 0:
        file.write_text(json.dumps(metrics, default=str))


def test_a_record_and_its_lines_train_alike(tmp_path: Path, config: Path) -> None:
    of_record, of_lines = settings(tmp_path, config)
    for name, step in (("record", 1), ("record", 2), ("held_out", 1)):
        record(tmp_path / name, step, Config.model_validate(of_record))
    done = commands.run(EXPORT, tmp_path / "record", "--jsonl")
    assert done.returncode == 0 and not done.stderr, done.stderr
    for others, status, why in (
        (("--step", "9"), 1, "has no step 9: it has 1, 2"),
        (("--num", "3"), 2, "--num changes what is shown"),
    ):
        refused = commands.run(EXPORT, tmp_path / "record", "--jsonl", *others)
        assert refused.returncode == status and why in refused.stderr
    (tmp_path / "record.jsonl").write_text(done.stdout)
    (tmp_path / "held_out.jsonl").write_text("".join(done.stdout.splitlines(keepends=True)[:SIZE]))
    for name, values in (("record", of_record), ("lines", of_lines)):
        run_ranks(2, steps, values, tmp_path / f"{name}.json")
    expected, found = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("record", "lines"))
    for one, other in zip(expected, found, strict=True):
        names = {name for name, value in one.items() if isinstance(value, float) and "timing" not in name}
        names = {name for name in names if name.startswith(("critic/", "val/", "returns/", "values/", "reward/"))}
        assert {"critic/vf_loss", "critic/grad_norm", "val/held_out/critic/vf_turn/2/vf_explained_var"} <= names
        for name in names - {"critic/mfu"}:
            assert other[name] == pytest.approx(one[name], abs=1e-6, nan_ok=True), name
    assert found[1]["data/num_examples"] == SIZE and found[1]["data/epochs"] == 1

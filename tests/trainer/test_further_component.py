"""A further model, registered from outside in one entry (and its fields in theirs), takes part in a run."""

import io
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import yaml
from recorder import recorder_in
from spawn import run_ranks

from megappo.batch.fields import FIELDS, Field
from megappo.commands import plan
from megappo.config.config_error import ConfigError
from megappo.config.schema import Config
from megappo.config.sections import Parallel
from megappo.placement.components import COMPONENTS, ComponentSpec, ForwardPass, Setting
from megappo.placement.run_plan import plan_run
from megappo.recipes.ppo import ppo_step

CASE = {"placement": {"actor": "0-1", "critic": "2-3"}, "critic": {"parallel": {"tensor": 2}}}


def judge(config: Config, ranks: str = "1-2") -> ComponentSpec:
    """A frozen model with a value head, from the folder and the seed that the critic starts from."""
    return ComponentSpec(
        ranks=Setting("judge.ranks", ranks),
        parallel=Setting("judge.parallel", Parallel(pipeline=2)),
        folder=Setting("model.path", config.model.path),
        max_tokens=Setting("judge.max_tokens", 30),
        head="value",
        forward=ForwardPass("judge", {"values": "judged", "bootstrap_values": "judged_at_the_end"}),
    )


def fields_of(run, step: int) -> dict[str, torch.Tensor]:
    """Return the fields of this rank's rows in a step, after the forward passes."""
    run.batches.num_drawn = (step - 1) * run.config.data.train_batch_size
    batch, _ = run.batches.score(step, run.batches.sample(step, run.phase), run.phase)
    scattered = run.models.scatter(batch)
    outputs = run.models.forward("critic", scattered) | run.models.forward_others(scattered, run.phase)
    return run.models.gather(scattered, outputs, batch).rows.fields


def with_a_judge(rank: int, world_size: int, folder: str) -> None:
    with (
        patch.dict(FIELDS),
        patch.dict(COMPONENTS),
    ):  # other tests' calls meet the tables as they were
        FIELDS.register("judged", Field(True, "the judge", "what the judge expects before the token"))
        FIELDS.register("judged_at_the_end", Field(False, "the judge", "what it expects after the last token"))
        COMPONENTS.register("judge", judge)
        check_steps(rank, world_size, folder)


def check_steps(rank: int, world_size: int, folder: str) -> None:
    bench = recorder_in(Path(folder))
    changes = {"algorithm": {"bootstrap_truncated": True}}
    config = Config.model_validate(bench.merged(bench.settings(Path(folder)), CASE, changes))
    run = bench.build(config)
    before = fields_of(run, 1)
    torch.testing.assert_close(before["judged"], before["values"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(before["judged_at_the_end"], before["bootstrap_values"], rtol=1e-5, atol=1e-5)
    ppo_step(run, 1)
    assert run.phase.timers.lap().keys() >= {"timing_s/judge", "timing_s/values"}
    after = fields_of(run, 1)
    assert torch.equal(after["judged"], before["judged"]), "it is frozen"
    assert not torch.equal(after["values"], before["values"]), "the critic is not"
    assert run.models.trained.keys() == {"actor", "critic"}, "and no part of checkpoints"
    if rank == 0:
        assert_planned(bench, Path(folder))


def assert_planned(bench, folder: Path) -> None:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(bench.merged(bench.settings(folder), CASE)))
    with redirect_stdout(io.StringIO()) as printed:
        plan.main([str(path)])
    assert (
        "  judge: data 1 x tensor 1 x pipeline 2\n    stage 0  [dp0: 1]\n    stage 1  [dp0: 2]\n" in printed.getvalue()
    )


def test_it_takes_part_in_a_run(tmp_path):
    run_ranks(4, with_a_judge, str(tmp_path))


@pytest.mark.parametrize(
    ("ranks", "tokens", "error"),
    [
        ("3-4", 30, "judge.ranks: '3-4' names rank 4, but this run has 4"),
        (
            "1-3",
            30,
            "judge.ranks with judge.parallel: tensor 1 x context 1 x pipeline 2 = 2 does not ",
        ),
        ("1-2", 29, "judge.max_tokens 29 cannot hold one row of"),
    ],
)
def test_errors_of_it_name_its_keys(ranks, tokens, error, monkeypatch):
    config = Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train_files": ["f"], "max_prompt_length": 20},
            "rollout": {"max_response_length": 10},
            "trainer": {"output_dir": "o"},
        }
    )
    spec = replace(judge(config, ranks), max_tokens=Setting("judge.max_tokens", tokens))
    monkeypatch.setitem(COMPONENTS, "judge", lambda config: spec)
    with pytest.raises(ConfigError) as raised:
        plan_run(config, 4)
    (found,) = raised.value.errors
    assert found.startswith(error)

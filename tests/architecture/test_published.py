"""Public models, by config.json as published: their parameters are as many as the hub counts."""

import json
from pathlib import Path

import pytest
from planning import plan_here, write_run
from published_configs import PUBLISHED, REFUSED
from slow import slow_ones

from megappo.architecture.families import FAMILIES
from megappo.architecture.parsing import read_architecture
from megappo.config.config_error import ConfigError
from megappo.lab.estimate.placed_model import read_shape

SHOWN = ("Qwen/Qwen2.5-0.5B-Instruct", "mistralai/Mixtral-8x22B-v0.1", "google/gemma-3-270m")


def check_count(found: int, published: int) -> None:
    """Compare to the digit, or with a rounded number as closely as it allows."""
    assert found == pytest.approx(published, rel=0.02 if published % 10**6 == 0 else 0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_the_parameters_that_it_publishes(tmp_path: Path, name: str) -> None:
    config, parameters = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_count(read_shape(str(tmp_path)).size, parameters)


def test_every_family_has_a_public_model() -> None:
    assert len(PUBLISHED) >= 25
    assert {config["architectures"][0] for config, _ in PUBLISHED.values()} == {*FAMILIES}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_computes_something_else_is_refused_by_the_key(tmp_path: Path, name: str) -> None:
    config, key = REFUSED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"{key} .* is not supported|has {key} = "):
        read_architecture(tmp_path)


@pytest.mark.parametrize("name", slow_ones(PUBLISHED, PUBLISHED.keys() - set(SHOWN)))
def test_plan_counts_the_parameters(tmp_path: Path, name: str) -> None:
    config, parameters = PUBLISHED[name]
    folder = write_run(tmp_path)
    (folder / "model" / "config.json").write_text(json.dumps(config))
    one_rank = ["placement={actor: 0, critic: 0, rollout: 0}", "actor.parallel.tensor=1", "critic.parallel.pipeline=1"]
    done = plan_here(folder, "run.yaml", *one_rank, "rollout.tensor_parallel=1")
    assert done.returncode == 0, done.stderr
    [actor] = [line.split() for line in done.stdout.splitlines() if line.startswith("  actor ") and "," in line][-1:]
    check_count(int(actor[1].replace(",", "")), parameters)

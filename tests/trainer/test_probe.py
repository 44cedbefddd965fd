"""The probe after a weight sync: each engine is compared by itself."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from engine_handles import restarts_of
from ppo_engines import SPEC
from spawn import run_ranks

from megappo.batch.exchange import Exchange
from megappo.batch.rows import Rows
from megappo.config.schema import Config
from megappo.data.prompts import Prompt
from megappo.engines.client import EngineError, Generation
from megappo.engines.handle import EngineHandle
from megappo.placement.layout import Layout
from megappo.rollouts.datasets import Datasets
from megappo.rollouts.rollouts import Rollouts
from megappo.trainer.component_batch import Component
from megappo.trainer.inference import Probe

ENGINES = {0: 2, 2: 0, 3: 1}
"""Rank -> the engine it owns."""


class Client:
    """Answers each prompt with as many tokens as its engine's number + 1."""

    def __init__(self, engine: int):
        self.engine = engine

    def generate(self, prompts: list[list[int]], params: object, images: object) -> list[Generation]:
        length = self.engine + 1
        return [Generation([7] * length, [-1.0] * length, "stop") for _ in prompts]


class Prompts:
    kept = range(9)

    def __len__(self) -> int:
        return 9

    def at(self, indices: list[int]) -> list[Prompt]:
        return [Prompt(i, [1 + i], "", None) for i in indices]


class Policy:
    """Its log-probs differ from engine 1's by `difference`."""

    is_output, difference = True, 0.0

    def forward(self, rows: Rows) -> dict[str, torch.Tensor]:
        is_engine_1 = rows.response_mask.sum(dim=1, keepdim=True) == 2
        return {"log_probs": (-1.0 - self.difference * is_engine_1) * rows.response_mask}


def probe_with_one_stale_engine(rank: int, world_size: int) -> None:
    exchange = Exchange(dist.group.WORLD)
    config = Config.model_validate(
        {
            "model": {"path": "model"},
            "data": {"train_files": ["train.jsonl"]},
            "trainer": {"output_dir": "out"},
            "rollout": {"sync": {"probe_tolerance": 0.1}},
        }
    )
    engine = SimpleNamespace(wait_ready=lambda: Client(ENGINES[rank])) if rank in ENGINES else None
    own = EngineHandle(ENGINES.get(rank), engine)
    own.wait_ready()
    warnings: list[str] = []
    policy = Policy()
    actor = Component("actor", SPEC, Layout((0, 1)), exchange, policy if rank < 2 else None)
    restarts, datasets = restarts_of(own, exchange, warnings.append), Datasets(None, (), 30, None, {})
    rollouts = Rollouts(config, datasets, restarts, exchange, workers={}, num_engines=3)
    probe = Probe(rollouts, Prompts(), actor)
    policy.difference = 0.09
    found = probe()
    names = [f"sync/log_prob_diff/{name}" for name in ("mean", "max", "warnings")]
    assert found == pytest.approx(dict(zip(names, (0.03, 0.09, 0), strict=True)))
    policy.difference = 0.2  # of all engines together it is below the tolerance
    found = probe()
    assert found == pytest.approx(dict(zip(names, (0.2 / 3, 0.2, 1), strict=True)))
    assert ["the log-probs of engine 1's probe by 0.2 on average" in line for line in warnings] == [True]
    policy.difference = 0.6
    with pytest.raises(EngineError, match="the log-probs of engine 1's probe by 0.6 on average"):
        probe()


def test_the_engine_that_is_stale_is_named():
    run_ranks(4, probe_with_one_stale_engine)

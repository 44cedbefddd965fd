"""Each stage of a pipeline broadcasts its own tensors: together they are the actor's, in a real engine."""

from pathlib import Path

import pytest
import torch.distributed as dist
from changed_actor import changed_actor
from engine_log_probs import engine_log_probs
from hf_oracle import log_probs_of
from ppo_engines import Case, make_engine
from spawn import run_ranks

from megappo.architecture.parsing import read_architecture
from megappo.batch.exchange import Exchange
from megappo.config.schema import Config
from megappo.engines.client import EngineClient
from megappo.engines.process import Engine
from megappo.placement.groups import build_groups
from megappo.placement.run_plan import plan_run
from megappo.sync.build import build_sync
from megappo.sync.proof import verified_sync
from megappo.weights.buckets import num_bytes

SEQUENCE = [5, 6, 7, 3, 2, 9, 30, 12]


def check_sent(rank: int, world_size: int, api_key: str, checkpoint: Path, sections: dict) -> None:
    """Rank 0, of the first stage, owns the engine as well: it gathers for its stage and announces both stages."""
    config = Config.model_validate(sections)
    plan = plan_run(config, world_size)
    layouts = plan.layouts
    route = plan.route
    groups = build_groups({"actor": layouts["actor"]}, seed=0)["actor"]
    actor = make_engine(Path(config.model.path), Case(layouts["actor"], sequence=True), groups, "actor")
    client = EngineClient(config.rollout.engines[0], api_key, timeout=60.0) if rank == 0 else None
    exchange = Exchange(dist.group.WORLD)
    sync = build_sync(config, route, read_architecture(checkpoint), actor, client, exchange)
    sent = []
    for sender in sync.senders:
        sender.send = lambda bucket, flat, send=sender.send: (sent.extend(bucket), send(bucket, flat))
    verified_sync(sync, client, barrier=lambda: exchange.all_gather(None), as_loaded=False)
    assert sync().bytes == num_bytes(sync.tensors), "the same groups again"
    names = exchange.all_gather([tensor.name for tensor in sent])
    assert [bool(of_rank) for of_rank in names] == [True, False, True, False]
    assert sorted(sum(names, [])) == sorted(2 * [tensor.name for tensor in sync.tensors])
    assert {name.split(".")[2] for name in names[0] if ".layers." in name} == {"0", "1"}
    assert {name.split(".")[2] for name in names[2] if ".layers." in name} == {"2", "3"}


def test_all_stages_send_their_own(
    engine: Engine, client: EngineClient, restored: None, checkpoint: Path, tmp_path: Path
) -> None:
    model, sections = changed_actor(checkpoint, tmp_path)
    sections |= {
        "placement": {"actor": "0-3", "critic": "0-3"},
        "actor": {"parallel": {"tensor": 2, "pipeline": 2, "sequence": True}},
        "rollout": {"engines": [engine.url], "sync": {"bucket_bytes": 20_000}},
    }
    run_ranks(4, check_sent, engine._api_key, checkpoint, sections)
    found = engine_log_probs(client, [SEQUENCE])[0]
    assert found == pytest.approx(log_probs_of(model, SEQUENCE[:1], SEQUENCE[1:]), abs=1e-4)

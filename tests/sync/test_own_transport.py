"""A transport of somebody's own: one entry in the table, and the actor's weights reach a real engine by it."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from changed_actor import changed_actor
from engine_log_probs import engine_log_probs
from hf_oracle import log_probs_of
from ppo_engines import Case, make_engine
from safetensors.torch import save_file
from spawn import run_ranks

from megappo.architecture.parsing import read_architecture
from megappo.batch.exchange import Exchange
from megappo.config.describe import keys
from megappo.config.methods import TRANSPORTS, Transport
from megappo.config.schema import Config
from megappo.engines.client import EngineClient
from megappo.engines.process import Engine
from megappo.placement.groups import build_groups
from megappo.placement.run_plan import plan_run
from megappo.sync.build import build_sync
from megappo.sync.proof import verified_sync
from megappo.sync.transport import Link, Receiver, Sender
from megappo.weights.buckets import Bucket, views

SEQUENCE = [5, 6, 7, 3, 2, 9, 30, 12]


class FileWriter(Sender):
    """Keeps all tensors, and writes them to one file."""

    def __init__(self, link: Link):
        self.address = link.folder / "weights"
        self.hf_config_file = Path(link.config.model.path, "config.json")

    def open(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        self.tensors |= {name: tensor.clone() for name, tensor in views(bucket, flat)}

    def close(self) -> None:
        self.address.mkdir(parents=True)
        save_file(self.tensors, self.address / "model.safetensors")
        (self.address / "config.json").write_bytes(self.hf_config_file.read_bytes())


class FileReader(Receiver):
    """Has the engine read it."""

    def __init__(self, link: Link, client: EngineClient):
        self.folder = link.address
        self.client = client
        self.names: list[str] = []

    def send(self, bucket: Bucket) -> None:
        self.names += [tensor.name for tensor in bucket]

    def close(self) -> None:
        assert len(self.names) > 10
        self.client.post("/update_weights_from_disk", {"model_path": str(self.folder)})


def check_sent(rank: int, world_size: int, url: str, api_key: str, checkpoint: Path, sections: dict) -> None:
    """Two tensor-parallel ranks have the actor, a third the engine."""
    TRANSPORTS.register("file", Transport(FileReader, FileWriter))
    config = Config.model_validate(sections)
    plan = plan_run(config, world_size)
    layouts = plan.layouts
    route = plan.route
    groups = build_groups({"actor": layouts["actor"]}, seed=0)["actor"]
    actor = make_engine(Path(config.model.path), Case(layouts["actor"]), groups, "actor") if groups.member else None
    client = EngineClient(url, api_key, timeout=60.0) if rank == route.engines[0].owner else None
    exchange = Exchange(dist.group.WORLD)
    sync = build_sync(config, route, read_architecture(checkpoint), actor, client, exchange)
    verified_sync(sync, client, barrier=lambda: exchange.all_gather(None), as_loaded=False)


def test_a_registered_transport_takes_the_weights_to_an_engine(
    engine: Engine, client: EngineClient, restored: None, checkpoint: Path, tmp_path: Path
) -> None:
    model, sections = changed_actor(checkpoint, tmp_path)
    sections |= {
        "placement": {"actor": "0-1", "critic": "0-1", "rollout": "2"},
        "actor": {"parallel": {"tensor": 2}},
        "rollout": {"sync": {"transport": "file", "bucket_bytes": 60_000}},
    }
    run_ranks(3, check_sent, engine.url, engine._api_key, checkpoint, sections)
    assert engine_log_probs(client, [SEQUENCE])[0] == pytest.approx(
        log_probs_of(model, SEQUENCE[:1], SEQUENCE[1:]), abs=1e-4
    )


def test_the_names_of_the_key_follow_from_the_table() -> None:
    [key] = [key for key in keys() if key.path == "rollout.sync.transport"]
    assert key.values == " | ".join(["auto", *TRANSPORTS])

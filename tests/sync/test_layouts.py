"""After a sync the real SGLang engine computes what the trainer computes, from the actor in any layout."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from engine_log_probs import engine_log_probs
from hf_oracle import log_probs_of
from ppo_engines import SPEC, Case, at_owners, make_engine
from slow import slow_ones
from spawn import run_ranks
from tiny_folders import read_config
from tiny_models import hf_folder, hf_model
from tiny_shapes import DEEPSEEK_V2, DEEPSEEK_V3
from transformers import AutoConfig, AutoModelForCausalLM
from weight_sources import handle_sender

from megappo.architecture.parameters import hf_shapes
from megappo.architecture.parsing import read_architecture
from megappo.batch.exchange import Exchange
from megappo.batch.rows import Rows
from megappo.config.schema import Config, Rollout
from megappo.engines.client import EngineClient
from megappo.engines.process import Engine
from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout
from megappo.sync.proof import check_log_probs
from megappo.sync.sync import WeightSync
from megappo.trainer.component_batch import Component
from megappo.weights.buckets import views
from megappo.weights.export import Export

TOLERANCE = 1e-4
BUCKET_BYTES = 60_000  # several buckets
SEQUENCES = ([5, 6, 7, 3, 2, 9, 30, 12], [47, 0, 1], [11, 4, 4, 4, 4, 4, 13, 40, 41, 42, 43, 44, 45, 46], [20, 21])
FOUR = (0, 1, 2, 3)
LAYOUTS = {
    "tp1": Layout((0,)),
    "tp2": Layout((0, 1), tensor=2),
    "pp2": Layout((0, 1), pipeline=2),
    "pp2 vpp2": Layout((0, 1), pipeline=2, virtual_pipeline=2),
    "dp2": Layout((0, 1)),
    "cp2 pp2": Layout(FOUR, pipeline=2, context=2),
    "tp2 pp2": Layout(FOUR, tensor=2, pipeline=2),
    "tp2 dp2": Layout(FOUR, tensor=2),
    "shared backbone, pp2": Layout((0, 1), pipeline=2),
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": EXPERTS | {"norm_topk_prob": True, "head_dim": 32},
}
"""All but Qwen2-MoE, which SGLang does not serve on a CPU, for want of a kernel."""
SLOW = tuple(FAMILIES)
"""The shared engine takes Qwen2's weights from every layout; whole runs of Llama and Qwen3-MoE show how theirs come."""
DEEPSEEK = {"deepseek_v2": DEEPSEEK_V2 | {"q_lora_rank": None}, "deepseek_v3": DEEPSEEK_V3}
SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "initializer_range",
)
FAMILY_LAYOUTS = {name: LAYOUTS[name] for name in ("tp1", "tp2", "pp2", "tp2 pp2")}
MIXTURE_LAYOUTS = FAMILY_LAYOUTS | {
    "ep2": Layout((0, 1), expert=2),
    "tp2 etp2": Layout((0, 1), tensor=2, expert_tensor=2),
    "tp2 pp2 ep2": Layout(FOUR, tensor=2, pipeline=2, expert=2),
    "tp2 cp2 ep4": Layout(FOUR, tensor=2, context=2, expert=4),
}
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Address:
    """The shared engine, as a rank that owns it reaches it, and the weights it takes."""

    url: str
    api_key: str
    shapes: Shapes
    tensor_parallel: int = 1


@pytest.fixture
def address(engine: Engine, engine_shapes: Shapes, restored: None) -> Address:
    return Address(engine.url, engine._api_key, engine_shapes)


class Actor:
    """An actor in some layout on its ranks; rank 0 owns the engines."""

    def __init__(self, addresses: Sequence[Address], name: str, folder: Path, layout: Layout, sequence: bool = False):
        self.addresses, self.folder, self.exchange = addresses, folder, Exchange(dist.group.WORLD)
        groups = build_groups({name: layout}, seed=0)[name]
        case = Case(layout, temperature=1.0, sequence=sequence)
        kind = "shared" if "shared" in name else "actor"
        self.engine = make_engine(folder, case, groups, kind) if groups.member else None
        self.component = Component("actor", SPEC, layout, self.exchange, self.engine)
        own = addresses if self.exchange.rank == 0 else ()
        self.clients = [EngineClient(address.url, address.api_key, timeout=60.0) for address in own]

    def push(self, corrupt: Callable[[Export], object] = lambda export: export) -> None:
        """Sync the weights, on the actor's ranks."""
        if self.engine is not None:
            self.make_sync(corrupt)()

    def make_sync(
        self, corrupt: Callable[[Export], object] = lambda export: export, bucket_bytes: int = BUCKET_BYTES
    ) -> WeightSync:
        export = Export(self.engine.chunks, read_architecture(self.folder), self.engine.groups, full_tensor_ranks={0})
        source = corrupt(export) if export.participates else None
        pairs = zip(self.clients, self.addresses, strict=False)
        senders = [handle_sender(client, address.tensor_parallel) for client, address in pairs]
        shapes = self.addresses[0].shapes
        options = {"bucket_bytes": bucket_bytes, "barrier": lambda: None, "engines_keep": False}
        return WeightSync(export.tensors, source, senders, [], shapes, **options)

    def differences(self, expected: list[list[float]]) -> tuple[float, float]:
        """Largest and mean distance of the engines' log-probs from the trainer's, which must be those expected."""
        batch = at_owners(self.exchange, sequences_as_rows())
        scattered = self.component.scatter(batch)
        rows = scattered.gather(scattered.forward(), {"log_probs": "old_log_probs"}, batch).rows
        shared = self.exchange.all_gather([row[row != 0] for row in rows.fields["old_log_probs"]])
        trainer = torch.cat([row for part in shared for row in part])
        torch.testing.assert_close(trainer, torch.tensor(sum(expected, [])), rtol=0, atol=TOLERANCE)
        engines = self.exchange.all_gather([sum(engine_log_probs(client, SEQUENCES), []) for client in self.clients])[0]
        distance = (torch.tensor(engines) - trainer).abs()
        return float(distance.max()), float(distance.mean())


def sequences_as_rows() -> Rows:
    """All of a sequence but its first token as a response."""
    responses = torch.tensor([len(tokens) - 1 for tokens in SEQUENCES])
    mask = (torch.arange(int(responses.max())) < responses[:, None]).float()
    tokens = torch.tensor(sum(SEQUENCES, []))
    ids = torch.arange(len(SEQUENCES))
    return Rows(ids, ids, torch.ones_like(responses), responses, tokens, {"response_mask": mask})


def perturbed(checkpoint: Path, folder: Path, seed: int) -> tuple[Path, list[list[float]]]:
    """The checkpoint with other weights, and their log-probs by Hugging Face."""
    model = hf_model(checkpoint)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return folder, [log_probs_of(model, tokens[:1], tokens[1:]) for tokens in SEQUENCES]


def check_synced(
    rank: int,
    world_size: int,
    addresses: list[Address],
    models: dict[str, tuple[Path, list]],
    layouts: dict[str, Layout],
) -> None:
    for name, (folder, expected) in models.items():
        actor = Actor(addresses, name, folder, layouts[name], sequence=layouts[name].tensor > 1)
        before, _ = actor.differences(expected)
        assert before > 0.1, f"{name}: the weights must be new to the engine"
        for client in actor.clients:
            client.reset_weights()
        actor.exchange.all_gather(None)
        actor.push()
        actor.exchange.all_gather(None)
        after, _ = actor.differences(expected)
        assert after < TOLERANCE, f"{name}: the engine's log-probs are {after:.2g} off the trainer's"


def test_the_engine_agrees_with_the_trainer_and_hugging_face(
    address: Address, checkpoint: Path, tmp_path: Path
) -> None:
    models = {name: perturbed(checkpoint, tmp_path / name, seed) for seed, name in enumerate(LAYOUTS)}
    run_ranks(4, check_synced, [address], models, LAYOUTS)


@pytest.mark.parametrize("family", slow_ones(FAMILIES, SLOW))
def test_engines_of_every_family_agree(family: str, checkpoint: Path, tmp_path: Path) -> None:
    shape = {name: read_config(checkpoint)[name] for name in SHAPE}
    config = AutoConfig.for_model(family, **shape | {"tie_word_embeddings": False} | FAMILIES[family])
    source = tmp_path / "source"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(source)
    layouts = MIXTURE_LAYOUTS if config.to_dict().get("num_experts_per_tok") else FAMILY_LAYOUTS
    models = {name: perturbed(source, tmp_path / name, seed) for seed, name in enumerate(layouts)}
    with ExitStack() as engines:
        started = {size: start_engine(source, size, tmp_path, engines) for size in (1, 2)}
        for engine in started.values():
            engine.wait_ready()
        shapes = hf_shapes(read_architecture(source))
        addresses = [Address(engine.url, engine._api_key, shapes, size) for size, engine in started.items()]
        run_ranks(4, check_synced, addresses, models, layouts)


def start_engine(folder: Path, tensor_parallel: int, tmp_path: Path, engines: ExitStack) -> Engine:
    rollout = Rollout(
        tensor_parallel=tensor_parallel, max_running_requests=64, max_total_tokens=2048, start_timeout_seconds=250
    )
    log_path = tmp_path / f"engine_{tensor_parallel}.log"
    engine = Engine(folder, rollout, "fp32", index=0, gpu_ids=[], log_path=log_path, seed=0)
    engine.start()
    engines.callback(engine.stop)
    return engine


def check_received(rank: int, world_size: int, address: Address, folder: Path) -> None:
    """The weights that SGLang made from the files are restored by a sync after they were overwritten: SGLang computes
    some of them from those it loads. Its log-probs are transformers' then."""
    actor = Actor([address], "actor", folder, LAYOUTS["tp2"], sequence=True)
    for client in actor.clients:
        (expected,) = client.weight_checksums()
        client.reset_weights()
        (corrupt,) = client.weight_checksums()
        assert all(corrupt[name] != expected[name] for name in expected)
    sync = actor.make_sync(bucket_bytes=4_000)
    sync()
    sync()
    for client in actor.clients:
        (found,) = client.weight_checksums()
        assert [name for name in expected if found[name] != expected[name]] == []
        model = hf_model(folder)
        written = [log_probs_of(model, tokens[:1], tokens[1:]) for tokens in SEQUENCES]
        for found, expected in zip(engine_log_probs(client, SEQUENCES), written, strict=True):
            assert found == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("family", slow_ones(DEEPSEEK, ("deepseek_v2",)))
def test_an_engine_of_deepseek_takes_every_weight(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # else SGLang compiles its routers for a minute
    folder = hf_folder(tmp_path / "hf", family, **DEEPSEEK[family])
    rollout = Rollout(max_running_requests=64, max_total_tokens=4096, start_timeout_seconds=180)
    engine = Engine(folder, rollout, "fp32", index=0, gpu_ids=[], log_path=tmp_path / "engine.log", seed=0)
    engine.start()
    try:
        engine.wait_ready()
        run_ranks(2, check_received, Address(engine.url, engine._api_key, hf_shapes(read_architecture(folder))), folder)
    finally:
        engine.stop()
    assert "not found in params_dict" not in (tmp_path / "engine.log").read_text()


def check_probed(rank: int, world_size: int, address: Address, folder: Path, expected: list, config: Config) -> None:
    actor = Actor([address], "actor", folder, LAYOUTS["tp2"])
    actor.push()
    check_log_probs("the probe", actor.differences(expected)[1], config, pytest.fail)
    actor.push(Corrupted)
    with pytest.raises(RuntimeError, match="the engine does not run the actor's weights"):
        check_log_probs("the probe", actor.differences(expected)[1], config, pytest.fail)


class Corrupted:
    """A hundredth of one matrix is wrong on the way."""

    def __init__(self, export: Export):
        self.export = export

    def gather(self, bucket: list, flat: torch.Tensor | None = None) -> torch.Tensor:
        flat = self.export.gather(bucket, flat)
        for name, tensor in views(bucket, flat):
            if name == "model.layers.1.mlp.down_proj.weight":
                tensor.view(-1)[::100] += 1.0
        return flat


def test_the_probe_sees_a_wrong_value(address: Address, checkpoint: Path, tmp_path: Path) -> None:
    sections = {"model": {"path": "m", "dtype": "fp32"}, "data": {"train_files": ["f"]}, "trainer": {"output_dir": "o"}}
    config = Config.model_validate(sections | {"rollout": {"sync": {"probe_tolerance": 1e-3}}})
    folder, expected = perturbed(checkpoint, tmp_path / "actor", seed=0)
    run_ranks(2, check_probed, address, folder, expected, config)


OTHERS = {
    "no tensor lm_head.weight": {"tie_word_embeddings": False},
    r"tensors are not the model's: model.layers.1.input_layernorm": {"num_hidden_layers": 1, "layer_types": None},
    r"mlp.gate_proj.weight has shape \(96, 64\), but the engine's is \(120, 64\)": {"intermediate_size": 96},
}


def check_refused(rank: int, world_size: int, address: Address, folders: dict[str, Path]) -> None:
    for message, folder in folders.items():
        actor = Actor([address], folder.name, folder, LAYOUTS["tp2"])
        with pytest.raises(ValueError, match=message):
            actor.push()


def test_an_actor_of_another_shape_is_refused_on_every_rank(address: Address, checkpoint: Path, tmp_path: Path) -> None:
    folders = {}
    for number, (message, changes) in enumerate(OTHERS.items()):
        config = AutoConfig.for_model(**read_config(checkpoint) | changes)
        folders[message] = tmp_path / str(number)
        AutoModelForCausalLM.from_config(config).save_pretrained(folders[message])
    run_ranks(2, check_refused, address, folders)

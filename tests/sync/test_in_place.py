"""Engines that read the actor's shards where they are; tests/sync/test_layouts.py has the layouts and families."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from engine_log_probs import engine_log_probs
from hf_oracle import log_probs_of
from safetensors.torch import load_file
from spawn import run_ranks
from tiny_folders import hf_folder, load
from tiny_models import hf_model
from weight_sources import handle_sender

from megappo.architecture.parameters import hf_shapes
from megappo.architecture.parsing import read_architecture
from megappo.batch.exchange import Exchange
from megappo.engines import in_place
from megappo.engines.client import EngineClient, EngineFault
from megappo.engines.process import Engine
from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout
from megappo.sync.in_place import Listing, Shards
from megappo.sync.sync import WeightSync
from megappo.weights.export import Export

SEQUENCE = [5, 6, 7, 3, 2, 9, 30, 12]
FOUR = (0, 1, 2, 3)
LAYOUTS = {
    "one": Layout((0,)),
    "tp2": Layout((0, 1), tensor=2),
    "pp2 vpp2": Layout((0, 1), pipeline=2, virtual_pipeline=2),
    "tp2 pp2": Layout(FOUR, tensor=2, pipeline=2),
    "replicas of tp2": Layout(FOUR, tensor=2),
}

NUM_NEEDED = {"one": 1, "tp2": 2, "pp2 vpp2": 2, "tp2 pp2": 4, "replicas of tp2": 2}


def assembled(listing: dict) -> dict[str, torch.Tensor]:
    """The tensors of a listing, as an engine opens it."""
    storages = [in_place._opened(*rest) for _, *rest in listing["storages"]]
    whole = {name: torch.full(shape, torch.nan) for name, (shape, _) in listing["tensors"].items()}
    for name, number, dtype, offset, shape, stride, start in listing["parts"]:
        part = torch.empty(0, dtype=getattr(torch, dtype)).set_(storages[number], offset, shape, stride)
        place = tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))
        assert whole[name][place].isnan().all(), "no element comes twice"
        whole[name][place] = part
    return whole


def check_listed(rank: int, world_size: int, folder: Path) -> None:
    expected = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    exchange = Exchange(dist.group.WORLD)
    for name, groups in build_groups(LAYOUTS, seed=0).items():
        export = Export(load(folder, groups), read_architecture(folder), groups) if groups.member else None
        tensors = exchange.share(None if export is None else export.tensors)[0]
        shards = Shards(export, tensors, exchange)
        listing = shards.listing()
        if export is not None:
            found = assembled(json.loads(json.dumps(listing.as_json())))
            assert found.keys() == expected.keys(), name
            assert all(torch.equal(found[key], expected[key]) for key in expected), name
        assert len(listing.parts) == (0 if export is None else NUM_NEEDED[name])
        assert shards.listing() is listing, "nothing has moved"
        for parameter in () if export is None or rank != 1 else export.memory:
            parameter.data = 2 * parameter
        moved = shards.listing()
        is_moved = 1 in groups.layout.ranks
        assert (moved.generation != listing.generation) == is_moved
        if is_moved and rank == 1:
            found = assembled(moved.as_json())
            assert any(torch.equal(found[key], 2 * expected[key]) for key in expected)
        exchange.share(None)


def test_every_layout_lists_all_of_every_tensor_and_tells_when_it_moves(tmp_path: Path) -> None:
    """Half of the rows that pad an odd vocabulary are on the last rank."""
    folder = hf_folder(tmp_path / "hf", "llama", tie_word_embeddings=False, vocab_size=47)
    run_ranks(4, check_listed, folder)


class Weights(torch.nn.Module):
    """Loads two matrices side by side, as an engine's model may."""

    def __init__(self) -> None:
        super().__init__()
        self.both = torch.nn.Parameter(torch.zeros(6, 3), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            start = {"a": 0, "b": 2}[name]
            self.both.data.narrow(0, start, 2).copy_(tensor.narrow(0, 1, 2))
        self.both.data.narrow(0, 4, 2).fill_(7.0)


class Computing(Weights):
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights([(name, 2 * tensor) for name, tensor in weights])


class Turning(Weights):
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.both.data.narrow(0, 0, 3).copy_(dict(weights)["a"][:3].t())


class Forgetting(Weights):
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.both.data.narrow(0, 0, 2).copy_(dict(weights)["a"][:2])


def asked(model: torch.nn.Module, request: dict) -> dict:
    answer = torch.zeros(in_place.ANSWER_BYTES, dtype=torch.uint8)
    in_place.load(model, [(json.dumps(request), answer)])
    return json.loads(bytes(answer.tolist()).rstrip(b"\0"))


@pytest.fixture
def two() -> Iterator[dict]:
    """A request of tensors a and b, [3, 3], of which a is in two parts."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    memory = torch.arange(18.0).share_memory_()
    manager, handle, size = memory.untyped_storage()._share_filename_cpu_()
    parts = [("a", 0, (2, 3), (0, 0)), ("a", 6, (1, 3), (2, 0)), ("b", 9, (3, 3), (0, 0))]
    listing = {
        "tensors": {name: [[3, 3], "float32"] for name in "ab"},
        "storages": [[handle.decode(), manager.decode(), handle.decode(), size]],
        "parts": [[name, 0, "float32", offset, shape, (3, 1), start] for name, offset, shape, start in parts],
    }
    yield {"generation": "first", "leaving": [], "listing": listing}
    del memory


def test_a_worker_copies_what_its_model_would_load(two: dict) -> None:
    model = Weights()
    assert asked(model, two) == {}
    expected = [[3, 4, 5], [6, 7, 8], [12, 13, 14], [15, 16, 17], [7, 7, 7], [7, 7, 7]]
    assert model.both.tolist() == expected
    model.both.fill_(torch.nan)
    assert asked(model, {"generation": "first", "leaving": ["a"]}) == {}
    assert model.both[:2].isnan().all() and model.both[2:].tolist() == expected[2:]
    model.both.data = torch.zeros(6, 3)
    assert asked(model, {"generation": "first", "leaving": []}) == {}
    assert model.both.tolist() == expected


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", [..., (..., slice(1, 150)), slice(5, 2799), 3, (3, 4)], ids=str)
def test_pieces_for_threads_are_the_whole_copy(cut, sent: torch.dtype, kept: torch.dtype) -> None:
    """As torch makes it: what lies in one piece, between columns of others, in a row, and one number."""
    source, expected = torch.randn(2800, 300).to(sent), torch.zeros(2800, 300, dtype=kept)
    found = expected.clone()
    pieces = list(in_place._pieces("a", found[cut], source[cut]))
    assert sum(piece.target.nbytes for piece in pieces) == expected[cut].nbytes
    if sent == kept:
        assert len(pieces) >= expected[cut].nbytes / in_place.PIECE_BYTES
    in_place._make_left(iter(pieces))
    expected[cut].copy_(source[cut])
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Computing, "it also computes (aten.mul.Tensor)"),
        (Turning, "it turns a around"),
        (Forgetting, "it does not set both once"),
    ],
)
def test_a_model_that_does_more_than_copy_refuses(model: type[Weights], why: str, two: dict) -> None:
    made = model()
    assert asked(made, two) == {"refused": why}
    assert not made.both.any(), "nothing has been touched"


def test_what_goes_wrong_in_a_worker_is_told(two: dict) -> None:
    """An exception would end the engine."""
    asked(Weights(), two)
    assert "is not that which it has listed" in asked(Weights(), {"generation": "second", "leaving": []})["failed"]
    two["listing"]["parts"].pop()
    assert "of b 6 elements are on no rank" in asked(Weights(), two)["failed"]
    assert "of b 6 elements are on no rank" in asked(Weights(), {"generation": "first", "leaving": []})["failed"]
    two["listing"]["storages"] = [["/gone", "", "/gone", 72]]
    assert "failed" in asked(Weights(), two)


def check_synced(rank: int, world_size: int, engine: tuple[str, str], folder: Path) -> None:
    """Two pipeline stages; the first owns the engine."""
    client = EngineClient(*engine, timeout=60.0) if rank == 0 else None
    groups = build_groups({"actor": Layout((0, 1), pipeline=2)}, seed=0)["actor"]
    architecture, exchange = read_architecture(folder), Exchange(dist.group.WORLD)
    export = Export(load(folder, groups), architecture, groups, needing={0})
    shards, senders = Shards(export, export.tensors, exchange), [handle_sender(client)] if client else []
    options = {"bucket_bytes": 2**20, "barrier": pytest.fail, "engines_keep": False, "shards": shards}
    sync = WeightSync(export.tensors, export, senders, [], hf_shapes(architecture), tell=pytest.fail, **options)
    model = hf_model(folder)

    def check_agreed() -> None:
        sync()
        if client is not None:
            expected = log_probs_of(model, SEQUENCE[:1], SEQUENCE[1:])
            assert engine_log_probs(client, [SEQUENCE])[0] == pytest.approx(expected, abs=1e-4)

    check_agreed()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 0.9
        for parameter in export.memory:
            parameter *= 0.9
        check_agreed()
        for parameter in model.parameters():
            parameter *= 0.9
        for parameter in export.memory:
            parameter.data = parameter * 0.9
        check_agreed()
    for sender in senders:  # as if another engine had been started in its place
        listing = Listing("elsewhere", export.tensors, [])
        sender._generation = "elsewhere"
        sender.open()
        with pytest.raises(EngineFault, match="the trainer's memory is not that which it has listed"):
            sender.read(listing, [])
        sender.close()
        sender._generation = ""
    check_agreed()
    if rank == 1:
        export.memory[0].data.view(-1)[3] = torch.nan
        with pytest.raises(FloatingPointError, match="holds values that are not finite"):
            sync()
    else:
        shards.listing()


def test_an_engine_follows_shards_that_are_trained_and_moved(engine: Engine, restored: None, checkpoint: Path) -> None:
    run_ranks(2, check_synced, (engine.url, engine._api_key), checkpoint)

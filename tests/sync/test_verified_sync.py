"""The first sync of a run is proven by a real engine's own checksums."""

from collections.abc import Callable

import pytest
import torch
from engine_log_probs import engine_log_probs
from hf_oracle import named_weights
from weight_sources import push

from megappo.engines.client import EngineClient, EngineError
from megappo.sync.proof import verified_sync
from megappo.weights.buckets import NamedTensors

SEQUENCE = [5, 6, 7, 3, 2, 9, 30, 12]
Sync = Callable[[NamedTensors], Callable[[], object]]


@pytest.fixture
def sync(client: EngineClient, engine_shapes: dict) -> Sync:
    """A sync of the weights that takes the engine's other tensors for known."""

    def of(weights: NamedTensors) -> Callable[[], object]:
        return lambda: push(client, weights, {name: engine_shapes[name] for name, _ in weights})

    return of


def test_a_whole_sync_restores_the_engine(client, hf_model, oracle, restored, sync):
    before = client.weight_checksums()
    verified_sync(sync(named_weights(hf_model)), client, barrier=lambda: None, as_loaded=True)
    assert client.weight_checksums() == before
    assert engine_log_probs(client, [SEQUENCE])[0] == pytest.approx(oracle(SEQUENCE[:1], SEQUENCE[1:]), abs=1e-4)


@pytest.mark.parametrize(
    ("left_out", "blamed"),
    [
        ("model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"),
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.norm.weight", "model.norm.weight"),
    ],
)
def test_a_weight_that_was_not_sent_is_found(client, hf_model, restored, sync, left_out, blamed):
    weights = [(name, tensor) for name, tensor in named_weights(hf_model) if name != left_out]
    with pytest.raises(EngineError, match=f"1 of the .* were not set by the first weight sync: {blamed}"):
        verified_sync(sync(weights), client, barrier=lambda: None, as_loaded=False)


def test_a_part_of_a_fused_weight_that_was_not_sent_is_found(client, hf_model, restored, sync):
    left_out = "model.layers.0.self_attn.k_proj.weight"
    weights = [(name, tensor) for name, tensor in named_weights(hf_model) if name != left_out]
    with pytest.raises(EngineError, match="differ from the folder's after the first weight sync: .*layers.0.*qkv_proj"):
        verified_sync(sync(weights), client, barrier=lambda: None, as_loaded=True)


def test_a_single_wrong_bit_is_found(client, hf_model, restored, sync):
    weights = [(name, tensor.clone()) for name, tensor in named_weights(hf_model)]
    wrong = dict(weights)["model.layers.0.mlp.up_proj.weight"].view(torch.int32)
    wrong[3, 4] ^= 1
    with pytest.raises(EngineError, match="differ from the folder's .* model.layers.0.mlp.gate_up_proj.weight"):
        verified_sync(sync(weights), client, barrier=lambda: None, as_loaded=True)


def test_a_resumed_actor_differs_from_the_folder(client, hf_model, restored, sync):
    weights = [(name, tensor * 1.5) for name, tensor in named_weights(hf_model)]
    verified_sync(sync(weights), client, barrier=lambda: None, as_loaded=False)

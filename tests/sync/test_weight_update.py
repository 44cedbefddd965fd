"""Weights handed to the real engine, judged by its log-probs against Hugging Face's."""

import os
import re
from pathlib import Path

import psutil
import pytest
import torch
from engine_log_probs import engine_log_probs
from hf_oracle import named_weights
from weight_sources import Given, handle_sender, push, specs

from megappo.config.schema import Rollout
from megappo.engines.client import SamplingParams
from megappo.engines.process import Engine
from megappo.sync.sync import WeightSync

SEQUENCE = [5, 6, 7, 3, 2, 9, 30, 12]


@pytest.mark.parametrize("bucket_bytes", [2**20, 20_000])
def test_the_engine_computes_with_the_new_weights(client, hf_model, oracle, engine_shapes, restored, bucket_bytes):
    old = oracle(SEQUENCE[:1], SEQUENCE[1:])
    client.generate([SEQUENCE], SamplingParams(4))  # fill the cache with the old weights' keys and values
    with torch.no_grad():
        for number, (_, tensor) in enumerate(named_weights(hf_model)):
            tensor.mul_(1.0 + 0.01 * (number + 1))
    weights = named_weights(hf_model)
    stats = push(client, weights, engine_shapes, bucket_bytes=bucket_bytes)
    new = oracle(SEQUENCE[:1], SEQUENCE[1:])
    assert max(abs(a - b) for a, b in zip(old, new, strict=True)) > 0.1
    assert engine_log_probs(client, [SEQUENCE])[0] == pytest.approx(new, abs=1e-4)
    [generation] = client.generate([SEQUENCE], SamplingParams(6))
    assert generation.log_probs == pytest.approx(oracle(SEQUENCE, generation.tokens), abs=1e-4)
    assert stats.bytes == sum(tensor.nbytes for _, tensor in weights)


def test_tensors_of_several_dtypes_arrive(client, hf_model, oracle, engine_shapes, restored):
    odd = hf_model.model.norm.weight
    with torch.no_grad():
        odd.copy_((odd * 1.5).bfloat16())
    weights = [(name, t.bfloat16() if t is odd or "norm" in name else t) for name, t in named_weights(hf_model)]
    push(client, weights, engine_shapes)
    assert engine_log_probs(client, [SEQUENCE])[0] == pytest.approx(oracle(SEQUENCE[:1], SEQUENCE[1:]), abs=1e-4)


def test_every_rank_of_an_engine_gets_the_weights_and_leaves_no_shared_memory(
    checkpoint, hf_model, oracle, engine_shapes, tmp_path
):
    rollout = Rollout(tensor_parallel=2, max_total_tokens=1024, start_timeout_seconds=250)
    engine = Engine(checkpoint, rollout, "fp32", index=0, gpu_ids=[], log_path=tmp_path / "engine.log", seed=0)
    engine.start()
    try:
        client = engine.wait_ready()
        with torch.no_grad():
            for _, tensor in named_weights(hf_model):
                tensor.mul_(0.9)
        push(client, named_weights(hf_model), engine_shapes, tensor_parallel=2)
        assert engine_log_probs(client, [SEQUENCE])[0] == pytest.approx(oracle(SEQUENCE[:1], SEQUENCE[1:]), abs=1e-4)
        pids = {str(process.pid) for process in psutil.Process(engine._process.pid).children(recursive=True)}
    finally:
        engine.stop()
    assert len(pids) >= 3
    assert not [path for path in Path("/dev/shm").iterdir() if pids & set(re.findall(r"\d+", path.name))]


def test_two_buckets_stay_in_shared_memory_and_no_more(client, hf_model, engine_shapes):
    weights = named_weights(hf_model)
    options = {"bucket_bytes": 20_000, "barrier": lambda: None, "engines_keep": False}
    before = _own_shared_memory()
    sync = WeightSync(specs(weights), Given(weights), [handle_sender(client)], [], engine_shapes, **options)
    for _ in range(3):
        sync()
        assert len(_own_shared_memory() - before) == 2  # of the others, some may be going


def _own_shared_memory() -> set[Path]:
    """torch names a file of shared memory after the process that makes it."""
    return set(Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))

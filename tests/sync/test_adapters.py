"""Adapters handed to a real engine that has the rest of the model, judged by Hugging Face with merged weights."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_log_probs import engine_log_probs
from hf_oracle import log_probs_of
from transformers import AutoModelForCausalLM
from weight_sources import SECTIONS, Given, specs

from megappo.config.schema import Config
from megappo.engines.client import EngineClient, EngineError, EngineFault, SamplingParams
from megappo.engines.process import Engine
from megappo.sync.build import adapter_shapes
from megappo.sync.disk import AdapterReader, AdapterWriter
from megappo.sync.ipc import AdapterHandles
from megappo.sync.sync import WeightSync
from megappo.sync.transport import Link
from megappo.weights.buckets import Bucket, NamedTensors, num_bytes

SEQUENCE = [5, 6, 7, 3, 2, 9, 30, 12]
LORA = {"rank": 4, "alpha": 6.0}


@pytest.fixture(scope="module")
def client(lora_engine: Engine) -> EngineClient:
    """It knows what it has given the engine."""
    return lora_engine.wait_ready()


@pytest.fixture(scope="module")
def lora_engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = started(checkpoint, tmp_path_factory.mktemp("engine"))
    try:
        yield engine
    finally:
        engine.stop()


def started(checkpoint: Path, folder: Path, tensor_parallel: int = 1) -> Engine:
    config = config_of(folder, tensor_parallel)
    options = {"index": 0, "gpu_ids": [], "log_path": folder / "engine.log", "seed": 0}
    engine = Engine(checkpoint, config.rollout, "fp32", **options, lora=config.actor.lora)
    engine.start()
    return engine


def config_of(folder: Path, tensor_parallel: int = 1) -> Config:
    rollout = {"tensor_parallel": tensor_parallel, "max_total_tokens": 1024, "start_timeout_seconds": 250}
    sections = {"rollout": rollout, "actor": {"lora": LORA}, "trainer": {"output_dir": str(folder)}}
    return Config.model_validate(SECTIONS | sections)


def drawn(shapes: dict[str, tuple[int, ...]], seed: int) -> NamedTensors:
    """Random adapters."""
    generator = torch.Generator().manual_seed(seed)
    found = adapter_shapes(shapes, config_of(Path("o")).actor.lora)
    return [(name, 0.3 * torch.randn(shape, generator=generator)) for name, shape in found.items()]


def merged_log_probs(checkpoint: Path, adapters: NamedTensors, tokens: list[int] = SEQUENCE) -> list[float]:
    """Log-probs of the model whose matrices have the adapters added: W + alpha / r B A."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    weights, added = dict(model.named_parameters()), dict(adapters)
    with torch.no_grad():
        for name in [name.removesuffix(".lora_A.weight") for name in added if name.endswith(".lora_A.weight")]:
            product = added[f"{name}.lora_B.weight"] @ added[f"{name}.lora_A.weight"]
            weights[f"{name}.weight"] += LORA["alpha"] / LORA["rank"] * product
    return log_probs_of(model, tokens[:1], tokens[1:])


class Changing(Given):
    """Adapters of which there are others each time."""

    def become(self, adapters: NamedTensors) -> None:
        self.weights = dict(adapters)


def sync_of(client: EngineClient, folder: Path, shapes, way: str = "ipc", tensor_parallel: int = 1) -> WeightSync:
    link = Link(config_of(folder, tensor_parallel), None, sys.maxsize, num_engines=1)
    source = Changing(drawn(shapes, 0))
    endpoints = (
        ([AdapterHandles(link, client)], []) if way == "ipc" else ([AdapterWriter(link)], [AdapterReader(link, client)])
    )
    expected = adapter_shapes(shapes, link.config.actor.lora)
    options = {"bucket_bytes": sys.maxsize, "barrier": lambda: None, "engines_keep": True}
    return WeightSync(specs(list(source.weights.items())), source, *endpoints, expected, **options)


def test_an_engine_adds_the_adapters_that_it_got_last(client, checkpoint, engine_shapes, oracle, tmp_path):
    assert engine_log_probs(client, [SEQUENCE])[0] == pytest.approx(oracle(SEQUENCE[:1], SEQUENCE[1:]), abs=1e-4)
    for way in ("ipc", "disk"):
        sync = sync_of(client, tmp_path, engine_shapes, way)
        seen = []
        for seed in (1, 2, 3, 4):
            adapters = drawn(engine_shapes, seed)
            sync.source.become(adapters)
            assert sync().bytes == sum(tensor.nbytes for _, tensor in adapters) == num_bytes(sync.tensors)
            if seed != 3:  # those get no request
                expected = merged_log_probs(checkpoint, adapters)
                assert engine_log_probs(client, [SEQUENCE])[0] == pytest.approx(expected, abs=1e-4)
                [generation] = client.generate([SEQUENCE], SamplingParams(4))
                written = merged_log_probs(checkpoint, adapters, SEQUENCE + generation.tokens)[-4:]
                assert generation.log_probs == pytest.approx(written, abs=1e-4)
                seen.append(expected)
        assert max(abs(a - b) for a, b in zip(seen[0], seen[1], strict=True)) > 0.1
        assert sync(changed=False).bytes == 0


def test_requests_for_the_model_alone_do_not_disturb_it(client, checkpoint, engine_shapes, tmp_path):
    sync = sync_of(client, tmp_path, engine_shapes)
    sync()
    client.request("GET", "/health_generate")
    expected = merged_log_probs(checkpoint, drawn(engine_shapes, 0))
    assert engine_log_probs(client, [SEQUENCE])[0] == pytest.approx(expected, abs=1e-4)


def test_responses_that_nobody_waits_for_do_not_hold_up_a_sync(client, checkpoint, engine_shapes, tmp_path):
    sync = sync_of(client, tmp_path, engine_shapes)
    sync()

    async def leave() -> None:
        async with client.open_async() as http:
            stream = client.generate_async(http, [SEQUENCE, SEQUENCE[:2]], SamplingParams(100))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 0.2)
            await stream.aclose()

    asyncio.run(leave())
    sync.source.become(adapters := drawn(engine_shapes, 5))
    sync()
    assert engine_log_probs(client, [SEQUENCE])[0] == pytest.approx(merged_log_probs(checkpoint, adapters), abs=1e-4)


@pytest.mark.slow  # tests/run/test_engine_faults.py restarts engines in runs
def test_a_restarted_engine_refuses_until_it_has_them(lora_engine, client, checkpoint, engine_shapes, tmp_path):
    sync = sync_of(client, tmp_path, engine_shapes)
    sync()
    lora_engine.restart()
    with pytest.raises(EngineError, match="never been loaded"):
        client.generate([SEQUENCE], SamplingParams(1))
    sync.forget()
    sync()
    expected = merged_log_probs(checkpoint, drawn(engine_shapes, 0))
    assert engine_log_probs(client, [SEQUENCE])[0] == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_every_rank_of_a_tensor_parallel_engine_gets_them(checkpoint, engine_shapes, tmp_path):
    engine = started(checkpoint, tmp_path, tensor_parallel=2)
    try:
        client = engine.wait_ready()
        sync = sync_of(client, tmp_path, engine_shapes, tensor_parallel=2)
        sync()
        expected = merged_log_probs(checkpoint, drawn(engine_shapes, 0))
        assert engine_log_probs(client, [SEQUENCE])[0] == pytest.approx(expected, abs=1e-4)
    finally:
        engine.stop()


class Damaging(AdapterHandles):
    """A transport that damages a bit of an adapter on the way."""

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        self.flat = flat
        super().send(bucket, flat)

    def _post(self, payloads: list[str]) -> None:
        self.flat[-1] ^= 1
        super()._post(payloads)


def test_an_adapter_that_arrives_damaged_is_named(lora_engine, client, engine_shapes, tmp_path):
    """The last test of this engine, which ends."""
    sync = sync_of(client, tmp_path, engine_shapes)
    sync.senders = [Damaging(Link(config_of(tmp_path), None, sys.maxsize, num_engines=1), client)]
    *_, last = sync.tensors
    with pytest.raises(EngineFault) as caught:
        sync()
    assert "1 value-diff" in lora_engine.explain(str(caught.value)) and last.name in lora_engine.explain("")

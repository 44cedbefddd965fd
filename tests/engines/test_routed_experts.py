"""The experts that an engine returns, against the choices of Hugging Face's routers."""

from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import orjson
import pytest
import torch
from engine_server import response
from tiny_models import hf_folder, hf_model
from tiny_shapes import GLM4_MOE, MIXTURES

from megappo.architecture.architecture import expert_number_bytes
from megappo.architecture.parsing import read_architecture
from megappo.config.schema import Rollout
from megappo.engines.client import EngineClient
from megappo.engines.generations import EngineError, EngineFault, SamplingParams, checked, generate_body
from megappo.engines.process import Engine
from megappo.engines.sglang_patches import send_few_bytes

PROMPTS = [[5, 6, 7], [11], [9, 8, 7, 6, 5, 4, 3, 2], [9, 8, 7, 6, 5, 4, 3, 2]]


def reply_of(routed: np.ndarray | None) -> dict:
    """Return SGLang's reply with one token to a prompt of three."""
    reply = response([5], [-1.0])
    reply["meta_info"] |= {"prompt_tokens": 3}
    if routed is not None:
        reply["meta_info"]["routed_experts"] = b64encode(routed.astype(np.int32).tobytes()).decode()
    return reply


def reply_of_run(routed: np.ndarray) -> bytes:
    """Return the reply of `reply_of` as an engine of a run sends it."""
    output = SimpleNamespace(routed_experts=[None, torch.from_numpy(routed.astype(np.int32))])
    send_few_bytes(None, output)
    reply = reply_of(None)
    reply["meta_info"]["routed_experts"] = output.routed_experts[1]
    return orjson.dumps(reply)


def parsed(data: bytes) -> dict:
    return EngineClient("http://127.0.0.1:1", "", 1.0)._parsed("/generate", data)


@pytest.mark.parametrize("count", [8, 255, 256, 384])
def test_choices_are_numbered_from_one_in_as_few_bytes_as_hold_them(tmp_path: Path, count: int) -> None:
    architecture = read_architecture(hf_folder(tmp_path / "hf", "glm4_moe", **GLM4_MOE | {"n_routed_experts": 8}))
    experts = replace(architecture.experts, count=count)
    routed = np.arange(3 * 4 * 2).reshape(3, 4, 2) % count
    routed[0, 1] = [count - 1, 0]
    replayed = replace(architecture, experts=experts)
    choices = checked(reply_of(routed), replayed=replayed).choices
    assert checked(parsed(reply_of_run(routed)), replayed=replayed).choices == choices
    size = 1 if count <= 256 else 2
    assert expert_number_bytes(experts.count, 2) == size and len(choices) == 3 * 3 * 2 * size
    found = np.frombuffer(choices, np.uint8 if size == 1 else np.int16).reshape(3, 3, 2)
    assert (found == (routed[:, 1:] + 1) % (256 if size == 1 else 2**15)).all(), "the first layer has no experts"
    assert not checked(reply_of(routed)).choices
    assert expert_number_bytes(256, 1) == 2, "a single 0 is an unknown expert"
    with pytest.raises(EngineError, match="--enable-return-routed-experts"):
        checked(reply_of(np.where(routed == 0, count, routed)), replayed=replayed)


@pytest.mark.parametrize(("count", "top_k"), [(8, 2), (128, 8), (256, 8)])
def test_an_engine_of_a_run_sends_about_a_byte_for_each_expert(count: int, top_k: int) -> None:
    routed = np.random.default_rng(0).integers(count, size=(500, 48, top_k))
    data = reply_of_run(routed)
    assert len(data) < 1.05 * routed.size + 500 < len(orjson.dumps(reply_of(routed))) / 5
    sent = parsed(data)["meta_info"]["routed_experts"]
    assert (np.frombuffer(sent["latin-1"].encode("latin-1"), np.uint8) == routed.flatten()).all()
    with pytest.raises(EngineFault, match="did not answer with JSON"):
        parsed(data.replace(b"latin-1", b"raw"))


@pytest.mark.parametrize("routed", [None, np.zeros((3, 4, 2))])
def test_an_engine_that_returns_none_is_an_error(tmp_path: Path, routed: np.ndarray | None) -> None:
    architecture = read_architecture(hf_folder(tmp_path / "hf", "glm4_moe", **GLM4_MOE))
    with pytest.raises(EngineError, match="--enable-return-routed-experts"):
        checked(reply_of(routed), replayed=architecture)
    assert "return_routed_experts" not in generate_body([[1]], SamplingParams(1))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "mixtral"])
def test_an_engine_returns_what_hugging_faces_routers_choose(family: str, tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", family, **MIXTURES[family], eos_token_id=None)
    architecture = read_architecture(folder)
    num_layers = architecture.num_layers - architecture.experts.num_dense_layers
    rollout = Rollout(max_total_tokens=4096, routing_replay=True)
    log = tmp_path / "engine.log"
    engine = Engine(folder, rollout, "fp32", index=0, gpu_ids=[], log_path=log, seed=0)
    engine.start()
    try:
        client = engine.wait_ready()
        generations = client.generate(PROMPTS, SamplingParams(6, replayed=architecture))
        assert not client.generate(PROMPTS[:1], SamplingParams(6))[0].choices
        bodies = [generate_body(PROMPTS[2:3], SamplingParams(6, replayed=one)) for one in (architecture, None)]
        with_experts, without = (len(client._http.post("/generate", json=body).content) for body in bodies)
        num_sent = (len(PROMPTS[2]) + 5) * architecture.num_layers * architecture.experts.top_k
        assert 0 < with_experts - without < 1.2 * num_sent + 100, "100 for the names around them"
    finally:
        engine.stop()
    model, chosen = hf_model(folder), []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate") or name.endswith("block_sparse_moe.gate"):
            module.register_forward_hook(lambda module, inputs, outputs: chosen.append(outputs[-1]))
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        chosen.clear()
        with torch.no_grad():
            model(torch.tensor([prompt + generation.tokens]))
        expected = torch.stack(chosen, dim=1)[:-1].sort().values
        assert expected.shape[1] == num_layers
        found = torch.tensor(list(generation.choices)).view(expected.shape) - 1
        assert torch.equal(found.sort().values, expected)

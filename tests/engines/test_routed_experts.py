"""The experts that an engine returns, against those that Hugging Face's routers choose."""

from base64 import b64encode
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_server import response
from tiny_models import hf_folder, hf_model
from tiny_shapes import GLM4_MOE, MIXTURES

from megappo.architecture.architecture import expert_number_bytes
from megappo.architecture.parsing import read_architecture
from megappo.config.schema import Rollout
from megappo.engines.generations import EngineError, SamplingParams, checked, generate_body
from megappo.engines.process import Engine

PROMPTS = [[5, 6, 7], [11], [9, 8, 7, 6, 5, 4, 3, 2], [9, 8, 7, 6, 5, 4, 3, 2]]


def reply_of(routed: np.ndarray | None) -> dict:
    """Return SGLang's reply with one token to a prompt of three."""
    reply = response([5], [-1.0])
    reply["meta_info"] |= {"prompt_tokens": 3}
    if routed is not None:
        reply["meta_info"]["routed_experts"] = b64encode(routed.astype(np.int32).tobytes()).decode()
    return reply


@pytest.mark.parametrize("count", [8, 255, 256, 384])
def test_choices_are_numbered_from_one_in_as_few_bytes_as_hold_them(tmp_path: Path, count: int) -> None:
    architecture = read_architecture(hf_folder(tmp_path / "hf", "glm4_moe", **GLM4_MOE | {"n_routed_experts": 8}))
    experts = replace(architecture.experts, count=count)
    routed = np.arange(3 * 4 * 2).reshape(3, 4, 2) % count
    routed[0, 1] = [count - 1, 0]
    choices = checked(reply_of(routed), replayed=replace(architecture, experts=experts)).choices
    size = 1 if count < 256 else 2
    assert expert_number_bytes(experts.count) == size and len(choices) == 3 * 3 * 2 * size
    found = np.frombuffer(choices, np.uint8 if size == 1 else np.int16).reshape(3, 3, 2)
    assert (found == routed[:, 1:] + 1).all(), "the first layer has no experts"
    assert not checked(reply_of(routed)).choices


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

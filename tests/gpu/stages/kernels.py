"""An engine with the kernels that SGLang chooses by itself, which a user's run has: its log-probs against
transformers', and the names of the kernels.

FlashAttention's are on Hopper the default; FlashInfer samples. Where they are not installed, the stage fails and
names them: the kit's other runs have Triton's attention and torch's sampling then.

python tests/gpu/stages/kernels.py
"""

import tempfile
from pathlib import Path

import torch
from common import CUDA, DEVICE, report
from engines import CHANGES, model_folder
from served import LENGTH, score, sequences, serving
from transformers import AutoModelForCausalLM

from megappo.engines.client import EngineClient
from megappo.engines.generations import SamplingParams
from megappo.runtime import platform

MODELS = ("qwen3", "gemma3_text")
"""Heads of 128 without, and of 256 with a window."""
KERNELS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend", "sampling_backend")
FLASH_ATTENTION = {90: "fa3", 100: "trtllm_mha"}
"""Compute capability, times ten -> attention that SGLang 0.5.23 chooses."""
BOUND = 0.05


def expected(folder: Path) -> torch.Tensor:
    """Return transformers' log-probs of `sequences`, [n, LENGTH - 1]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE)
    rows = []
    for tokens in torch.tensor(sequences(), device=DEVICE):
        with torch.no_grad():
            log_probs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        rows.append(log_probs.gather(1, tokens[1:, None])[:, 0].cpu())
    return torch.stack(rows)


def check(client: EngineClient, wanted: torch.Tensor) -> dict[str, float]:
    """Compare log-probs of a prompt, and of the tokens that the engine samples, with transformers' and with itself."""
    found = score(client)
    difference = float((found - wanted).abs().mean())
    assert difference < BOUND, difference
    prompts = [tokens[: LENGTH // 2] for tokens in sequences()]
    responses = client.generate(prompts, SamplingParams(LENGTH // 2))
    assert all(len(response.tokens) > 0 for response in responses)
    return {"log_prob_diff": difference}


def measure() -> dict:
    figures: dict = {"stage": "kernels"}
    with tempfile.TemporaryDirectory() as root:
        for name in MODELS:
            folder = model_folder(Path(root, name), name, **CHANGES[name])
            wanted = expected(folder)
            platform.empty_cache()
            with serving(f"kernels_{name}", folder, {}) as engine:
                client = engine.wait_ready()
                chosen = {kernel: client.server_args()[kernel] for kernel in KERNELS}
                figures |= {f"{name}_{key}": value for key, value in (chosen | check(client, wanted)).items()}
            default = FLASH_ATTENTION.get(platform.compute_capability() or 0)
            if name == MODELS[0] and default:
                assert chosen["attention_backend"] == default and chosen["sampling_backend"] == "flashinfer", chosen
    if not CUDA:
        figures["skipped"] = "the default kernels of GPUs need one"
    return figures


if __name__ == "__main__":
    report(measure)

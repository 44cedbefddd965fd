"""Shared by all tests: the `gpu` marker, helper modules of this folder (`spawn`) importable by name, and one tiny
checkpoint with one SGLang engine: an engine takes many seconds to start."""

import functools
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "support"))

from hf_oracle import log_probs_of, named_weights
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from weight_sources import push

from megappo.config.schema import Rollout
from megappo.engines.client import EngineClient
from megappo.engines.process import Engine
from megappo.runtime.megatron_setup import HARMLESS_WARNINGS, HARMLESS_WARNINGS_ON_CPU

# A shell starts what runs in its background with SIGINT ignored, and so would be all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["tiny_run", "network"]  # fixtures of whole runs


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    for message in HARMLESS_WARNINGS + HARMLESS_WARNINGS_ON_CPU:
        config.addinivalue_line("filterwarnings", f"ignore:{message}")


SHARED = ("engine", "finished", "lora_engine", "run", "of_sglang", "set_up")
"""Fixtures that take many seconds to make: all tests that use one run in the same process."""


def _slow_cases() -> re.Pattern[str]:
    lines = Path(__file__).with_name("slow_cases.txt").read_text("utf-8").splitlines()
    ids = [line for line in lines if line and not line.startswith("#")]
    return re.compile("|".join(re.escape(one).replace(r"\*", ".*") for one in ids))


SLOW_CASES = _slow_cases()


def pytest_itemcollected(item: pytest.Item) -> None:
    # Only this hook: pytest-xdist reads the groups before any other hook gets the items.
    if SLOW_CASES.fullmatch(item.nodeid):
        item.add_marker(pytest.mark.slow)
    for name in SHARED:
        if name in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group(name))
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a random Qwen2 with tied embeddings; far from uniform, and it never ends by itself."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=48,
        hidden_size=64,
        intermediate_size=120,  # no multiple of 32, to which SGLang pads on a CPU
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("qwen2")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def hf_model(checkpoint: Path) -> torch.nn.Module:
    """The oracle: Hugging Face's model of the same weights, fp32."""
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture
def oracle(hf_model: torch.nn.Module) -> Callable[..., list[float]]:
    """(prompt, response, temperature) -> log-probs of the response, of the checkpoint's weights."""
    return functools.partial(log_probs_of, hf_model)


@pytest.fixture(scope="session")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A running engine, which tests must not crash."""
    log_path = tmp_path_factory.mktemp("engine") / "engine.log"
    debug_log = {"log_level": "debug"}  # for the test of the log's content
    rollout = Rollout(max_running_requests=64, max_total_tokens=4096, start_timeout_seconds=180, server_args=debug_log)
    engine = Engine(checkpoint, rollout, "fp32", index=0, gpu_ids=[], log_path=log_path, seed=0)
    engine.start()
    try:
        engine.wait_ready()
        yield engine
    finally:
        engine.stop()


@pytest.fixture(scope="session")
def client(engine: Engine) -> EngineClient:
    """The client of the shared engine."""
    return engine.wait_ready()


@pytest.fixture(scope="session")
def engine_shapes(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    """The weights the shared engine takes."""
    return {name: tuple(tensor.shape) for name, tensor in load_file(checkpoint / "model.safetensors").items()}


@pytest.fixture
def restored(
    client: EngineClient, hf_model: torch.nn.Module, engine_shapes: dict[str, tuple[int, ...]]
) -> Iterator[None]:
    """Gives the engine its checkpoint's weights back afterwards: other tests rely on them."""
    original = [(name, tensor.clone()) for name, tensor in named_weights(hf_model)]
    yield
    push(client, original, engine_shapes)

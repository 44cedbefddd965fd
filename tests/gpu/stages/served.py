"""An engine without a run, for the stages that need one."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common import sized
from engine_log_probs import engine_log_probs
from engines import VOCABULARY
from runs import MEMORY_SHARE, output_folder

from megappo.config.model_sections import Lora
from megappo.config.schema import Rollout
from megappo.engines.client import EngineClient
from megappo.engines.process import Engine
from megappo.runtime import platform

NUM_SEQUENCES, LENGTH = sized((16, 512), (3, 20))
DTYPE = sized("bf16", "fp32")


@contextmanager
def serving(
    name: str, folder: Path, arguments: dict[str, Any], lora: Lora | None = None, *, gpus: int = 1
) -> Iterator[Engine]:
    """While the block runs, an engine starts and serves the folder; its log is NAME.log in the stages' folder.

    Args:
        arguments: SGLang's.
        lora: configuration of the adapters that it will get.
        gpus: over which its weights are divided; the same number of ranks on a CPU.
    """
    rollout = Rollout(
        tensor_parallel=gpus,
        max_running_requests=NUM_SEQUENCES,
        max_total_tokens=4 * NUM_SEQUENCES * LENGTH,
        mem_fraction_static=float(MEMORY_SHARE or 0.3),
        server_args=arguments,
    )
    log = output_folder("engines") / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    ids = platform.gpu_ids(list(range(gpus)))
    engine = Engine(folder, rollout, DTYPE, index=0, gpu_ids=ids, log_path=log, seed=0, lora=lora)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def sequences() -> list[list[int]]:
    """Return the same random tokens on every call."""
    numbers = random.Random(0)
    return [[numbers.randrange(VOCABULARY) for _ in range(LENGTH)] for _ in range(NUM_SEQUENCES)]


def score(client: EngineClient) -> torch.Tensor:
    """Return the engine's log-probs of `sequences`, [n, LENGTH - 1], computed without cached tokens."""
    client.flush_cache()
    return torch.tensor(engine_log_probs(client, sequences()))

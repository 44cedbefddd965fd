"""Bytes of weights, gradients and optimizer states, against the bytes of real models, and a published table."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from spawn import run_ranks
from tiny_shapes import CHANGES, LONG_ROPE, SHAPE, architecture_of

from megappo.architecture.parameters import StageSize, stage_sizes
from megappo.architecture.parsing import read_architecture
from megappo.config.model_sections import Lora, Optim
from megappo.config.sections import Model, Parallel
from megappo.config.values import ParameterGroup
from megappo.lab.estimate.placed_model import optimizer_bytes, state_bytes
from megappo.models.gpt import build_model
from megappo.models.heads import value_head
from megappo.models.train_engine import TrainedEngine
from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout

LARGER = {"vocab_size": 1000, "hidden_size": 128, "intermediate_size": 384}  # so that padding does not count
LARGER_ROPE = {"phi3": {"rope_parameters": LONG_ROPE | dict.fromkeys(("short_factor", "long_factor"), [1.5] * 8)}}


class Case(NamedTuple):
    model_type: str
    sizes: dict[str, int]
    distributed: bool
    dtype: str = "bf16"
    lora: Lora | None = None
    frozen: tuple[ParameterGroup, ...] = ()
    compact: dict[str, object] = {}


CASES = [
    Case("qwen2", {}, True),
    Case("qwen2", {}, True, "fp32"),
    Case("qwen2", {"tensor": 2}, False),
    Case("qwen2", {"tensor": 2}, True),
    Case("qwen2", {"pipeline": 2}, True, "fp32"),
    Case("qwen2", {"tensor": 2}, True, lora=Lora(rank=32)),
    Case("qwen2", {}, False, "fp32", lora=Lora(rank=32, target_modules=("o_proj", "up_proj"))),
    Case("qwen2", {"pipeline": 2, "virtual_pipeline": 2}, True),
    Case("qwen2", {"context": 2, "tensor": 2}, True),
    Case("glm4", {"tensor": 2}, True),
    Case("gemma3_text", {"tensor": 2}, False),
    Case("granite", {"pipeline": 2}, True),
    Case("olmo3", {"tensor": 2}, True),
    Case("phi3", {"tensor": 2}, True, "fp32"),
    Case("gemma4_text", {"tensor": 2}, True),
    Case("gpt_oss", {"tensor": 2, "expert": 2}, True),
    Case("qwen3_moe", {"expert": 2}, True),
    Case("qwen3_moe", {"expert": 4}, False, "fp32"),
    Case("qwen3_moe", {"tensor": 2, "expert": 2, "expert_tensor": 2}, True),
    Case("deepseek_v3", {"expert": 2}, True),
    Case("deepseek_v3", {"tensor": 2, "pipeline": 2}, True),
    Case("qwen2", {"pipeline": 2}, True, frozen=("attention",)),
    Case("qwen2", {"tensor": 2}, False, "fp32", frozen=("embedding", "mlp")),
    Case("qwen3_moe", {"expert": 2}, True, frozen=("attention",)),
    Case("deepseek_v3", {"tensor": 2, "pipeline": 2}, True, frozen=("embedding", "attention", "mlp")),
    Case("qwen2", {"tensor": 2}, True, compact={"moments_dtype": "bf16", "offload_fraction": 1}),
    Case("qwen2", {}, True, "fp32", compact={"moments_dtype": "bf16"}),
    Case("qwen3_moe", {"expert": 2}, True, compact={"offload_fraction": 1}),
]


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Address -> bytes of the memory behind tensors."""
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def optimizer_tensors(engine: TrainedEngine) -> Iterator[torch.Tensor]:
    for part in engine.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value) and value.dim())


def measured(engine: TrainedEngine) -> dict[str, int]:
    weights = storages(parameter for chunk in engine.chunks for parameter in chunk.parameters())
    buffers = [buffer for runner in engine.wrapped_chunks for buffer in runner.buffers + runner.expert_parallel_buffers]
    rest = storages(optimizer_tensors(engine))
    return {
        "weights": sum(weights.values()),
        "gradients": sum(storages(buffer.grad_data for buffer in buffers).values()),
        "optimizer": sum(size for address, size in rest.items() if address not in weights) - engine.host_bytes,
        "on host": engine.host_bytes,
    }


def check_bytes(rank: int, world_size: int, folder: Path) -> None:
    layouts = {str(i): Layout(tuple(range(4)), **case.sizes) for i, case in enumerate(CASES)}
    groups = build_groups(layouts, seed=0)
    for case, (name, layout) in zip(CASES, layouts.items(), strict=True):
        architecture = (
            read_architecture(folder / case.model_type, "value").with_lora(case.lora).with_frozen(case.frozen)
        )
        parallel = Parallel(**case.sizes, sequence=layout.tensor > 1)
        model = Model(path=".", dtype=case.dtype)
        chunks = build_model(architecture, model, parallel, groups[name], recompute="none", trained=True)
        optim = Optim(distributed=case.distributed, **case.compact)
        engine = TrainedEngine(chunks, groups[name], value_head(), 64, optim, 10)
        stage = groups[name].collection.pp.rank()
        sizes = [stage_sizes(architecture, parallel, trained=trained)[stage] for trained in (False, True)]
        expected = state_bytes(*sizes, layout, case.dtype, optim)
        expected["on host"] = optim.offload_fraction * optimizer_bytes(sizes[1], layout, case.dtype, optim)
        assert measured(engine) == pytest.approx(expected, rel=0.02), case


def test_as_many_as_are_allocated(tmp_path: Path) -> None:
    for model_type in {case.model_type for case in CASES}:
        (tmp_path / model_type).mkdir()
        named = {"architectures": [architecture_of(model_type)], "rms_norm_eps": 1e-6}
        shape = SHAPE | CHANGES.get(model_type, {}) | LARGER | LARGER_ROPE.get(model_type, {}) | named
        (tmp_path / model_type / "config.json").write_text(json.dumps(shape))
    run_ranks(4, check_bytes, tmp_path)


@pytest.mark.parametrize(
    ("dtype", "distributed", "of_all", "of_share"),
    [("bf16", False, 18, 0), ("fp32", False, 16, 0), ("bf16", True, 6, 12), ("fp32", True, 8, 8)],
)
def test_published_bytes_per_parameter(dtype: str, distributed: bool, of_all: int, of_share: int) -> None:
    """Megatron Core's developer guide, "Distributed Optimizer": 18 or 6 + 12/d, 16 or 8 + 8/d."""
    size, layout = StageSize(7_500_000_000, 0), Layout(tuple(range(64)))
    found = state_bytes(size, size, layout, dtype, Optim(distributed=distributed))
    assert sum(found.values()) / sum(size) == pytest.approx(of_all + of_share / 64)

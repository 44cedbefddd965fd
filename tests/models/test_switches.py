"""The table of what makes passes faster: it alone decides, and all that it decides is done."""

import ast
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from tiny_shapes import PHI3, QWEN2, QWEN3_5, QWEN3_MOE, V3

from megappo.architecture.architecture import Architecture
from megappo.architecture.parsing import parse
from megappo.architecture.switches import LAYERS, OWN, REDUCTION, SwitchContext, decide, decisions, te_fault
from megappo.config.schema import Model
from megappo.config.sections import Parallel
from megappo.models.megatron_config import transformer_config

MEGAPPO = Path(__file__).parents[2] / "megappo"
TABLE = MEGAPPO / "architecture" / "switches.py"
NAMES = {*LAYERS, *OWN, *REDUCTION}
GENERATED, OF_DDP = set(LAYERS), set(REDUCTION)
"""Switches that transformer_config and data_parallel take over, whatever their values."""


def architecture(**changes: object) -> Architecture:
    return parse(QWEN2 | {"head_dim": 64} | changes, Path("config.json"))


def setting(**changes: object) -> SwitchContext:
    on_gpu = SwitchContext(
        architecture(), Parallel(), data=1, dtype="bf16", is_trained=True, capability=90, has_te=True
    )
    return replace(on_gpu, **changes)


def is_read(node: ast.AST) -> bool:
    """The node is `"NAME" in ....switches`."""
    if not (isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In) and isinstance(node.left, ast.Constant)):
        return False
    return ast.unparse(node.comparators[0]).endswith("switches")


def named(tree: ast.AST) -> Iterator[str]:
    """Names that a file sets: keyword arguments, keys of dictionaries, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword):
            yield node.arg
        elif isinstance(node, ast.Dict):
            yield from (key.value for key in node.keys if isinstance(key, ast.Constant))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def test_every_switch_is_read_and_none_is_set_elsewhere() -> None:
    trees = {path: ast.parse(path.read_text("utf-8")) for path in MEGAPPO.rglob("*.py") if path != TABLE}
    read = {node.left.value for tree in trees.values() for node in ast.walk(tree) if is_read(node)}
    assert read == NAMES - GENERATED - OF_DDP
    found = {str(path): both for path, tree in trees.items() if (both := NAMES & set(named(tree)))}
    assert not found, "set elsewhere than in the table"
    assert {field.name for field in fields(TransformerConfig)} >= GENERATED
    assert {field.name for field in fields(DistributedDataParallelConfig)} >= OF_DDP


@pytest.mark.parametrize("on", [frozenset(), frozenset({"use_te_activation_func"})])
def test_layers_are_described_as_in_the_table(on: frozenset[str]) -> None:
    config = transformer_config(architecture(), Model(path="m"), Parallel(), "none", on)
    assert {name for name in GENERATED if getattr(config, name)} == on


MIXTURE = architecture(**QWEN3_MOE)
LINEAR = architecture(**QWEN3_5, architectures=["Qwen3_5ForCausalLM"])
SCALED_PART = architecture(**PHI3, head_dim=8, architectures=["Phi3ForCausalLM"])
GROUPED = {"moe_grouped_gemm", "moe_permute_fusion"}
ON_GPU = {"apply_rope_fusion", "bias_activation_fusion", "gradient_accumulation_fusion", "pinned_copies"}
TORCH = {"use_te_activation_func", "pinned_copies"}


@pytest.mark.parametrize(
    ("changes", "on"),
    [
        ({}, ON_GPU),
        ({"capability": None, "has_te": False}, {"use_te_activation_func"}),
        ({"has_te": False}, TORCH | {"varlen_attn"}),
        ({"has_te": False, "has_varlen": False}, TORCH),
        ({"has_te": False, "dtype": "fp32"}, TORCH),
        ({"has_te": False, "architecture": architecture(head_dim=36)}, TORCH),
        ({"has_te": False, "architecture": architecture(**V3, head_dim=V3["qk_rope_head_dim"])}, TORCH),
        ({"has_te": False, "parallel": Parallel(context=2)}, TORCH | {"overlap_grad_reduce"}),
        ({"architecture": MIXTURE}, ON_GPU | GROUPED),
        (
            {"architecture": MIXTURE, "parallel": Parallel(expert_tensor=2)},
            ON_GPU | {"moe_permute_fusion"},
        ),
        ({"architecture": MIXTURE, "has_te": False}, TORCH | {"varlen_attn"}),
        ({"architecture": LINEAR, "has_te": False}, TORCH | {"varlen_attn"}),
        ({"architecture": LINEAR, "has_fla": True}, ON_GPU | {"delta_rule_kernel"}),
        ({"data": 2}, ON_GPU | {"overlap_grad_reduce"}),
        ({"data": 2, "is_trained": False}, ON_GPU - {"gradient_accumulation_fusion"}),
        ({"data": 2, "capability": None, "has_te": False}, {"use_te_activation_func"}),
        (
            {"architecture": architecture(**V3, head_dim=V3["qk_rope_head_dim"])},
            (ON_GPU | GROUPED) - {"apply_rope_fusion"},
        ),
        ({"architecture": SCALED_PART}, ON_GPU - {"apply_rope_fusion"}),
        ({"parallel": Parallel(pipeline=2)}, ON_GPU | {"known_shapes"}),
        ({"parallel": Parallel(pipeline=2, virtual_pipeline=2)}, ON_GPU),
    ],
)
def test_what_is_on(changes: dict, on: set[str]) -> None:
    assert decide(setting(**changes)) == on
    reported = {one.name: one for one in decisions(setting(**changes))}
    assert {name for name, one in reported.items() if one.is_on} == on
    assert all(one.reason for one in reported.values())


H100, B200 = 90, 100


@pytest.mark.parametrize(
    ("capability", "dtype", "changes", "fault"),
    [
        (None, "fp32", {}, ""),
        (H100, "bf16", {}, ""),
        (H100, "bf16", {"head_dim": 256}, ""),
        (H100, "fp32", {}, "attention of packed rows in fp32"),
        (80, "bf16", {}, "attention of packed rows on GPUs of compute capability 8.0"),
        (89, "bf16", {}, "attention of packed rows on GPUs of compute capability 8.9"),
        (120, "bf16", {}, "attention of packed rows on GPUs of compute capability 12.0"),
        (B200, "bf16", {"head_dim": 128}, ""),
        (
            B200,
            "bf16",
            {"head_dim": 256},
            "attention of packed rows with heads of 256 on GPUs of compute capability 10.0",
        ),
        (B200, "bf16", V3 | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}, ""),
    ],
)
def test_where_transformer_engine_has_no_attention_of_packs(
    capability: int | None, dtype: str, changes: dict, fault: str
) -> None:
    assert te_fault(architecture(**changes), Parallel(), dtype, capability) == fault


def test_an_absent_kernel_is_reported_with_its_reason() -> None:
    reported = {one.name: one.reason for one in decisions(setting(has_te=False))}
    assert "torch's, not TransformerEngine's" in reported["apply_rope_fusion"]
    assert "known_shapes" not in reported, "there are no stages to which it matters"

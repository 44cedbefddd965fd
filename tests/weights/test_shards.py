"""A Megatron parameter is put together, against Megatron's order written out as plain loops."""

from pathlib import Path

import torch
from tiny_folders import SHAPE

from megappo.architecture.parameters import Parameter, by_name, list_parameters
from megappo.architecture.parsing import parse
from megappo.weights.shards import decompose

HEADS, KV_HEADS, HEAD = 4, 2, 16
ARCHITECTURE = parse({"architectures": ["Qwen2ForCausalLM"], "rms_norm_eps": 1e-6, **SHAPE}, Path("config.json"))


def loop_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The query heads of a KV head, its key head, its value head; then the next KV head's."""
    rows = []
    per_kv = HEADS // KV_HEADS
    for kv in range(KV_HEADS):
        for head in range(kv * per_kv, (kv + 1) * per_kv):
            rows += [q[head * HEAD + i] for i in range(HEAD)]
        rows += [k[kv * HEAD + i] for i in range(HEAD)]
        rows += [v[kv * HEAD + i] for i in range(HEAD)]
    return torch.stack(rows)


def filled(pieces: list[torch.Tensor], parameter: Parameter) -> torch.Tensor:
    """The parameter after every piece was copied into the view that is its place."""
    tensor = torch.full(parameter.shard_shape, torch.nan)
    parts = decompose(tensor, parameter)
    for piece, part in zip(pieces, parts.values(), strict=True):
        part.copy_(piece.unflatten(0, part.shape[:2]))
    return tensor


def test_qkv_alternates_by_kv_head() -> None:
    table = by_name(list_parameters(ARCHITECTURE))
    for kind, width in (("weight", (32,)), ("bias", ())):
        parameter = table[f"decoder.layers.0.self_attention.linear_qkv.{kind}"]
        pieces = [torch.randn(rows, *width) for rows in (HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD)]
        tensor = filled(pieces, parameter)
        assert torch.equal(tensor, loop_qkv(*pieces))
        back = decompose(tensor, parameter)
        for piece, (name, part) in zip(pieces, back.items(), strict=True):
            assert name.endswith(kind)
            assert torch.equal(part.flatten(0, 1), piece)


def test_each_rank_has_its_half_of_gate_then_of_up() -> None:
    table = by_name(list_parameters(ARCHITECTURE, tensor=2))
    gate, up = torch.randn(48, 32), torch.randn(48, 32)
    for rank in range(2):
        rows = slice(rank * 24, (rank + 1) * 24)
        tensor = filled([gate[rows], up[rows]], table["decoder.layers.0.mlp.linear_fc1.weight"])
        assert torch.equal(tensor, torch.cat([gate[rows], up[rows]]))

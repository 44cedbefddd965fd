"""A folder that does not fit its config.json is refused, naming the tensor; what may be there besides is accepted."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from spawn import run_ranks
from tiny_folders import build, hf_folder, load, read_config
from tiny_shapes import MIXTURES

from megappo.architecture.parsing import read_architecture
from megappo.errors import ActionableError
from megappo.placement.groups import ComponentGroups, build_groups
from megappo.placement.layout import Layout
from megappo.weights.load import load_hf


def rewrite(folder: Path, changes: dict[str, torch.Tensor | None], **config: object) -> Path:
    """A copy of a folder with tensors replaced, added, or (None) removed, and config.json changed."""
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    tensors = {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}
    copy = folder.parent / f"copy-{len(list(folder.parent.iterdir()))}"
    copy.mkdir()
    save_file(tensors, copy / "model.safetensors")
    (copy / "config.json").write_text(json.dumps(read_config(folder) | config))
    return copy


def one_rank_groups() -> ComponentGroups:
    return build_groups({"model": Layout((0,))}, seed=0)["model"]


def refusals(rank: int, world_size: int, untied: Path, tied: Path) -> None:
    groups = one_rank_groups()
    bias = "model.layers.1.self_attn.k_proj.bias"
    cases = {
        "missing model.layers.1.self_attn.k_proj.bias": rewrite(untied, {bias: None}),
        "missing lm_head.weight": rewrite(untied, {"lm_head.weight": None}),
        "unknown model.layers.0.mlp.extra.weight": rewrite(untied, {"model.layers.0.mlp.extra.weight": torch.ones(2)}),
        "unknown score.weight": rewrite(untied, {"score.weight": torch.ones(1, 32)}),
        r"k_proj.bias .* has shape \[31\].* \[16\]": rewrite(untied, {bias: torch.ones(31)}),
        "missing model.layers.4.input_layernorm.weight": rewrite(untied, {}, num_hidden_layers=5),
        "unknown model.layers.3.input_layernorm.weight": rewrite(untied, {}, num_hidden_layers=3),
        r"lm_head.weight .* has shape \[91, 32\].* \[90, 32\]": rewrite(untied, {}, vocab_size=90),
        "k_proj.bias in .* holds values that are not finite": rewrite(untied, {bias: torch.ones(16) / torch.zeros(16)}),
        r"k_proj.bias in .* not finite numbers .* \(torch.int32\)": rewrite(untied, {bias: torch.ones(16).int()}),
        r"k_proj.bias in .* not finite numbers .* \(torch.float8": rewrite(
            untied, {bias: torch.ones(16).to(torch.float8_e4m3fn)}
        ),
        "lm_head.weight differs": rewrite(tied, {"lm_head.weight": torch.ones(91, 32)}),
    }
    for message, folder in cases.items():
        with pytest.raises(ActionableError, match=message):
            load(folder, groups)
    with pytest.raises(ValueError, match="nowhere"):
        load_hf(build(untied, groups), untied / "nowhere", read_architecture(untied), groups)
    with pytest.raises(ValueError, match=r"linear_fc1.weight has shape \[96, 32\] .*\[112, 32\]"):
        load_hf(build(untied, groups), untied, replace(read_architecture(untied), ffn_size=56), groups)


def accepted(rank: int, world_size: int, untied: Path, tied: Path) -> None:
    groups = one_rank_groups()
    embedding = load(tied, groups)[0].embedding.word_embeddings.weight.detach().clone()
    repeated = rewrite(
        tied, {"lm_head.weight": embedding, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    )
    assert torch.equal(load(repeated, groups)[0].embedding.word_embeddings.weight, embedding)
    score = torch.randn(1, 32)
    for folder in (untied, tied):
        (critic,) = load(rewrite(folder, {"score.weight": score, "lm_head.weight": None}), groups, head="value")
        assert torch.equal(critic.output_layer.weight, score)
        (shared,) = load(rewrite(folder, {"score.weight": score}), groups, head="policy_value")
        assert torch.equal(shared.value_head.weight, score)
    critic, shared = (build(untied, groups, head=head) for head in ("value", "policy_value"))
    drawn = []
    for seed in (1, 1, 2):
        load_hf(critic, untied, read_architecture(untied, "value"), groups, seed=seed)
        load_hf(shared, untied, read_architecture(untied, "policy_value"), groups, seed=seed)
        drawn.append(critic[0].output_layer.weight.detach().clone())
        assert torch.equal(shared[0].value_head.weight, drawn[-1])
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_folders_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    run_ranks(1, refusals, *tied_and_untied(tmp_path))


def test_repeated_tied_heads_constants_and_value_heads_are_accepted(tmp_path: Path) -> None:
    run_ranks(1, accepted, *tied_and_untied(tmp_path))


def fused_refusals(rank: int, world_size: int, fused: Path) -> None:
    groups = one_rank_groups()
    layer = "model.layers.1.mlp.experts."
    cases = {
        f"lacks {layer}down_proj, which goes with the fused": rewrite(fused, {f"{layer}down_proj": None}),
        rf"{layer}gate_up_proj .* has shape \[3, 48, 32\].* \[4, 48, 32\]": rewrite(
            fused, {f"{layer}gate_up_proj": torch.ones(3, 48, 32)}
        ),
        "missing model.layers.1.mlp.experts.0.down_proj.weight": rewrite(
            fused, {f"{layer}gate_up_proj": None, f"{layer}down_proj": None}
        ),
        "unknown model.layers.0.mlp.experts.0.up_proj.bias": rewrite(
            fused, {"model.layers.0.mlp.experts.0.up_proj.bias": torch.ones(24)}
        ),
    }
    for message, folder in cases.items():
        with pytest.raises(ActionableError, match=message):
            load(folder, groups)


def test_fused_experts_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "fused", "qwen3_moe", save_original_format=False, **MIXTURES["qwen3_moe"])
    run_ranks(1, fused_refusals, folder)


def tied_and_untied(folder: Path) -> tuple[Path, Path]:
    return tuple(
        hf_folder(folder / name, "qwen2", tie_word_embeddings=name == "tied", head_dim=8) for name in ("untied", "tied")
    )

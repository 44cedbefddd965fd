"""Hugging Face -> Megatron -> Hugging Face is bit-equal in every layout; the oracle is the folder's own files."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_shapes
import torch
import transformers
from safetensors.torch import load_file, save_file
from slow import slow_ones
from spawn import run_ranks
from tiny_folders import hf_folder, load
from tiny_models import move_buffers
from tiny_shapes import CHANGES, GPT_OSS, VARIANTS
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megappo.architecture.parsing import read_architecture
from megappo.config.config_error import ConfigError
from megappo.errors import ActionableError
from megappo.lab.estimate.seconds import num_exported
from megappo.models.gpt import ModelChunks
from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout
from megappo.weights.export import Export
from megappo.weights.hf_folder import fuse_bucket
from megappo.weights.load import folder_shapes, load_hf

RANKS = (0, 1, 2, 3)
LAYOUTS = {
    "TP1xDP4": Layout(RANKS),
    "TP2xDP2": Layout(RANKS, tensor=2),
    "PP2xDP2": Layout(RANKS, pipeline=2),
    "PP4": Layout(RANKS, pipeline=4),
    "TP2xPP2": Layout(RANKS, tensor=2, pipeline=2),
    "PP2xVPP2xDP2": Layout(RANKS, pipeline=2, virtual_pipeline=2),
    "TP2xPP2xVPP2": Layout(RANKS, tensor=2, pipeline=2, virtual_pipeline=2),
}
EXPERT_LAYOUTS = {
    "TP1xDP4": Layout(RANKS),
    "TP2xDP2": Layout(RANKS, tensor=2),
    "EP2xDP4": Layout(RANKS, expert=2),
    "EP4": Layout(RANKS, expert=4),
    "TP2xEP2": Layout(RANKS, tensor=2, expert=2),
    "TP2xEP4": Layout(RANKS, tensor=2, expert=4),
    "PP2xEP2": Layout(RANKS, pipeline=2, expert=2),
    "TP2xPP2xEP2": Layout(RANKS, tensor=2, pipeline=2, expert=2),
    "TP2xETP2": Layout(RANKS, tensor=2, expert_tensor=2),
    "EP2xETP2": Layout(RANKS, expert=2, expert_tensor=2),
    "TP2xETP4": Layout(RANKS, tensor=2, expert_tensor=4),
    "TP2xPP2xETP2": Layout(RANKS, tensor=2, pipeline=2, expert_tensor=2),
}
MIXTURES = tiny_shapes.MIXTURES | {
    "deepseek_v2": tiny_shapes.MIXTURES["deepseek_v2"] | {"q_lora_rank": None, "first_k_dense_replace": 0}
}
WHOLE = ("qwen3_moe", "deepseek_v3")
"""Families that take every layout; the others these, in which each way of cutting is."""
SHOWN_MIXTURES = {*WHOLE, "mixtral", "qwen2_moe", "gpt_oss"}
"""Each name and format of experts; the others have the format of DeepSeek-V3 or Qwen2-MoE."""
OTHERS_LAYOUTS = ("TP2xEP4", "TP2xPP2xEP2", "TP2xPP2xETP2", "EP2xETP2")
UNEVEN = {
    "PP2xDP2": (1, 4),
    "PP4": (1, 2, 1, 1),
    "TP2xPP2": (3, 2),
    "PP2xVPP2xDP2": (1, 1, 2, 1),
    "TP2xPP2xVPP2": (2, 1, 1, 1),
}
"""Layers of each chunk, of a model of five."""
FAMILIES = {False: ("qwen2", "qwen3", "phi3"), True: ("qwen2", "llama", "mistral")}
"""With an output layer of their own, and without."""
STACKED = "gpt_oss"
OTHER_FAMILIES = ("glm4", "gemma3_text", "granite", "qwen3_5_text", "seed_oss", "smollm3", "olmo3", "gemma4_text")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def parameters_of(chunks: ModelChunks) -> Iterator[tuple[tuple[int, str], torch.nn.Parameter]]:
    for index, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            yield (index, name), parameter


def check_buckets(buckets: list, limit: int) -> None:
    for bucket in buckets:
        assert len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= limit
        assert all(tensor.is_contiguous() for _, tensor in bucket)
    assert len(buckets) > 10
    assert any(len(bucket) > 1 for bucket in buckets)


def round_trips(
    rank: int,
    world_size: int,
    folders: list[Path],
    layouts: dict[str, Layout],
    splits: dict[str, tuple[int, ...]],
    fused: dict[Path, Path],
) -> None:
    """Every folder through every layout, with stages of the sizes of `splits`; `fused` are the same models, written
    otherwise, by the folder that they must come out as."""
    groups = build_groups(layouts, seed=0)
    for folder in folders:
        expected, architecture = tensors_of(folder), read_architecture(folder)
        dtype = {torch.float32: "fp32", torch.bfloat16: "bf16"}[expected["model.norm.weight"].dtype]
        for name in layouts:
            chunks = load(fused.get(folder, folder), groups[name], dtype, split=splits.get(name))
            before = {key: parameter.detach().clone() for key, parameter in parameters_of(chunks)}
            export = Export(chunks, architecture, groups[name])
            assert len(export.tensors) == num_exported(architecture), "as plan counts them"
            buckets = [fuse_bucket(architecture, bucket) for bucket in export.buckets(8_000)]
            check_buckets(buckets, 8_000)
            exported = [pair for bucket in buckets for pair in bucket]
            assert len(exported) == len(expected), (folder, name)
            for key, tensor in exported:
                assert tensor.dtype == expected[key].dtype
                assert torch.equal(tensor, expected[key]), (folder, name, key)
                tensor.zero_()  # a bucket is a copy
            assert all(torch.equal(before[key], parameter) for key, parameter in parameters_of(chunks))


@pytest.mark.parametrize("tied", [False, True])
def test_bit_equal(tmp_path: Path, tied: bool) -> None:
    changes = VARIANTS | {"phi3": VARIANTS["phi3"] | {"head_dim": 8}}  # for which it has factors of LongRoPE
    folders = [
        hf_folder(tmp_path / family, family, **changes.get(family, {}), tie_word_embeddings=tied)
        for family in FAMILIES[tied]
    ]
    folders.append(hf_folder(tmp_path / "bf16", "qwen2", torch.bfloat16, tie_word_embeddings=tied))
    assert all((folder / "model.safetensors.index.json").is_file() for folder in folders)
    assert all(("lm_head.weight" in tensors_of(folder)) != tied for folder in folders)
    run_ranks(4, round_trips, folders, LAYOUTS, {}, {}, timeout=280)


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_other_dense_families_are_bit_equal(tmp_path: Path, family: str) -> None:
    folders = [
        hf_folder(tmp_path / str(tied), family, **CHANGES[family], tie_word_embeddings=tied) for tied in (False, True)
    ]
    run_ranks(4, round_trips, folders, LAYOUTS, {}, {}, timeout=280)


VISION = {
    "qwen3_5": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32},
    "gemma4": {
        **{"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8},
    },
}


def save_text_model(family: str, whole: Path, text: Path) -> None:
    """Take the text model out of a folder as docs/models.md describes it."""
    if family == "gemma4":
        names = {"model.language_model.": "model."}
        model = transformers.Gemma4ForCausalLM.from_pretrained(whole, dtype="auto", key_mapping=names)
        model.save_pretrained(text, save_original_format=False)
    else:
        AutoModelForCausalLM.from_pretrained(whole).save_pretrained(text)


@pytest.mark.slow
@pytest.mark.parametrize("family", VISION)
def test_a_text_model_is_taken_out_of_one_with_vision_by_transformers(family: str, tmp_path: Path) -> None:
    whole, text, plain = (tmp_path / name for name in ("whole", "text", "plain"))
    text_config = tiny_shapes.SHAPE | CHANGES[f"{family}_text"]
    config = AutoConfig.for_model(family, text_config=text_config, vision_config=VISION[family])
    model = AutoModelForImageTextToText.from_config(config)
    move_buffers(model)
    model.save_pretrained(whole)
    with pytest.raises(ConfigError, match="is of architecture .*ForConditionalGeneration"):
        read_architecture(whole)
    save_text_model(family, whole, text)
    shutil.copytree(text, plain)
    of_text = ("model.language_model.", "lm_head.")
    tensors = {name: one for name, one in tensors_of(whole).items() if name.startswith(of_text)}
    tensors = {name.replace("model.language_model.", "model."): one for name, one in tensors.items()}
    save_file(tensors, plain / "model.safetensors")
    run_ranks(4, round_trips, [plain], {"TP2xPP2": LAYOUTS["TP2xPP2"]}, {}, {plain: text})


@pytest.mark.parametrize("family", slow_ones(MIXTURES, MIXTURES.keys() - SHOWN_MIXTURES))
def test_mixtures_of_experts_are_bit_equal_from_either_format(tmp_path: Path, family: str) -> None:
    per_expert, bf16, fused = (tmp_path / name for name in ("per_expert", "bf16", "fused"))
    hf_folder(per_expert, family, **MIXTURES[family])
    hf_folder(bf16, family, torch.bfloat16, **MIXTURES[family])
    hf_folder(fused, family, save_original_format=False, **MIXTURES[family])
    assert any(name.endswith("experts.gate_up_proj") for name in tensors_of(fused))
    layouts = {name: EXPERT_LAYOUTS[name] for name in (EXPERT_LAYOUTS if family in WHOLE else OTHERS_LAYOUTS)}
    run_ranks(4, round_trips, [per_expert, bf16], layouts, {}, {}, timeout=280)
    run_ranks(4, round_trips, [per_expert], layouts, {}, {per_expert: fused}, timeout=280)


def write_mxfp4(folder: Path, target: Path) -> None:
    """Write the model as published ones are, with other experts, and those dequantized by transformers to `folder`."""
    generator, plain, quantized = torch.Generator().manual_seed(0), tensors_of(folder), {}
    stacks = [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]
    for name in stacks:
        count, into, out = plain[name].shape
        blocks = torch.randint(256, (count, out, into // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(110, 135, blocks.shape[:-1], dtype=torch.uint8, generator=generator)
        quantized |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales)
    plain = {name: tensor.bfloat16() for name, tensor in plain.items()}  # transformers keeps norms in fp32
    shutil.copytree(folder, target)
    others = {name: tensor for name, tensor in plain.items() if name not in stacks}
    for path, tensors in ((folder, plain), (target, others | quantized)):
        for file in path.glob("model*"):
            file.unlink()
        save_file(tensors, path / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))


@pytest.mark.slow
def test_stacks_of_experts_are_bit_equal_and_read_from_mxfp4_as_transformers_does(tmp_path: Path) -> None:
    fp32 = hf_folder(tmp_path / "fp32", STACKED, **GPT_OSS)
    bf16 = hf_folder(tmp_path / "bf16", STACKED, torch.bfloat16, **GPT_OSS | {"intermediate_size": 64})
    write_mxfp4(bf16, tmp_path / "mxfp4")
    layouts = {name: EXPERT_LAYOUTS[name] for name in ("TP2xEP4", "TP2xPP2xEP2")}
    run_ranks(4, round_trips, [fp32, bf16], layouts, {}, {bf16: tmp_path / "mxfp4"}, timeout=280)
    for folder in (fp32, bf16):
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors_of(folder).items()}
        assert folder_shapes(folder, read_architecture(folder)) == shapes, "as engines load them"


@pytest.mark.parametrize("tied", [False, True])
def test_bit_equal_with_stages_of_different_sizes(tmp_path: Path, tied: bool) -> None:
    folder = hf_folder(tmp_path / "mistral", "mistral", num_hidden_layers=5, tie_word_embeddings=tied)
    run_ranks(4, round_trips, [folder], {name: LAYOUTS[name] for name in UNEVEN}, UNEVEN, {})


def shared_backbone(rank: int, world_size: int, folder: Path) -> None:
    """With its value head it is the folder's tensors and score.weight; without, the folder's alone."""
    groups = build_groups(LAYOUTS, seed=0)
    architecture, expected = read_architecture(folder), tensors_of(folder)
    for name in ("TP1xDP4", "TP2xPP2", "TP2xPP2xVPP2"):
        chunks = load(folder, groups[name], head="policy_value")
        language_model, whole = (
            {
                key: tensor
                for bucket in Export(chunks, architecture.with_head(head), groups[name]).buckets(8_000)
                for key, tensor in bucket
            }
            for head in ("policy", "policy_value")
        )
        assert 0.5 / 33 < whole.pop("score.weight").std() < 2 / 33
        for found in (language_model, whole):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], expected[key]) for key in expected)
        chunks[-1].third_head = torch.nn.Linear(2, 2)
        with pytest.raises(ValueError, match="parameters third_head.bias, third_head.weight"):
            next(Export(chunks, architecture, groups[name]).buckets(8_000))
        if chunks[-1].post_process:
            with pytest.raises(ValueError, match="parameters third_head.bias, third_head.weight, value_head.weight"):
                load_hf(chunks, folder, architecture, groups[name])


@pytest.mark.parametrize("tied", [False, True])
def test_value_head_of_a_shared_backbone_is_no_part_of_the_language_model(tmp_path: Path, tied: bool) -> None:
    run_ranks(4, shared_backbone, hf_folder(tmp_path / "qwen2", "qwen2", tie_word_embeddings=tied))


def values_of_critic(rank: int, world_size: int, folder: Path) -> None:
    groups = build_groups(LAYOUTS, seed=0)
    expected = tensors_of(folder)
    heads = []
    for name in ("TP1xDP4", "TP2xPP2"):
        chunks = load(folder, groups[name], head="value")
        buckets = Export(chunks, read_architecture(folder, "value"), groups[name]).buckets(10**6)
        exported = {key: tensor for bucket in buckets for key, tensor in bucket}
        heads.append(exported.pop("score.weight"))
        assert exported.keys() == expected.keys() - {"lm_head.weight"}
        assert all(torch.equal(exported[key], expected[key]) for key in exported)
    assert heads[0].shape == (1, 32)
    assert torch.equal(*heads)
    assert 0.5 / 33 < heads[0].std() < 2 / 33


def test_critic_has_one_value_head_in_every_layout(tmp_path: Path) -> None:
    run_ranks(4, values_of_critic, hf_folder(tmp_path / "qwen2", "qwen2", tie_word_embeddings=False))


def inseparable(rank: int, world_size: int, folder: Path) -> None:
    groups = build_groups({"PP2": Layout((0, 1), pipeline=2)}, seed=0)["PP2"]
    buckets = list(Export(load(folder, groups), read_architecture(folder), groups).buckets(1))
    pairs = [[name for name, _ in bucket] for bucket in buckets if len(bucket) > 1]
    attentions = [f"model.layers.{layer}.self_attn" for layer in range(2)]
    assert pairs == [[f"{name}.q_a_proj.weight", f"{name}.kv_a_proj_with_mqa.weight"] for name in attentions]


def test_what_sglang_takes_only_together_comes_in_one_bucket(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", "deepseek_v3", **MIXTURES["deepseek_v3"])
    run_ranks(2, inseparable, folder)


def further_layers(rank: int, world_size: int, folder: Path) -> None:
    groups = build_groups({"one": Layout((0,))}, seed=0)["one"]
    architecture, expected = read_architecture(folder), tensors_of(folder)
    further = {"model.layers.2.eh_proj.weight": torch.ones(32, 64), "model.layers.2.mlp.up_proj.weight": torch.ones(3)}
    save_file(further, folder / "further.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(further, "further.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    chunks = load(folder, groups)
    exported = {name for bucket in Export(chunks, architecture, groups).buckets(8_000) for name, _ in bucket}
    assert exported == expected.keys()
    with pytest.raises(
        ActionableError, match="unknown model.layers.2.eh_proj.weight, model.layers.2.mlp.up_proj.weight"
    ):
        load_hf(chunks, folder, replace(architecture, num_further_layers=0), groups)


def test_layers_that_predict_further_tokens_are_left_out_where_config_json_names_them(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", "deepseek_v3", **MIXTURES["deepseek_v3"], num_nextn_predict_layers=1)
    run_ranks(1, further_layers, folder)


def padded_rows(rank: int, world_size: int, folder: Path) -> None:
    groups = build_groups({"TP2": Layout((0, 1), tensor=2)}, seed=0)["TP2"]
    embedding = load(folder, groups)[0].embedding.word_embeddings.weight
    assert embedding.shape == (46, 32)  # 91 rows, padded to 92
    expected = tensors_of(folder)["model.embed_tokens.weight"]
    assert torch.equal(embedding[:45], expected[46 * rank : 46 * rank + 45])
    last_row = torch.zeros(32) if rank == 1 else expected[45]
    assert torch.equal(embedding[45], last_row)


def test_padding_of_the_vocabulary_is_zero(tmp_path: Path) -> None:
    run_ranks(2, padded_rows, hf_folder(tmp_path / "llama", "llama"))

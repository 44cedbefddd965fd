"""Critics that start from reward models: transformers' values, whatever the head is called; and back."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from layouts import parallel_of
from safetensors.torch import load_file, save_file
from spawn import run_ranks
from tiny_folders import SHAPE
from tiny_models import move_buffers, outputs, sequences
from tiny_shapes import DEEPSEEK_V3, GPT_OSS, VARIANTS
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from megappo.architecture.model_folder import HEAD_MODULES, num_head_outputs
from megappo.config.methods import ValueSupport
from megappo.config.schema import Model
from megappo.config.sections import Parallel
from megappo.errors import ActionableError
from megappo.models.gpt import ModelChunks, build_model
from megappo.placement.groups import ComponentGroups, build_groups
from megappo.placement.layout import Layout
from megappo.weights.hf_folder import write_hf_folder
from megappo.weights.load import critic_architecture, load_hf

LAYOUTS = {
    "one": Layout((0,)),
    "tp2": Layout((0, 1), tensor=2),
    "pp2": Layout((0, 1), pipeline=2),
    "pp2 vpp2": Layout((0, 1), pipeline=2, virtual_pipeline=2),
}
AUTO = {
    "CausalLM": AutoModelForCausalLM,
    "SequenceClassification": AutoModelForSequenceClassification,
    "TokenClassification": AutoModelForTokenClassification,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES = {
    "qwen2": ("TokenClassification", {}),
    "llama": ("SequenceClassification", {}),
    "qwen3": ("TokenClassification", {}),
    "glm4": ("TokenClassification", VARIANTS["glm4"]),
    "gemma3_text": ("SequenceClassification", VARIANTS["gemma3_text"]),
    "qwen3_moe": ("TokenClassification", EXPERTS),
    "gpt_oss": ("SequenceClassification", GPT_OSS),
    "deepseek_v3": ("SequenceClassification", DEEPSEEK_V3 | {"head_dim": DEEPSEEK_V3["qk_rope_head_dim"]}),
}


def reward_model(folder: Path, family: str, task: str, num_labels: int = 1, **changes: object) -> Path:
    """A random model, every weight (its head's bias too, if it has one) away from its initial value."""
    torch.manual_seed(4)
    model = AUTO[task].from_config(AutoConfig.for_model(family, **SHAPE | changes, num_labels=num_labels))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    move_buffers(model)
    model.save_pretrained(folder)
    return folder


def renamed(source: Path, folder: Path, names: dict[str, str], **added: torch.Tensor) -> Path:
    """A copy of a folder with tensors renamed and added."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors = {names.get(name, name): tensor for name, tensor in tensors.items()}
    save_file(tensors | added, folder / "model.safetensors")
    return folder


def values(folder: Path) -> torch.Tensor:
    """transformers' hidden states through the head in the folder, [T]."""
    tensors = load_file(folder / "model.safetensors")
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    task = next(task for task in AUTO if architecture.endswith(task))
    model = AUTO[task].from_pretrained(folder).eval()
    module = next(module for module in HEAD_MODULES if f"{module}.weight" in tensors)
    bias = tensors.get(f"{module}.bias", torch.zeros(1))
    with torch.no_grad():
        hidden = torch.cat([model.model(tokens[None]).last_hidden_state[0] for tokens in sequences()])
    return (hidden @ tensors[f"{module}.weight"].T + bias)[:, 0]


def critic(folder: Path, groups: ComponentGroups, support: ValueSupport | None = None) -> ModelChunks:
    architecture = critic_architecture(folder, support, needs_head=False)
    parallel = parallel_of(groups.layout, sequence=groups.layout.tensor > 1)  # experts need it
    chunks = build_model(
        architecture,
        Model(path=str(folder), dtype="fp32"),
        parallel,
        groups,
        recompute="none",
        trained=True,
    )
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(torch.nan)
    load_hf(chunks, folder, architecture, groups)
    return chunks


def check_values(rank: int, world_size: int, folders: dict[Path, torch.Tensor], target: Path) -> None:
    """The values of every layout's critic, and what transformers reads from its export."""
    all_groups = build_groups(LAYOUTS, seed=0)
    for folder, expected in folders.items():
        for name, groups in all_groups.items():
            if not groups.member:
                continue
            model = critic(folder, groups)
            found = outputs(model, groups)
            if found is not None:
                torch.testing.assert_close(found[0, :, 0], expected, rtol=0, atol=1e-5)
            if name != "one":
                write_hf_folder(model, critic_architecture(folder), groups, folder, target / folder.name / name)


def test_values_are_transformers_in_every_layout_and_after_export(tmp_path: Path) -> None:
    folders = [reward_model(tmp_path / family, family, task, **changes) for family, (task, changes) in FAMILIES.items()]
    classifier = {f"score.{part}": f"classifier.{part}" for part in ("weight", "bias")}
    folders.append(renamed(folders[0], tmp_path / "classifier", classifier))
    language_model = reward_model(tmp_path / "lm", "qwen2", "CausalLM")
    for name, bias in (("v_head", {}), ("v_head.summary", {"v_head.summary.bias": torch.full((1,), -0.5)})):
        head = {f"{name}.weight": torch.randn(1, SHAPE["hidden_size"])}
        folders.append(renamed(language_model, tmp_path / name, {}, **head, **bias))
    expected = {folder: values(folder) for folder in folders}
    run_ranks(2, check_values, expected, tmp_path / "exported", timeout=240)
    for folder, value in expected.items():
        if folder.name == "gemma3_text":
            continue  # transformers has no class for its tokens
        for layout in ("tp2", "pp2"):
            exported = tmp_path / "exported" / folder.name / layout
            model, info = AutoModelForTokenClassification.from_pretrained(exported, output_loading_info=True)
            assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
            with torch.no_grad():
                found = torch.cat([model.eval()(tokens[None]).logits[0, :, 0] for tokens in sequences()])
            torch.testing.assert_close(found, value, rtol=0, atol=5e-6)


SUPPORTS = {"classes": ValueSupport(3, (0.0, 0.5, 1.0)), "quantiles": ValueSupport(4)}


def check_supports(rank: int, world_size: int, source: Path, target: Path) -> None:
    """A head of several outputs is drawn, exported, and read again; one of other outputs is drawn in its place."""
    for layout, groups in build_groups(LAYOUTS, seed=0).items():
        if layout == "pp2 vpp2" or not groups.member:
            continue
        for name, support in SUPPORTS.items():
            folder = target / layout / name
            chunks = critic(source, groups, support)
            if chunks[-1].post_process:
                chunks[-1].output_layer.weight.data *= 3  # away from the head that is drawn
            write_hf_folder(chunks, critic_architecture(source, support), groups, source, folder)
            found = outputs(chunks, groups)
            if found is not None and rank == groups.layout.ranks[-1]:
                torch.save(found[0], target / f"{layout} {name}.pt")
            again = critic(folder, groups, support)
            if again[-1].post_process:
                weight = chunks[-1].output_layer.weight
                assert torch.equal(again[-1].output_layer.weight, weight) and weight.std() > 0
                for other in (None, ValueSupport(support.size, (0.0, 0.1, 0.2)), ValueSupport(5)):
                    head = critic(folder, groups, other)[-1].output_layer.weight
                    assert head.isfinite().all() and not (head.shape == weight.shape and torch.equal(head, weight))


def test_heads_of_several_outputs_are_exported_for_transformers_and_read_again(tmp_path: Path) -> None:
    source = reward_model(tmp_path / "lm", "qwen2", "CausalLM")
    run_ranks(2, check_supports, source, tmp_path)
    for name, support in SUPPORTS.items():
        for layout in ("one", "tp2", "pp2"):
            folder = tmp_path / layout / name
            model, info = AutoModelForTokenClassification.from_pretrained(folder, output_loading_info=True)
            assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
            assert model.num_labels == support.size
            assert model.config.value_support == {"size": support.size, "centers": list(support.centers)}
            with torch.no_grad():
                logits = torch.cat([model.eval()(tokens[None]).logits[0] for tokens in sequences()])
            torch.testing.assert_close(torch.load(tmp_path / f"{layout} {name}.pt"), logits, rtol=0, atol=1e-5)
    folder = tmp_path / "one" / "classes"
    with pytest.raises(ActionableError, match="gives 3 numbers per token, expected 1; choose a reward model of one"):
        critic_architecture(folder)
    assert num_head_outputs(folder) == 3 and num_head_outputs(source) == 0


def test_a_bias_of_zero_is_none(tmp_path: Path) -> None:
    folder = reward_model(tmp_path / "reward", "qwen2", "TokenClassification")
    assert critic_architecture(folder).value_bias
    zero = renamed(folder, tmp_path / "zero", {}, **{"score.bias": torch.zeros(1)})
    assert not critic_architecture(zero).value_bias
    assert critic_architecture(zero).name == "Qwen2ForCausalLM"
    assert not critic_architecture(reward_model(tmp_path / "lm", "qwen2", "CausalLM")).value_bias


def test_what_gives_no_single_value_is_refused(tmp_path: Path) -> None:
    two = reward_model(tmp_path / "two", "qwen2", "TokenClassification", num_labels=2)
    with pytest.raises(ActionableError, match="value head in .* gives 2 numbers per token, expected 1"):
        critic_architecture(two)
    one = reward_model(tmp_path / "one", "qwen2", "TokenClassification")
    with pytest.raises(ActionableError, match="several value heads: score, v_head; remove all but one"):
        critic_architecture(renamed(one, tmp_path / "several", {}, **{"v_head.weight": torch.ones(1, 32)}))
    with pytest.raises(ActionableError, match="Qwen2ForTokenClassification without a head: expected score.weight"):
        critic_architecture(renamed(one, tmp_path / "none", {"score.weight": "other.weight"}))


def refuse_a_bias(rank: int, world_size: int, folder: Path) -> None:
    """A model that was built without one does not drop it."""
    groups = build_groups({"model": Layout((0,))}, seed=0)["model"]
    architecture = replace(critic_architecture(folder), value_bias=False)
    parallel, model = Parallel(), Model(path=str(folder), dtype="fp32")
    built = build_model(architecture, model, parallel, groups, recompute="none", trained=False)
    with pytest.raises(ActionableError, match="has a bias that is not zero, but the model was built without one"):
        load_hf(built, folder, architecture, groups)


def test_a_bias_is_never_dropped(tmp_path: Path) -> None:
    run_ranks(1, refuse_a_bias, reward_model(tmp_path / "reward", "qwen2", "TokenClassification"))

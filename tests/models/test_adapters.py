"""Training of adapters against Hugging Face's model, whose weights torch parametrizes, in layouts of every kind."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hf_training import assert_outputs, hf_train, shard_of
from ppo_engines import (
    HEADS,
    LENGTHS,
    Case,
    exported,
    exported_adapters,
    make_engine,
    make_loss,
    make_rows,
    with_score,
)
from published_configs import BY_FAMILY, PUBLISHED, TEXT_FAMILIES
from safetensors.torch import load_file
from saved import save_checkpoint
from shrunk_models import shrunk_folder
from slow import slow_ones
from spawn import run_ranks
from tiny_models import hf_folder
from tiny_shapes import CHANGES, EXPERTS, GPT_OSS, MIXTURES
from torch.profiler import ProfilerActivity, profile

from megappo.architecture.fit import adapter_errors
from megappo.architecture.parsing import read_architecture
from megappo.batch.exchange import Exchange
from megappo.checkpoint.metadata import read_component
from megappo.checkpoint.store import CheckpointStore
from megappo.config.model_sections import Lora
from megappo.config.sections import Parallel
from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout

LORA = Lora(rank=3, alpha=5.0)
SOME = Lora(rank=2, target_modules=("v_proj", "up_proj"))
OF_ATTENTION = Lora(rank=3, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
TWO, FOUR = (0, 1), (0, 1, 2, 3)
CASES = {
    "one rank": Case(Layout((0,)), max_tokens=9, lora=LORA),
    "one rank, some modules, full recompute": Case(Layout((0,)), recompute="full", lora=SOME),
    "tp2": Case(Layout(TWO, tensor=2), lora=LORA),
    "tp2 sp": Case(Layout(TWO, tensor=2), sequence=True, max_tokens=14, lora=LORA),
    "dp2": Case(Layout(TWO), max_tokens=12, lora=LORA),
    "cp2 tp2 sp, full recompute": Case(
        Layout(FOUR, tensor=2, context=2), sequence=True, max_tokens=20, recompute="full", lora=LORA
    ),
    "tp2 pp2 vpp2 sp": Case(
        Layout(FOUR, tensor=2, pipeline=2, virtual_pipeline=2), sequence=True, max_tokens=14, lora=LORA
    ),
    "pp2, full recompute": Case(Layout(TWO, pipeline=2), max_tokens=9, recompute="full", lora=LORA),
}


def _matches(rank: int, world_size: int, folder: Path, name: str, kind: str, expected: dict) -> None:
    case = CASES[name]
    engine = make_engine(folder, case, build_groups({kind: case.layout}, seed=0)[kind], kind)
    architecture = read_architecture(folder, HEADS[kind]).with_lora(case.lora)
    rows = make_rows(architecture.vocab_size)
    mine = shard_of(rows, case.layout)
    assert_outputs(engine, rows, mine, expected["outputs"])
    for norm in expected["grad_norms"]:
        assert engine.train_batch(rows.select(mine), make_loss(kind, rows)).grad_norm == pytest.approx(norm, rel=2e-5)
    merged, adapters = exported(engine, architecture, kind), exported_adapters(engine, architecture)
    found = adapters | {key: merged[key] for key in merged if key == "score.weight"}
    assert found.keys() == expected["parameters"].keys()
    for key, parameter in expected["parameters"].items():
        torch.testing.assert_close(found[key], parameter, rtol=0, atol=2e-5, msg=f"{key} differs")
    base = load_file(folder / "model.safetensors")
    for key in merged.keys() - {"score.weight"}:
        a, b = (adapters.get(f"{key.removesuffix('.weight')}.lora_{name}.weight") for name in "AB")
        weight = base[key] if a is None else base[key] + case.lora.alpha / case.lora.rank * b @ a
        torch.testing.assert_close(
            merged[key], weight, rtol=0, atol=0 if a is None else 1e-6, msg=f"{key} is not merged"
        )


def check(name: str, kind: str, folder: Path) -> None:
    expected = hf_train(folder, kind, None, num_steps=2, lengths=LENGTHS, lora=CASES[name].lora)
    run_ranks(len(CASES[name].layout.ranks), _matches, folder, name, kind, expected)


@pytest.mark.parametrize("name", slow_ones(CASES, ["tp2", "dp2", "pp2, full recompute"]))
def test_actor_trains_as_hugging_face_does(name: str, tmp_path: Path) -> None:
    check(name, "actor", hf_folder(tmp_path / "hf", "qwen2", tie_word_embeddings="pp2" not in name))


@pytest.mark.parametrize(("name", "kind"), [("tp2 sp", "critic"), ("tp2 sp", "shared")])
def test_value_heads_are_trained_beside_adapters(name: str, kind: str, tmp_path: Path) -> None:
    check(name, kind, with_score(hf_folder(tmp_path / "hf", "llama")))


def _moved(
    rank: int,
    world_size: int,
    folder: Path,
    checkpoint: Path,
    names: tuple[str, ...] = ("tp2 sp", "pp2, full recompute", "dp2", "tp2 sp"),
) -> None:
    """Trained adapters, saved, loaded in other layouts and trained on there."""
    store, architecture = CheckpointStore(checkpoint, 0, Exchange(dist.group.WORLD)), read_architecture(folder)
    rows, found, norms = make_rows(architecture.vocab_size), [], []
    for name in names:
        layout = CASES[name].layout
        engine = make_engine(folder, CASES[name], build_groups({"actor": layout}, seed=0)["actor"], "actor")
        mine = rows.select(shard_of(rows, layout))
        if norms:
            store.load(store.latest(), {"actor": engine})
        else:
            engine.train_batch(mine, make_loss("actor", rows))
            save_checkpoint(store, 1, {"actor": engine}, {})
        found.append(exported_adapters(engine, architecture.with_lora(LORA)))
        norms.append([engine.train_batch(mine, make_loss("actor", rows)).grad_norm for _ in range(2)])
    for moved, its_norms in zip(found[1:], norms[1:], strict=True):
        assert moved.keys() == found[0].keys() and all(torch.equal(moved[key], found[0][key]) for key in moved)
        assert its_norms == pytest.approx(norms[0], rel=2e-5)


def test_adapters_are_saved_alone_and_go_on_in_another_layout(tmp_path: Path) -> None:
    run_ranks(2, _moved, hf_folder(tmp_path / "hf", "qwen2", tie_word_embeddings=True), tmp_path / "checkpoints")
    saved = read_component(tmp_path / "checkpoints" / "step_00000001" / "actor").model
    assert saved and all(name.endswith((".a", ".b")) for name in saved)


MIXTURE_CASES = {
    "one rank": ("qwen2_moe", Case(Layout((0,)), max_tokens=9, lora=LORA)),
    "ep2": ("qwen3_moe", Case(Layout(TWO, expert=2), max_tokens=12, lora=LORA)),
    "tp2 sp": ("qwen2_moe", Case(Layout(TWO, tensor=2), sequence=True, max_tokens=14, lora=LORA)),
    "pp2": ("qwen3_moe", Case(Layout(TWO, pipeline=2), max_tokens=9, recompute="full", lora=LORA)),
    "ep2 tp2 dp2 sp": (
        "qwen2_moe",
        Case(Layout(FOUR, tensor=2, expert=2), sequence=True, max_tokens=14, recompute="full", lora=LORA),
    ),
    "ep2, some modules": ("qwen3_moe", Case(Layout(TWO, expert=2), max_tokens=12, lora=SOME)),
    "stacked, ep2 tp2 sp": ("gpt_oss", Case(Layout(TWO, tensor=2, expert=2), sequence=True, lora=OF_ATTENTION)),
    "names of the hub, ep2": ("mixtral", Case(Layout(TWO, expert=2), max_tokens=12, lora=LORA)),
    "ep2 pp2": ("qwen2_moe", Case(Layout(FOUR, pipeline=2, expert=2), max_tokens=12, lora=LORA)),
}
CASES |= {f"mixture, {name}": case for name, (_, case) in MIXTURE_CASES.items()}


@pytest.mark.parametrize("name", slow_ones(MIXTURE_CASES, MIXTURE_CASES.keys() - {"ep2 tp2 dp2 sp"}))
def test_adapters_of_experts_train_as_hugging_faces_do(name: str, tmp_path: Path) -> None:
    family, _ = MIXTURE_CASES[name]
    check(f"mixture, {name}", "actor", hf_folder(tmp_path / "hf", family, **CHANGES[family]))


ADAPTED = dict.fromkeys(TEXT_FAMILIES, LORA.target_modules) | {
    "Glm4ForCausalLM": ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj"),
    "Phi3ForCausalLM": ("o_proj", "down_proj"),
    "DeepseekV2ForCausalLM": ("gate_proj", "up_proj", "down_proj"),
    "DeepseekV3ForCausalLM": ("gate_proj", "up_proj", "down_proj"),
    **dict.fromkeys(("GptOssForCausalLM", "MiniMaxM2ForCausalLM"), ("q_proj", "k_proj", "v_proj", "o_proj")),
}
"""Matrices with adapters: all that transformers has as matrices, and that can have some."""
CASES |= {
    family: Case(Layout((0,)), max_tokens=9, lora=LORA.model_copy(update={"target_modules": modules}))
    for family, modules in ADAPTED.items()
}


@pytest.mark.slow
@pytest.mark.parametrize("family", ADAPTED)
def test_adapters_of_every_family_train_as_hugging_faces_do(family: str, tmp_path: Path) -> None:
    config, _ = PUBLISHED[BY_FAMILY[family]]
    check(family, "actor", shrunk_folder(tmp_path / "hf", config | {"torch_dtype": "float32"}))


@pytest.mark.slow
def test_adapters_of_experts_go_on_in_another_layout(tmp_path: Path) -> None:
    names = tuple(f"mixture, {name}" for name in ("ep2", "tp2 sp", "pp2", "ep2"))
    mixture = hf_folder(tmp_path / "hf", "qwen3_moe", **MIXTURES["qwen3_moe"])
    run_ranks(2, _moved, mixture, tmp_path / "checkpoints", names)


def test_adapters_without_a_place_are_refused_by_name(tmp_path: Path) -> None:
    latent = read_architecture(hf_folder(tmp_path / "latent", "deepseek_v3", **MIXTURES["deepseek_v3"]))
    [error] = adapter_errors(latent, Lora(), Parallel(), "actor")
    assert error.startswith(
        "actor.lora.target_modules: adapters cannot stand beside q_proj, k_proj, v_proj, o_proj of "
    )
    assert error.endswith("config.json: leave gate_proj, up_proj, down_proj")
    stacked = read_architecture(hf_folder(tmp_path / "stacked", "gpt_oss", **GPT_OSS))
    [error] = adapter_errors(stacked, Lora(), Parallel(), "actor")
    assert error.endswith("config.json: leave q_proj, k_proj, v_proj, o_proj")
    experts = read_architecture(hf_folder(tmp_path / "experts", "qwen3_moe", **EXPERTS))
    assert not [*adapter_errors(experts, Lora(), Parallel(expert=2), "actor")]
    cut = Parallel(tensor=2, expert_tensor=2, sequence=True)
    [error] = adapter_errors(experts, Lora(), cut, "actor")
    assert error.startswith("actor.parallel.expert_tensor 2 cuts the experts of ") and "set it to 1" in error
    assert not [*adapter_errors(experts, Lora(target_modules=("q_proj", "v_proj")), cut, "actor")]


def _multiplies_all_tokens_at_once(rank: int, world_size: int, folder: Path, name: str, kind: str) -> None:
    layout = CASES[name].layout
    engine = make_engine(folder, CASES[name], build_groups({kind: layout}, seed=0)[kind], kind)
    rows = make_rows(read_architecture(folder).vocab_size)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        engine.forward(rows)
        engine.train_batch(rows, make_loss(kind, rows))
    products = {event.name for event in profiled.events()} & {"aten::mm", "aten::bmm"}
    assert products == {"aten::mm"}, "a product for each token takes many times as long as one for all"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tp2 sp", "actor"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("one rank", "actor"), ("pp2, full recompute", "critic"))
        ),
    ],
)
def test_frozen_weights_are_multiplied_by_all_tokens_at_once(name: str, kind: str, tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", "llama")
    folder = with_score(folder) if kind == "critic" else folder
    run_ranks(len(CASES[name].layout.ranks), _multiplies_all_tokens_at_once, folder, name, kind)

"""The engine's outputs and updates against Hugging Face on one process, in every layout and cut of the batch."""

from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hf_training import Lengths, assert_outputs, hf_train, shard_of
from megatron.core.distributed import DistributedDataParallelConfig
from ppo_engines import LENGTHS, OPTIM, Case, exported, make_engine, make_loss, make_reference, make_rows, with_score
from published_configs import BY_FAMILY, OF_TEXT, PUBLISHED, TEXT_FAMILIES
from safetensors.torch import load_file
from saved import save_checkpoint
from shrunk_models import shrunk_folder
from slow import slow_ones
from spawn import run_ranks
from tiny_models import hf_folder
from tiny_shapes import DEEPSEEK_V2, DEEPSEEK_V3, EXPERTS, GLM4_MOE, GPT_OSS, MINIMAX_M2, OF_TORCH, QWEN3_NEXT, VARIANTS

from megappo.architecture.parsing import read_architecture
from megappo.batch.exchange import Exchange
from megappo.batch.rows import Rows
from megappo.checkpoint.store import CheckpointStore
from megappo.models import optimizer
from megappo.models.megatron_engine import Outputs
from megappo.models.train_engine import TrainedEngine
from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout
from megappo.weights.export import Export

TWO, FOUR = (0, 1), (0, 1, 2, 3)
CASES = {
    "one rank": Case(Layout((0,))),
    "one rank, small micro-batches": Case(Layout((0,)), max_tokens=9),
    "tp2": Case(Layout(TWO, tensor=2)),
    "tp2 sp": Case(Layout(TWO, tensor=2), sequence=True, max_tokens=14),
    "pp2": Case(Layout(TWO, pipeline=2), max_tokens=9),
    "dp2": Case(Layout(TWO)),
    "dp2, optimizer not sharded": Case(
        Layout(TWO), optim=OPTIM.model_copy(update={"distributed": False}), max_tokens=12
    ),
    "tp2 pp2, full recompute": Case(Layout(FOUR, tensor=2, pipeline=2), recompute="full"),
    "tp2 dp2 sp": Case(Layout(FOUR, tensor=2), sequence=True, max_tokens=20),
    "pp2 dp2": Case(Layout(FOUR, pipeline=2), max_tokens=10),
    "pp2 vpp2": Case(Layout(TWO, pipeline=2, virtual_pipeline=2), max_tokens=9),
    "tp2 pp2 vpp2 sp, full recompute": Case(
        Layout(FOUR, tensor=2, pipeline=2, virtual_pipeline=2), sequence=True, max_tokens=14, recompute="full"
    ),
}
UNEVEN_LENGTHS = ((1, 1), (1, 0), (2, 1), (2, 3), (4, 13), (1, 2), (30, 3), (5, 7))
"""Rows of 1, 2, 3, 5, 17, 33 tokens: shorter than the chunks of context parallelism are many, or not divisible."""
CONTEXT_CASES = {
    "cp2": Case(Layout(TWO, context=2), max_tokens=14),
    "cp2, optimizer not sharded": Case(
        Layout(TWO, context=2), optim=OPTIM.model_copy(update={"distributed": False}), max_tokens=9
    ),
    "cp3, selective recompute": Case(Layout((0, 1, 2), context=3), recompute="selective"),
    "cp2 tp2 sp": Case(Layout(FOUR, tensor=2, context=2), sequence=True, max_tokens=20),
    "cp2 tp2": Case(Layout(FOUR, tensor=2, context=2), max_tokens=9),
    "cp2 pp2, full recompute": Case(Layout(FOUR, pipeline=2, context=2), recompute="full", max_tokens=9),
    "cp2 pp2 vpp2": Case(Layout(FOUR, pipeline=2, virtual_pipeline=2, context=2), max_tokens=9),
    "cp2 dp2": Case(Layout(FOUR, context=2), max_tokens=12),
}
EXPERT_CASES = {
    "ep2": Case(Layout(TWO, expert=2)),
    "ep2, uneven micro-batches": Case(Layout(TWO, expert=2), max_tokens=9),
    "ep2, optimizer not sharded": Case(
        Layout(TWO, expert=2), optim=OPTIM.model_copy(update={"distributed": False}), max_tokens=12
    ),
    "ep2 tp2 sp": Case(Layout(TWO, tensor=2, expert=2), sequence=True),
    "ep2 tp2 dp2 sp": Case(Layout(FOUR, tensor=2, expert=2), sequence=True, max_tokens=10),
    "ep4 tp2 dp2 sp": Case(Layout(FOUR, tensor=2, expert=4), sequence=True, max_tokens=10),
    "ep2 pp2 vpp2, uneven micro-batches": Case(Layout(FOUR, pipeline=2, virtual_pipeline=2, expert=2), max_tokens=9),
    "etp2, uneven micro-batches": Case(Layout(TWO, expert_tensor=2), max_tokens=9),
    "tp2 etp2 sp": Case(Layout(TWO, tensor=2, expert_tensor=2), sequence=True, max_tokens=14),
    "tp2 dp2 ep2 etp2 sp": Case(Layout(FOUR, tensor=2, expert=2, expert_tensor=2), sequence=True, max_tokens=10),
    "ep2 etp2, optimizer not sharded": Case(
        Layout(FOUR, expert=2, expert_tensor=2), optim=OPTIM.model_copy(update={"distributed": False}), max_tokens=12
    ),
    "ep2 pp2, full recompute": Case(Layout(FOUR, pipeline=2, expert=2), recompute="full", max_tokens=9),
    "ep2 etp2 cp2 tp2 sp": Case(
        Layout(FOUR, tensor=2, context=2, expert=2, expert_tensor=2), sequence=True, max_tokens=20
    ),
    "ep2 cp2": Case(Layout(TWO, context=2, expert=2), max_tokens=14),
    "ep2 cp2 tp2 sp": Case(Layout(FOUR, tensor=2, context=2, expert=2), sequence=True, max_tokens=20),
    "ep4 cp2 dp2": Case(Layout(FOUR, context=2, expert=4), max_tokens=10),
}
DEEP_CASES = {"pp4 vpp2": Case(Layout(FOUR, pipeline=4, virtual_pipeline=2), max_tokens=9)}
LONG_CASES = {
    "cp2, long rows": Case(Layout(TWO, context=2), max_tokens=33),
    "cp2 tp2 sp, long rows": Case(Layout(FOUR, tensor=2, context=2), sequence=True, max_tokens=40),
    "cp4, long rows": Case(Layout(FOUR, context=4), max_tokens=64, recompute="full"),
}
EARLY = {"switches": frozenset({"overlap_grad_reduce", "pinned_copies"})}
EARLY_CASES = {
    "dp2, reduced early": Case(Layout(TWO), max_tokens=12, **EARLY),
    "dp2, optimizer not sharded, reduced early": Case(
        Layout(TWO), optim=OPTIM.model_copy(update={"distributed": False}), max_tokens=12, **EARLY
    ),
    "tp2 cp2 sp, reduced early": Case(Layout(FOUR, tensor=2, context=2), sequence=True, max_tokens=20, **EARLY),
    "pp2 dp2, full recompute, reduced early": Case(Layout(FOUR, pipeline=2), max_tokens=10, recompute="full", **EARLY),
    "pp2 vpp2 dp2, reduced early": Case(Layout(FOUR, pipeline=2, virtual_pipeline=2), max_tokens=9, **EARLY),
}
EARLY_EXPERTS = "ep2 tp2 dp2 sp, reduced early"
EXPERT_CASES |= {
    EARLY_EXPERTS: Case(Layout(FOUR, tensor=2, expert=2), sequence=True, max_tokens=10, **EARLY),
}
BUCKET_SIZE = 2000
"""Size of the buckets of gradients that are reduced early: small enough for several in a tiny model."""
CASES |= EXPERT_CASES | CONTEXT_CASES | LONG_CASES | DEEP_CASES | EARLY_CASES


def build(folder: Path, case: Case, kind: str, reference: Path | None = None) -> TrainedEngine:
    """An engine, and with a reference folder its reference: another component on the same ranks."""
    groups = build_groups({kind: case.layout, "ref": case.layout}, seed=0)
    small_buckets = partial(DistributedDataParallelConfig, bucket_size=BUCKET_SIZE)
    with patch.object(optimizer, "DistributedDataParallelConfig", small_buckets):
        return make_engine(
            folder, case, groups[kind], kind, make_reference(reference, case, groups["ref"]) if reference else None
        )


def _matches(
    rank: int,
    world_size: int,
    folder: Path,
    name: str,
    kind: str,
    reference: Path | None,
    expected: dict,
    lengths: Lengths,
    weighted: bool,
) -> None:
    case = CASES[name]
    engine = build(folder, case, kind, reference)
    architecture = read_architecture(folder)
    rows = make_rows(architecture.vocab_size, lengths, weighted=weighted)
    mine = shard_of(rows, case.layout)
    assert_outputs(engine, rows, mine, expected["outputs"])
    # transformers solves a chunk of linear attention row by row, so that roundings differ more.
    tolerance = 4e-5 if architecture.linear else 2e-5
    for norm in expected["grad_norms"]:
        metrics = engine.train_batch(rows.select(mine), make_loss(kind, rows))
        assert metrics.grad_norm == pytest.approx(norm, rel=tolerance), (metrics.grad_norm, norm)
    assert engine.total(1.0) == case.layout.data, "each shard's part counts once"
    found = exported(engine, architecture, kind)
    assert found.keys() == expected["parameters"].keys()
    for key, parameter in expected["parameters"].items():
        message = f"{key} differs from Hugging Face's after {len(expected['grad_norms'])} steps"
        torch.testing.assert_close(found[key], parameter, rtol=0, atol=2e-5, msg=message)


def check(
    name: str,
    kind: str,
    folder: Path,
    reference: Path | None = None,
    lengths: Lengths = LENGTHS,
    *,
    weighted: bool = False,
) -> None:
    expected = hf_train(folder, kind, reference, num_steps=2, lengths=lengths, weighted=weighted)
    run_ranks(len(CASES[name].layout.ranks), _matches, folder, name, kind, reference, expected, lengths, weighted)


OF_ACTOR = [name for name in CASES if name not in EXPERT_CASES | LONG_CASES | DEEP_CASES]
SHOWN_EARLY = ("dp2, reduced early", "pp2 vpp2 dp2, reduced early")
EASY_OF_ACTOR = {"tp2", "pp2", "pp2 vpp2", "pp2 dp2", "cp2", "cp2 tp2", "cp2 dp2"}
"""Parts of the other layouts."""
SLOW_OF_ACTOR = EASY_OF_ACTOR | EARLY_CASES.keys() - set(SHOWN_EARLY)


@pytest.mark.parametrize("name", slow_ones(OF_ACTOR, SLOW_OF_ACTOR))
def test_actor_trains_as_hugging_face_does(name: str, tmp_path: Path) -> None:
    check(name, "actor", hf_folder(tmp_path / "hf", "qwen2", tie_word_embeddings=True))


@pytest.mark.parametrize("name", DEEP_CASES)
def test_deep_actor_trains_as_hugging_face_does(name: str, tmp_path: Path) -> None:
    check(name, "actor", hf_folder(tmp_path / "hf", "qwen2", num_hidden_layers=8))


OF_CRITIC = ("one rank", "tp2 sp", "pp2", "pp2 vpp2", "dp2", "tp2 pp2, full recompute", *CONTEXT_CASES)
SHOWN_OF_CRITIC = ("one rank", "tp2 sp", "pp2 vpp2", "dp2", "cp2 tp2 sp", "cp2 pp2, full recompute")
"""The actor takes every layout; the critic, which differs from it behind the last layer alone, each way of cutting."""


@pytest.mark.parametrize("name", slow_ones(OF_CRITIC, set(OF_CRITIC) - set(SHOWN_OF_CRITIC)))
def test_critic_trains_as_hugging_face_does(name: str, tmp_path: Path) -> None:
    check(name, "critic", with_score(hf_folder(tmp_path / "hf", "qwen2")))


OF_SUPPORTS = ("one rank, small micro-batches", "tp2 sp", "pp2", "cp2", "cp2 pp2, full recompute")


@pytest.mark.parametrize("name", slow_ones(OF_SUPPORTS, {"cp2 pp2, full recompute"}))
@pytest.mark.parametrize("kind", ["hl_gauss", pytest.param("quantile", marks=pytest.mark.slow), "shared hl_gauss"])
def test_heads_of_several_outputs_train_as_hugging_faces_do(name: str, kind: str, tmp_path: Path) -> None:
    check(name, kind, with_score(hf_folder(tmp_path / "hf", "qwen2"), kind))


@pytest.mark.parametrize("name", slow_ones(OF_SUPPORTS, {"pp2", "cp2", "cp2 pp2, full recompute"}))
def test_a_detached_value_head_leaves_the_policy_alone(name: str, tmp_path: Path) -> None:
    check(name, "shared detached", with_score(hf_folder(tmp_path / "hf", "qwen2")))


@pytest.mark.parametrize(("name", "kind"), [("cp2", "shared"), pytest.param("dp2", "critic", marks=pytest.mark.slow)])
def test_rows_count_by_their_weights(name: str, kind: str, tmp_path: Path) -> None:
    """In the losses of policy and values, and in the bonus of entropy."""
    check(name, kind, with_score(hf_folder(tmp_path / "hf", "qwen2")), weighted=True)


@pytest.mark.parametrize("name", ["one rank", *LONG_CASES])
def test_rows_of_any_length_are_shared_out(name: str, tmp_path: Path) -> None:
    check(name, "shared", with_score(hf_folder(tmp_path / "hf", "llama")), lengths=UNEVEN_LENGTHS)


VARIANT_CASES = {"cp2 tp2 sp": "actor", "pp2 vpp2": "shared", "tp2 pp2, full recompute": "critic"}


LINEAR = ("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text")
"""Linear attention does not take context parallelism."""


VARIANTS = VARIANTS | OF_TORCH


@pytest.mark.parametrize("family", slow_ones(VARIANTS, VARIANTS.keys() - {"gemma4_text"}))
@pytest.mark.parametrize("name", slow_ones(VARIANT_CASES, VARIANT_CASES.keys() - {"cp2 tp2 sp"}))
def test_other_dense_families_train_as_hugging_face_does(name: str, family: str, tmp_path: Path) -> None:
    folder, kind = hf_folder(tmp_path / "hf", family, **VARIANTS[family]), VARIANT_CASES[name]
    name = name.replace("cp2 tp2", "tp2 dp2") if family in LINEAR else name
    check(name, kind, folder if kind == "actor" else with_score(folder))


MIXTURES = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 24},
    "qwen3_moe": EXPERTS | {"norm_topk_prob": True, "tie_word_embeddings": True},
    "glm4_moe": GLM4_MOE,
    "minimax_m2": MINIMAX_M2,
    "gpt_oss": GPT_OSS,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_moe_text": QWEN3_NEXT,
    "deepseek_v2": DEEPSEEK_V2 | {"q_lora_rank": None},
    "deepseek_v3": DEEPSEEK_V3,
}


EASY_CASES = ("tp2 sp", "pp2", "dp2, optimizer not sharded", "cp2", "ep2", "ep2 tp2 sp", "ep2 cp2")
EASY_CASES += ("ep2, uneven micro-batches", "etp2, uneven micro-batches", "ep2 tp2 dp2 sp", "ep2 cp2 tp2 sp")
"""Parts of the other layouts."""
MIXTURE_CASES = ("one rank", "tp2 sp", "pp2", "dp2, optimizer not sharded", "cp2", *EXPERT_CASES)
WHOLE_FAMILY = "deepseek_v3"
"""Has all that the others have, except the softmax router: it takes all but the easy layouts, the others this."""
OTHERS_CASES = ("ep2 pp2 vpp2, uneven micro-batches",)
SHOWN_CASES = {WHOLE_FAMILY: set(MIXTURE_CASES) - set(EASY_CASES), "gpt_oss": {"one rank", "ep2 cp2 tp2 sp"}}
SHOWN_CASES |= {"qwen3_next": {"ep2 tp2 sp"}} | dict.fromkeys(("qwen3_5_moe_text", "minimax_m2", "mixtral"), set())


def mixture_cases(family: str):
    shown = SHOWN_CASES.get(family, OTHERS_CASES)
    for name in MIXTURE_CASES:
        is_cut = "etp" in name if family == "gpt_oss" else family in LINEAR and "cp2" in name
        if not is_cut:  # experts with biases, or rows
            yield pytest.param(name, family, marks=() if name in shown else pytest.mark.slow)


@pytest.mark.parametrize(("name", "family"), [case for family in MIXTURES for case in mixture_cases(family)])
def test_mixture_of_experts_trains_as_hugging_face_does(name: str, family: str, tmp_path: Path) -> None:
    check(name, "actor", hf_folder(tmp_path / "hf", family, **MIXTURES[family]))


@pytest.mark.slow  # tests/models/test_build.py builds it
def test_latent_attention_with_yarn_trains_on_ranks_that_do_not_divide_its_table(tmp_path: Path) -> None:
    check("cp3, selective recompute", "actor", hf_folder(tmp_path / "hf", "deepseek_v3", **DEEPSEEK_V3))


def _biases_kept(rank: int, world_size: int, folder: Path) -> None:
    engine = build(folder, Case(Layout(TWO, expert=2), dtype="bf16"), "actor")
    rows, architecture = make_rows(91), read_architecture(folder)
    before = exported(engine, architecture, "actor")
    for _ in range(2):
        engine.train_batch(rows.select(shard_of(rows, engine.groups.layout)), make_loss("actor", rows))
    after = exported(engine, architecture, "actor")
    expected = {name: bias for name, bias in load_file(folder / "model.safetensors").items() if name.endswith("_bias")}
    assert len(expected) == 3 and not any(torch.equal(bias, bias.bfloat16().float()) for bias in expected.values())
    for name, bias in expected.items():
        assert torch.equal(before[name], bias) and torch.equal(after[name], bias), name
    assert not torch.equal(before["model.layers.1.mlp.gate.weight"], after["model.layers.1.mlp.gate.weight"])


def test_biases_of_routers_stay_in_fp32_and_as_they_are_in_bf16_training(tmp_path: Path) -> None:
    run_ranks(2, _biases_kept, hf_folder(tmp_path / "hf", "deepseek_v3", **DEEPSEEK_V3))


@pytest.mark.parametrize("kind", ["critic", "shared"])
@pytest.mark.parametrize("family", slow_ones(("qwen3_moe", "gpt_oss"), {"gpt_oss"}))
def test_mixture_of_experts_has_values(family: str, kind: str, tmp_path: Path) -> None:
    check("ep2 tp2 dp2 sp", kind, with_score(hf_folder(tmp_path / "hf", family, **MIXTURES[family])))


def test_mixture_of_experts_trains_on_the_full_kl(tmp_path: Path) -> None:
    folder, reference = (
        hf_folder(tmp_path / name, "qwen3_moe", initializer_range=spread, **MIXTURES["qwen3_moe"])
        for name, spread in (("hf", 0.02), ("ref", 0.3))
    )
    check("ep2, uneven micro-batches", "full_kl", folder, reference)


OF_PUBLISHED = ("meta-llama/Llama-3.2-1B-Instruct", "mistralai/Mixtral-8x7B-v0.1", "google/gemma-3-270m")


@pytest.mark.parametrize("name", slow_ones(OF_TEXT, set(OF_TEXT) - set(OF_PUBLISHED)))
def test_public_models_with_tiny_sizes_train_as_hugging_faces_do(name: str, tmp_path: Path) -> None:
    check("one rank", "actor", shrunk_folder(tmp_path / "hf", PUBLISHED[name][0]))


@pytest.mark.slow
@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_critics_of_every_family_train_as_hugging_faces_do(family: str, tmp_path: Path) -> None:
    check("one rank", "critic", with_score(shrunk_folder(tmp_path / "hf", PUBLISHED[BY_FAMILY[family]][0])))


OF_SHARED = ("tp2", "tp2 sp", "pp2", "pp2 vpp2", "dp2", "tp2 pp2, full recompute")
OF_SHARED += ("cp2 tp2 sp", "cp2 pp2, full recompute")
SHOWN_OF_SHARED = {
    True: ("tp2 sp", "pp2 vpp2", "cp2 pp2, full recompute"),
    False: ("dp2", "tp2 pp2, full recompute", "cp2 tp2 sp"),
}


def shared_case(name: str, tied: bool):
    return pytest.param(name, tied, marks=() if name in SHOWN_OF_SHARED[tied] else pytest.mark.slow)


@pytest.mark.parametrize(("name", "tied"), [shared_case(name, tied) for name in OF_SHARED for tied in (True, False)])
def test_shared_backbone_trains_on_both_losses_as_hugging_face_does(name: str, tied: bool, tmp_path: Path) -> None:
    check(name, "shared", with_score(hf_folder(tmp_path / "hf", "qwen2", tie_word_embeddings=tied)))


OF_FULL_KL = ("one rank, small micro-batches", "tp2 dp2 sp", "cp2 tp2 sp", "tp2", "tp2 sp", "dp2", "cp2")


@pytest.mark.parametrize("name", slow_ones(OF_FULL_KL, OF_FULL_KL[3:]))  # parts of the others
def test_full_kl_trains_as_with_hugging_faces_two_models(name: str, tmp_path: Path) -> None:
    folder, reference = (
        hf_folder(tmp_path / name, "qwen2", initializer_range=spread) for name, spread in (("hf", 0.02), ("ref", 0.3))
    )
    check(name, "full_kl", folder, reference)


def _moved(rank: int, world_size: int, folder: Path, checkpoint: Path) -> None:
    """A trained shared backbone, saved, loaded in another layout and exported with and without its value head."""
    architecture = read_architecture(folder)
    rows = make_rows(architecture.vocab_size)
    store = CheckpointStore(checkpoint, 0, Exchange(dist.group.WORLD))
    trained = build(folder, CASES["tp2 sp"], "shared")
    for _ in range(2):
        trained.train_batch(rows, make_loss("shared", rows))
    save_checkpoint(store, 2, {"actor": trained}, {})
    weights = exported(trained, architecture, "shared")
    norm = trained.train_batch(rows, make_loss("shared", rows)).grad_norm
    for name in ("pp2", "pp2 vpp2", "dp2", "cp2"):
        moved = build(folder, CASES[name], "shared")
        store.load(store.latest(), {"actor": moved})
        found = exported(moved, architecture, "shared")
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[key], weights[key]) for key in weights), name
        buckets = Export(moved.chunks, architecture, moved.groups).buckets(1 << 16)
        language_model = {key: tensor for bucket in buckets for key, tensor in bucket}
        assert language_model.keys() == weights.keys() - {"score.weight"}
        assert all(torch.equal(language_model[key], weights[key]) for key in language_model), name
        mine = rows.select(shard_of(rows, CASES[name].layout))
        assert moved.train_batch(mine, make_loss("shared", rows)).grad_norm == pytest.approx(norm, rel=1e-5), name


def _moved_from_buckets(rank: int, world_size: int, folder: Path, checkpoint: Path) -> None:
    """A model whose gradients are in many buckets, saved and loaded in other layouts."""
    rows = make_rows(read_architecture(folder).vocab_size)
    store = CheckpointStore(checkpoint, 0, Exchange(dist.group.WORLD))
    norms = []
    for name in ("dp2, reduced early", "tp2", "dp2", "dp2, reduced early"):
        engine = build(folder, CASES[name], "actor")
        mine = rows.select(shard_of(rows, CASES[name].layout))
        if norms:
            store.load(store.latest(), {"actor": engine})
        else:
            assert len(engine.wrapped_chunks[0].buffers[0].buckets) > 2
            engine.train_batch(mine, make_loss("actor", rows))
            save_checkpoint(store, 1, {"actor": engine}, {})
        norms.append([engine.train_batch(mine, make_loss("actor", rows)).grad_norm for _ in range(2)])
    for found in norms[1:]:
        assert found == pytest.approx(norms[0], rel=1e-5)


def test_early_reduction_is_saved_and_goes_on_in_another_layout(tmp_path: Path) -> None:
    run_ranks(2, _moved_from_buckets, hf_folder(tmp_path / "hf", "qwen2"), tmp_path / "checkpoints")


def test_shared_backbone_goes_on_in_another_layout(tmp_path: Path) -> None:
    folder = with_score(hf_folder(tmp_path / "hf", "qwen2", tie_word_embeddings=True))
    run_ranks(2, _moved, folder, tmp_path / "checkpoints")


def _heads(rank: int, world_size: int, folder: Path) -> None:
    groups = build_groups({"actor": Layout(TWO), "ref": Layout(TWO)}, seed=0)
    rows = make_rows(91)
    reference = make_reference(folder, CASES["dp2"], groups["ref"])
    engine = make_engine(folder, CASES["dp2"], groups["actor"], "actor", reference)
    seen: Outputs = {}

    def loss_fn(outputs: Outputs, rows: Rows) -> tuple:
        seen.update(outputs)
        return outputs["full_kl"].sum(), {}

    assert engine.forward(rows).keys() == {"log_probs", "entropy"}
    engine.train_batch(rows, loss_fn)
    assert seen["full_kl"].requires_grad and seen["full_kl"].abs().max() < 1e-6, "a model's KL to itself"


def test_training_reads_the_loss_head(tmp_path: Path) -> None:
    run_ranks(2, _heads, hf_folder(tmp_path / "hf", "qwen2"))

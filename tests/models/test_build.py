"""Megatron's models against Hugging Face's, in every layout, on packed sequences."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from slow import slow_ones
from spawn import run_ranks
from tiny_models import build, hf_folder, hf_model, inputs, outputs, run, sequences
from tiny_shapes import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    EXPERTS,
    GEMMA4,
    GLM4,
    GLM4_MOE,
    GPT_OSS,
    MINIMAX_M2,
    OF_TORCH,
    PLAIN_ROPE,
    QWEN3_NEXT,
    SHAPE,
    VARIANTS,
    VOCAB_SIZE,
    YARN,
)

from megappo.architecture.families import FAMILIES, Family, HeadKind
from megappo.architecture.parameters import padded_vocab_size, stage_sizes
from megappo.architecture.parsing import parse, read_architecture
from megappo.config.config_error import ConfigError
from megappo.config.sections import Parallel
from megappo.models.heads import output_weight
from megappo.models.layer_specs import layer_kind
from megappo.models.megatron_config import gpt_arguments
from megappo.placement.groups import ComponentGroups, build_groups
from megappo.placement.layout import Layout
from megappo.runtime import platform
from megappo.runtime.megatron_patches import cache_uncut_yarn_tables

LAYOUTS = {
    "tp1": Layout((0,)),
    "tp2": Layout((0, 1), tensor=2),
    "tp2 sp": Layout((2, 3), tensor=2),
    "pp2": Layout((1, 2), pipeline=2),
    "tp2 pp2 sp": Layout((0, 1, 2, 3), tensor=2, pipeline=2),
    "pp2 vpp2": Layout((0, 3), pipeline=2, virtual_pipeline=2),
    "tp2 pp2 vpp2 sp": Layout((0, 1, 2, 3), tensor=2, pipeline=2, virtual_pipeline=2),
}
LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "llama": ("llama", {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama 3.1": ("llama", {"rope_parameters": LLAMA31}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, linear rope": ("llama", {"rope_parameters": LLAMA31 | {"rope_type": "linear"}}),
    "mistral": ("mistral", {"head_dim": 16, "sliding_window": 11}),
    "mistral, no window": ("mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"head_dim": 16}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen3": ("qwen3", {"head_dim": 16, "rms_norm_eps": 1e-3}),
    **{family: (family, changes) for family, changes in (VARIANTS | OF_TORCH).items()},
    "gemma4, values of their own": ("gemma4_text", GEMMA4 | {"attention_k_eq_v": False, "num_key_value_heads": 2}),
    "glm4, yarn": ("glm4", GLM4 | {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}),
    "glm4, a whole head rotates": ("glm4", {"partial_rotary_factor": 1.0, "attention_bias": False, "pad_token_id": 0}),
    "qwen3, tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}
OTHERS = VARIANTS.keys() - {"glm4"} | OF_TORCH.keys()
SLOW_MODELS = {*OTHERS, "glm4, a whole head rotates", "llama, yarn", "gemma4, values of their own"}
MIXTURES = {
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2 moe": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 40}),
    "qwen2 moe, renormalized": (
        "qwen2_moe",
        EXPERTS | {"shared_expert_intermediate_size": 20, "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    "qwen3 moe": ("qwen3_moe", EXPERTS | {"head_dim": 16, "norm_topk_prob": True}),
    "qwen3 moe, one of them": ("qwen3_moe", EXPERTS | {"num_experts_per_tok": 1}),
    "glm4 moe": ("glm4_moe", GLM4_MOE),
    "glm4 moe, a whole head rotates": (
        "glm4_moe",
        GLM4_MOE | {"partial_rotary_factor": 1.0, "attention_bias": False, "use_qk_norm": False, "n_shared_experts": 2},
    ),
    "glm4 moe, linear rope": (
        "glm4_moe",
        GLM4_MOE
        | {"rope_parameters": {**PLAIN_ROPE, "rope_type": "linear", "factor": 3.0}, "n_group": 4, "topk_group": 1},
    ),
    "minimax m2": ("minimax_m2", MINIMAX_M2),
    "gpt oss": ("gpt_oss", GPT_OSS),
    "qwen3 next": ("qwen3_next", QWEN3_NEXT | {"linear_num_value_heads": 2}),
    "qwen3.5 moe": ("qwen3_5_moe_text", QWEN3_NEXT),
    "deepseek v2": ("deepseek_v2", DEEPSEEK_V2),
    "deepseek v2 lite": ("deepseek_v2", DEEPSEEK_V2 | {"q_lora_rank": None, "first_k_dense_replace": 0}),
    "deepseek v2, best of each group": (
        "deepseek_v2",
        DEEPSEEK_V2
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 3, "rope_parameters": PLAIN_ROPE},
    ),
    "deepseek v3": ("deepseek_v3", DEEPSEEK_V3),
    "deepseek v3, queries not latent": (
        "deepseek_v3",
        DEEPSEEK_V3 | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 3},
    ),
    "deepseek v3, unscaled rope": ("deepseek_v3", DEEPSEEK_V3 | {"rope_parameters": PLAIN_ROPE, "n_shared_experts": 1}),
}
"""Hugging Face's model_type and what differs from SHAPE."""
EXPERT_LAYOUTS = {
    "tp1": Layout((0,)),
    "tp2 sp": Layout((2, 3), tensor=2),
    "pp2": Layout((1, 2), pipeline=2),
    "ep2": Layout((0, 1), expert=2),
    "tp2 ep2 sp": Layout((1, 3), tensor=2, expert=2),
    "ep4": Layout((0, 1, 2, 3), expert=4),
    "tp2 pp2 ep2 sp": Layout((0, 1, 2, 3), tensor=2, pipeline=2, expert=2),
    "etp2": Layout((0, 2), expert_tensor=2),
    "tp2 etp2 sp": Layout((0, 1), tensor=2, expert_tensor=2),
    "ep2 etp2": Layout((0, 1, 2, 3), expert=2, expert_tensor=2),
    "tp2 ep2 etp2 sp": Layout((0, 1, 2, 3), tensor=2, expert=2, expert_tensor=2),
    "tp2 etp4 sp": Layout((0, 1, 2, 3), tensor=2, expert_tensor=4),
    "pp2 vpp2 ep2": Layout((0, 1, 2, 3), pipeline=2, virtual_pipeline=2, expert=2),
}
WHOLE_MIXTURE = "deepseek v3"
"""Takes every layout, here and in training; the others these, in which each way of cutting is."""
OTHERS_LAYOUTS = ("tp1", "tp2 ep2 etp2 sp", "pp2 vpp2 ep2", "tp2 etp4 sp")
OF_BIASES = ("tp1", "tp2 sp", "tp2 ep2 sp", "pp2 vpp2 ep2", "tp2 pp2 ep2 sp")
"""Experts with biases are not cut."""


@dataclass(frozen=True)
class Case:
    """A model to build in one layout, and Hugging Face's logits for it: [T, vocabulary]."""

    name: str
    folder: Path
    expected: torch.Tensor
    layout: Layout
    split: tuple[int, ...] | None = None
    dtype: str = "fp32"
    tolerance: float = 1e-5


def _hf_logits(folder: Path) -> torch.Tensor:
    """[T, vocabulary], each sequence on its own."""
    model = hf_model(folder)
    with torch.no_grad():
        return torch.cat([model(tokens[None]).logits[0] for tokens in sequences()])


def _check_logits(rank: int, world_size: int, cases: list[Case]) -> None:
    groups = build_groups({case.name: case.layout for case in cases}, seed=0)
    for case in cases:
        if groups[case.name].member:
            _check_case(case, groups[case.name])


def _check_case(case: Case, groups: ComponentGroups) -> None:
    tensor, pipeline = case.layout.tensor, case.layout.pipeline
    sequence = case.name.endswith(" sp")
    parallel = Parallel(
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=case.layout.virtual_pipeline,
        expert=case.layout.expert,
        expert_tensor=case.layout.expert_tensor,
        sequence=sequence,
        pipeline_split=case.split,
    )
    chunks = build(case.folder, parallel, groups, trained=False, dtype=case.dtype)
    held = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    assert held == sum(stage_sizes(read_architecture(case.folder), parallel)[groups.collection.pp.rank()]), case.name
    logits = outputs(chunks, groups)
    if groups.collection.pp.rank() < pipeline - 1:
        assert logits is None
        return
    shard = padded_vocab_size(VOCAB_SIZE, tensor) // tensor
    assert logits.shape == (1, len(case.expected), shard)
    reference = case.expected.split(shard, dim=1)[groups.collection.tp.rank()]
    torch.testing.assert_close(
        logits[0, :, : reference.shape[1]].float(),
        reference,
        rtol=case.tolerance,
        atol=case.tolerance,
        msg=lambda text: f"{case.name}: {text}",
    )


@pytest.mark.parametrize("name", slow_ones(MODELS, SLOW_MODELS))
def test_logits_equal_hugging_face_in_every_layout(name: str, tmp_path: Path) -> None:
    model_type, changes = MODELS[name]
    folder = hf_folder(tmp_path, model_type, **changes)
    expected = _hf_logits(folder)
    run_ranks(4, _check_logits, [Case(layout, folder, expected, LAYOUTS[layout]) for layout in LAYOUTS])


def test_a_family_is_added_from_outside_by_one_entry(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path, "ministral", head_dim=16, sliding_window=11)
    with pytest.raises(ConfigError, match="is of architecture MinistralForCausalLM; this version trains"):
        read_architecture(folder)
    run_ranks(2, _check_added, [Case("tp2 sp", folder, _hf_logits(folder), Layout((0, 1), tensor=2))])


def _check_added(rank: int, world_size: int, cases: list[Case]) -> None:
    FAMILIES.register("MinistralForCausalLM", Family(sliding_window=True))
    _check_logits(rank, world_size, cases)


SLOW_MIXTURES = {"gpt oss", "qwen3.5 moe", "minimax m2"}


def test_logits_of_the_other_models_equal_hugging_face_on_one_rank(tmp_path: Path) -> None:
    """The rotary positions, norms and factors of a family are the same in every layout."""
    cases = []
    for name, (model_type, changes) in (MODELS | MIXTURES).items():
        if name in SLOW_MODELS | SLOW_MIXTURES:
            folder = hf_folder(tmp_path / name, model_type, **changes)
            cases.append(Case(name, folder, _hf_logits(folder), LAYOUTS["tp1"]))
    run_ranks(1, _check_logits, cases)


@pytest.mark.parametrize("name", slow_ones(MIXTURES, SLOW_MIXTURES))
def test_logits_of_mixtures_equal_hugging_face_in_layouts(name: str, tmp_path: Path) -> None:
    model_type, changes = MIXTURES[name]
    folder = hf_folder(tmp_path, model_type, **changes)
    expected = _hf_logits(folder)
    layouts = {WHOLE_MIXTURE: EXPERT_LAYOUTS, "gpt oss": OF_BIASES}.get(name, OTHERS_LAYOUTS)
    run_ranks(4, _check_logits, [Case(layout, folder, expected, EXPERT_LAYOUTS[layout]) for layout in layouts])


def _builds_on_three(rank: int, world_size: int, folder: Path) -> None:
    groups = build_groups({"actor": Layout((0, 1, 2), context=3)}, seed=0)["actor"]
    build(folder, Parallel(context=3), groups, trained=False)


def test_latent_attention_with_yarn_is_built_on_ranks_that_do_not_divide_its_table(tmp_path: Path) -> None:
    run_ranks(3, _builds_on_three, hf_folder(tmp_path, "deepseek_v3", **DEEPSEEK_V3))


def test_a_yarn_with_other_defaults_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(self: YarnRotaryEmbedding, seq_len: int, dtype: object = None, packed_seq: bool = False) -> None: ...

    monkeypatch.setattr(YarnRotaryEmbedding, "_set_cos_sin_cache", changed)
    with pytest.raises(RuntimeError, match=r"has defaults of \['dtype', 'packed_seq'\]"):
        cache_uncut_yarn_tables()


def test_logits_equal_hugging_face_with_stages_of_any_size_and_in_bf16(tmp_path: Path) -> None:
    cases = []
    for tied in (False, True):
        folder = hf_folder(tmp_path / str(tied), "qwen3", num_hidden_layers=5, tie_word_embeddings=tied)
        case = Case(f"{tied} 2+3", folder, _hf_logits(folder), LAYOUTS["pp2"], (2, 3))
        three = replace(case, name=f"{tied} 3+1+1", layout=Layout((0, 1, 3), pipeline=3), split=(3, 1, 1))
        chunks = replace(case, name=f"{tied} 2+1+1+1", layout=LAYOUTS["pp2 vpp2"], split=(2, 1, 1, 1))
        sharded = replace(case, name=f"{tied} 4+1 sp", layout=LAYOUTS["tp2 pp2 sp"], split=(4, 1))
        bf16 = replace(case, name=f"{tied} bf16 sp", layout=LAYOUTS["tp2 sp"], split=(5,), dtype="bf16", tolerance=0.1)
        cases += [case, three, chunks, sharded, bf16]
    run_ranks(4, _check_logits, cases)


def _values_equal(
    rank: int, world_size: int, folder: Path, hidden: torch.Tensor, parallel: Parallel, head: HeadKind, dtype: str
) -> None:
    layout = Layout(
        tuple(range(world_size)), parallel.tensor, parallel.pipeline, virtual_pipeline=parallel.virtual_pipeline
    )
    groups = build_groups({"critic": layout}, seed=0)["critic"]
    chunks = build(folder, parallel, groups, head=head, dtype=dtype)
    model = chunks[-1]
    assert model.share_embeddings_and_output_weights == (head != "value"), "a critic's embeddings are never tied"
    kept = []
    if head == "policy_value" and model.post_process:
        model.output_layer.register_forward_hook(lambda *arguments: kept.append(model.value_head.take().detach()))
    values = outputs(chunks, groups)
    if values is None:
        return
    own = model.output_layer if head == "value" else model.value_head
    if head == "policy_value":
        values = kept[0]
        with pytest.raises(RuntimeError, match="twice"):
            own.take()
    assert values.dtype == torch.float32
    tolerance = 1e-5 if dtype == "fp32" else 2e-2
    torch.testing.assert_close(values[0], hidden @ own.weight.float().T, rtol=tolerance, atol=tolerance)
    weights = [torch.empty_like(own.weight) for _ in range(parallel.tensor)]
    dist.all_gather(weights, own.weight.data, group=groups.collection.tp)
    assert all(torch.equal(weight, weights[0]) for weight in weights)
    assert weights[0].abs().sum() > 0


@pytest.mark.parametrize(("head", "dtype"), [("value", "fp32"), ("policy_value", "fp32"), ("policy_value", "bf16")])
@pytest.mark.parametrize(
    "parallel",
    [Parallel(tensor=2, sequence=True), Parallel(pipeline=2), Parallel(pipeline=2, virtual_pipeline=2)],
    ids=["tp2 sp", "pp2", "pp2 vpp2"],
)
def test_values_are_a_linear_map_of_hidden_states(
    parallel: Parallel, head: HeadKind, dtype: str, tmp_path: Path
) -> None:
    folder = hf_folder(tmp_path / "hf", "qwen2", tie_word_embeddings=True)
    trunk = hf_model(folder).model
    with torch.no_grad():
        hidden = torch.cat([trunk(tokens[None]).last_hidden_state[0] for tokens in sequences()])
    run_ranks(2, _values_equal, folder, hidden, parallel, head, dtype)


def _gradients(folder: Path, recompute: str) -> dict[str, torch.Tensor]:
    groups = build_groups({"actor": Layout((0,))}, seed=0)["actor"]
    (model,) = build(folder, Parallel(), groups, recompute=recompute)

    def loss(output: torch.Tensor, pack: object) -> tuple:
        return (output @ output_weight(model).T).square().sum(), torch.ones((), dtype=torch.int), {}

    run([model.train()], groups, [sequences()], loss, forward_only=False)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _recomputed_equal(rank: int, world_size: int, folder: Path) -> None:
    plain = _gradients(folder, "none")
    assert all(gradient is not None for gradient in plain.values())
    for recompute in ("selective", "full"):
        for name, gradient in _gradients(folder, recompute).items():
            torch.testing.assert_close(gradient, plain[name], msg=f"{recompute} recomputation: {name}")


def test_models_are_handed_what_lies_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "device", lambda: torch.device("meta"))
    tokens, positions, boundaries = inputs(sequences())
    handed = (tokens, positions, boundaries.cu_seqlens_q, boundaries.cu_seqlens_kv)
    assert {tensor.device.type for tensor in handed} == {"meta"}


def test_recomputation_leaves_gradients_alone(tmp_path: Path) -> None:
    run_ranks(1, _recomputed_equal, hf_folder(tmp_path / "hf", "qwen2"))


QWEN2 = SHAPE | {"architectures": ["Qwen2ForCausalLM"], "rope_theta": 1e6, "rms_norm_eps": 1e-6}


def arguments(head: HeadKind = "policy", **changes: object) -> dict:
    return gpt_arguments(parse(QWEN2 | changes, Path("config.json"), head), 1)


def test_rope_of_either_transformers_generation() -> None:
    new = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert arguments()["rotary_base"] == 1e6
    assert arguments(**new)["rotary_base"] == 5e5
    old = LLAMA31 | {"type": LLAMA31["rope_type"], "rope_type": None, "rope_theta": None}
    assert arguments(rope_scaling=old)["rotary_base"] == 1e6


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 4.0},
        {"type": "dynamic", "factor": 4.0},
        {name: LLAMA31[name] for name in LLAMA31.keys() - {"low_freq_factor"}},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
    ],
)
def test_unknown_rope_is_refused(rope: dict) -> None:
    kind = rope.get("rope_type") or rope["type"]
    with pytest.raises(ValueError, match=f"{kind}.*not supported; supported are.*linear .factor.; llama3"):
        arguments(rope_scaling=rope)


@pytest.mark.parametrize(("size", "tensor", "padded"), [(91, 1, 91), (91, 2, 92), (92, 4, 92), (93, 4, 96)])
def test_vocabulary_is_padded_to_divide(size: int, tensor: int, padded: int) -> None:
    assert padded_vocab_size(size, tensor) == padded


def test_embeddings_are_tied_only_where_config_json_ties_them_and_never_in_a_critic() -> None:
    tied = {"tie_word_embeddings": True}
    assert not arguments()["share_embeddings_and_output_weights"]
    assert arguments(**tied)["share_embeddings_and_output_weights"]
    assert not arguments("value", **tied)["share_embeddings_and_output_weights"]
    assert arguments("policy_value", **tied)["share_embeddings_and_output_weights"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="TransformerEngine may be there")
def test_transformer_engine_without_its_package_is_an_error_with_a_remedy() -> None:
    with pytest.raises(ValueError, match="set model.layer_spec=torch"):
        layer_kind("transformer_engine")

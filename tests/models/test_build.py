"""Megatron's models against Hugging Face's, in every layout, on packed sequences."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from spawn import run_ranks
from tiny_models import VOCAB_SIZE, build, hf_folder, hf_model, outputs, run, sequences

from megappo.config.schema import Parallel
from megappo.models.hf_config import HeadKind, gpt_arguments, padded_vocab_size
from megappo.models.layer_specs import layer_spec
from megappo.placement.groups import ComponentGroups, build_groups
from megappo.placement.layout import Layout

LAYOUTS = {
    "one rank": Layout((0,)),
    "tp2": Layout((0, 1), tensor=2),
    "pp2": Layout((1, 2), pipeline=2),
    "tp2 pp2 sp": Layout((0, 1, 2, 3), tensor=2, pipeline=2),
}


@dataclass(frozen=True)
class Case:
    """A model to build in one layout, and Hugging Face's logits for it: [T, vocabulary]."""

    name: str
    folder: Path
    expected: torch.Tensor
    layout: Layout
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
    parallel = Parallel(tensor=tensor, pipeline=pipeline, sequence=tensor > 1 and "sp" in case.name)
    logits = outputs(build(case.folder, parallel, groups, trained=False, dtype=case.dtype), groups)
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


@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_hugging_face_in_every_layout(tied: bool, tmp_path: Path) -> None:
    folder = hf_folder(tmp_path, "qwen2", tie_word_embeddings=tied)
    expected = _hf_logits(folder)
    run_ranks(4, _check_logits, [Case(name, folder, expected, layout) for name, layout in LAYOUTS.items()])


MODELS = {
    "qwen3 sp": ("qwen3", {"head_dim": 16}),
    "llama sp": ("llama", {"rope_theta": 500.0}),
    "no grouped queries": ("qwen2", {"num_key_value_heads": 4}),
    "rope and eps": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-3}),
}


def test_logits_equal_hugging_face_for_every_family_and_in_bf16(tmp_path: Path) -> None:
    cases = []
    for name, (model_type, changes) in MODELS.items():
        folder = hf_folder(tmp_path / name, model_type, **changes)
        cases.append(Case(name, folder, _hf_logits(folder), LAYOUTS["tp2"]))
    cases.append(replace(cases[0], name="bf16 sp", dtype="bf16", tolerance=0.1))
    run_ranks(2, _check_logits, cases)


def _values_equal(
    rank: int, world_size: int, folder: Path, hidden: torch.Tensor, parallel: Parallel, head: HeadKind, dtype: str
) -> None:
    layout = Layout(tuple(range(world_size)), parallel.tensor, parallel.pipeline)
    groups = build_groups({"critic": layout}, seed=0)["critic"]
    model = build(folder, parallel, groups, head=head, dtype=dtype)
    assert model.share_embeddings_and_output_weights == (head != "value"), "a critic's embeddings are never tied"
    values = outputs(model, groups)
    if values is None:
        return
    own = model.output_layer if head == "value" else model.value_head
    if head == "policy_value":
        values = own.take().detach()
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
@pytest.mark.parametrize("parallel", [Parallel(tensor=2, sequence=True), Parallel(pipeline=2)], ids=["tp2 sp", "pp2"])
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
    model = build(folder, Parallel(), groups, recompute=recompute).train()

    def loss(output: torch.Tensor, pack: object) -> tuple:
        return output.square().sum(), torch.ones((), dtype=torch.int), {}

    run(model, groups, [sequences()], loss, forward_only=False)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _recomputed_equal(rank: int, world_size: int, folder: Path) -> None:
    plain = _gradients(folder, "none")
    assert all(gradient is not None for gradient in plain.values())
    for recompute in ("selective", "full"):
        for name, gradient in _gradients(folder, recompute).items():
            torch.testing.assert_close(gradient, plain[name], msg=f"{recompute} recomputation: {name}")


def test_recomputation_leaves_gradients_alone(tmp_path: Path) -> None:
    run_ranks(1, _recomputed_equal, hf_folder(tmp_path / "hf", "qwen2"))


QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 91,
    "max_position_embeddings": 64,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
}


def test_rope_of_either_transformers_generation() -> None:
    new = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert gpt_arguments(QWEN2, 1, "policy")["rotary_base"] == 1e6
    assert gpt_arguments(QWEN2 | new, 1, "policy")["rotary_base"] == 5e5
    scaled = gpt_arguments(QWEN2 | {"rope_scaling": json.loads(LLAMA31_ROPE)}, 1, "policy")
    assert (scaled["rope_scaling"], scaled["rope_scaling_factor"]) == (True, 8.0)


LLAMA31_ROPE = """{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
"original_max_position_embeddings": 8192, "rope_type": "llama3"}"""


def test_unknown_rope_is_refused() -> None:
    with pytest.raises(ValueError, match="yarn.*not supported"):
        gpt_arguments(QWEN2 | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 1, "policy")


@pytest.mark.parametrize(("size", "tensor", "padded"), [(91, 1, 91), (91, 2, 92), (92, 4, 92), (93, 4, 96)])
def test_vocabulary_is_padded_to_divide(size: int, tensor: int, padded: int) -> None:
    assert padded_vocab_size(size, tensor) == padded


def test_embeddings_are_tied_only_where_the_model_says_so_and_never_in_a_critic() -> None:
    tied = QWEN2 | {"tie_word_embeddings": True}
    assert not gpt_arguments(QWEN2, 1, "policy")["share_embeddings_and_output_weights"]
    assert gpt_arguments(tied, 1, "policy")["share_embeddings_and_output_weights"]
    assert not gpt_arguments(tied, 1, "value")["share_embeddings_and_output_weights"]
    assert gpt_arguments(tied, 1, "policy_value")["share_embeddings_and_output_weights"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="TransformerEngine may be there")
def test_asking_for_transformer_engine_without_it_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="set model.layer_spec=torch"):
        layer_spec(None, "transformer_engine", stage=0)

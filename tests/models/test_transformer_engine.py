"""The contract with TransformerEngine, whose Python is the real one here and whose kernels are absent: its layers hold
every family's weights, its Adam's state is saved and resumed, its attention takes our packs."""

from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from commands import assert_equal
from component_engines import build as build_engines
from ppo_engines import OPTIM, Case, fill_adapters, make_engine, make_rows, with_score
from safetensors.torch import load_file
from saved import save_checkpoint
from tiny_models import build, hf_folder
from tiny_shapes import GEMMA4, GPT_OSS, MIXTURES, TWO_LAYERS, VARIANTS
from transformer_engine_stub import call
from vision_rows import VISION, vision_folder

from megappo.architecture.architecture import Architecture
from megappo.architecture.families import HeadKind
from megappo.architecture.parameters import stage_sizes
from megappo.architecture.parsing import read_architecture
from megappo.architecture.switches import LAYERS
from megappo.batch.exchange import Exchange
from megappo.batch.packing import pack
from megappo.checkpoint.store import CheckpointStore
from megappo.config.model_sections import Lora
from megappo.config.schema import Model
from megappo.config.sections import Parallel
from megappo.models.compact_adam import CompactAdam
from megappo.models.gpt import ModelChunks, build_model
from megappo.models.packed_attention import PackedAttention
from megappo.models.sharding import sharded_chunks
from megappo.models.train_engine import TrainedEngine
from megappo.placement.groups import ComponentGroups, build_groups
from megappo.placement.layout import Layout
from megappo.runtime import platform
from megappo.weights.export import Export
from megappo.weights.hf_folder import fuse_bucket
from megappo.weights.load import load_hf

MODELS = dict.fromkeys(("llama", "qwen2", "qwen3", *VISION), TWO_LAYERS) | VARIANTS | MIXTURES
HEADS: tuple[HeadKind, ...] = ("policy", "value", "policy_value")

pytestmark = pytest.mark.xdist_group("transformer_engine")  # they share its process


def on_gpu(architecture: Architecture, switches: frozenset[str]) -> set[str]:
    """The layers' switches that are on with TransformerEngine; `switches` has them."""
    found = {"bias_activation_fusion"} if architecture.family.activation == "silu" else set()
    is_own = architecture.latent or architecture.family.rope_interleaved or architecture.rope.scales_part
    is_own = is_own or architecture.vision
    found |= set() if is_own else {"apply_rope_fusion"}
    found |= {"moe_grouped_gemm", "moe_permute_fusion"} if architecture.experts else set()
    assert found <= switches
    return found


def check_weights(folder: str) -> None:
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    groups = build_groups({"actor": Layout((0,))}, seed=0)["actor"]
    for model_type, changes in MODELS.items():
        make = vision_folder if model_type in VISION else hf_folder
        of_model = make(Path(folder) / model_type, model_type, **changes)
        for head in HEADS:
            if head == "value":
                with_score(of_model)
            expected = load_file(of_model / "model.safetensors")
            if head == "value":
                expected.pop("lm_head.weight", None)  # tied: none
            architecture = read_architecture(of_model, head)
            chunks = build(of_model, Parallel(), groups, head=head)
            layers = [module for module in chunks[0].modules() if isinstance(module, TransformerEngineBaseModule)]
            assert all(layer.fuse_wgrad_accumulation for layer in layers if list(layer.parameters(recurse=False)))
            assert sum(bool(list(layer.parameters(recurse=False))) for layer in layers) >= 4
            config = chunks[0].config
            assert {name for name in LAYERS if getattr(config, name)} == on_gpu(architecture, config.switches)
            [size] = stage_sizes(architecture, Parallel())
            assert sum(size) == sum(one.numel() for one in chunks[0].parameters())
            found = {
                name: tensor
                for bucket in Export(chunks, architecture, groups).buckets(1 << 20)
                for name, tensor in fuse_bucket(architecture, bucket)
            }
            assert_equal(found, expected)


def test_layers_of_every_family_take_all_weights_and_give_them_back(tmp_path: Path) -> None:
    call(check_weights, tmp_path)


def check_chosen(folder: str) -> None:
    groups = build_groups({"actor": Layout((0,))}, seed=0)["actor"]
    for family, config in {"qwen2": {}, "gpt_oss": GPT_OSS, "gemma4_text": GEMMA4}.items():
        model = Model(path=str(hf_folder(Path(folder) / family, family, **config)), dtype="fp32")
        architecture = read_architecture(model.path)
        (chunk,) = build_model(architecture, model, Parallel(), groups, recompute="none", trained=True)
        assert isinstance(chunk.decoder.layers[0].self_attention.core_attention, PackedAttention) == (family != "qwen2")


def test_a_model_that_it_cannot_compute_has_the_layers_of_torch(tmp_path: Path) -> None:
    """Attention sinks, and layers with different heads."""
    call(check_chosen, tmp_path)


def cut(chunks: ModelChunks, groups: ComponentGroups) -> dict[str, list[tuple]]:
    """The cut of experts' weights in a checkpoint, by their name there."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import apply_factories
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors

    state = sharded_chunks(chunks, groups)
    apply_factories(state)
    found: dict[str, list[tuple]] = {}
    for one in nested_values(extract_sharded_tensors(state)[0]):
        if ".experts." in one.key:
            found.setdefault(one.key, []).append((one.global_shape, one.global_offset, one.data.flatten().tolist()))
    return {name: sorted(places) for name, places in found.items()}


def check_grouped(folder: str, lora_rank: str) -> None:
    lora = Lora(rank=int(lora_rank)) if lora_rank != "0" else None
    groups = build_groups({"actor": Layout((0,))}, seed=0)["actor"]
    of_model = hf_folder(Path(folder), "qwen3_moe", **MIXTURES["qwen3_moe"])
    architecture = read_architecture(of_model).with_lora(lora)
    found = []
    for layers in ("transformer_engine", "torch"):
        model = Model(path=str(of_model), dtype="fp32", layer_spec=layers)
        chunks = build_model(architecture, model, Parallel(), groups, recompute="none", trained=True)
        load_hf(chunks, of_model, architecture, groups)
        names = {name for name, _ in chunks[0].named_parameters() if ".mlp.experts." in name}
        assert all((".experts.local_experts." in name) == (layers == "torch") for name in names)
        assert all(not one.allreduce for name, one in chunks[0].named_parameters() if name in names)
        found.append(cut(chunks, groups))
    assert found[0] == found[1] and len(found[0]) == (2 if lora is None else 6)


@pytest.mark.parametrize("lora_rank", [0, 3])
def test_experts_in_one_layer_are_saved_as_those_with_layers_of_their_own(lora_rank: int, tmp_path: Path) -> None:
    call(check_grouped, tmp_path, lora_rank)


def normalised_product(layer: torch.nn.Module, x: torch.Tensor, **options: object) -> torch.Tensor:
    """Return the output of LayerNormLinear's kernels."""
    normalised = F.rms_norm(x, x.shape[-1:], layer.layer_norm_weight, layer.eps)
    return F.linear(normalised, layer.weight, layer.bias if layer.use_bias else None)


def product(layer: torch.nn.Module, x: torch.Tensor, **options: object) -> torch.Tensor:
    return F.linear(x, layer.weight)


def products(layer: torch.nn.Module, x: torch.Tensor, splits: list[int], **options: object) -> torch.Tensor:
    """Return the output of GroupedLinear's kernels."""
    parts = enumerate(x.split(splits))
    return torch.cat([F.linear(part, getattr(layer, f"weight{expert}")) for expert, part in parts])


def check_adapters(folder: str) -> None:
    """Check the outputs of each adapted layer against the torch layers', whose norms are modules of their own."""
    from transformer_engine.pytorch import GroupedLinear, LayerNormLinear, Linear

    groups = build_groups({"actor": Layout((0,))}, seed=0)["actor"]
    of_model = hf_folder(Path(folder), "qwen2_moe", **MIXTURES["qwen2_moe"])
    architecture = read_architecture(of_model).with_lora(Lora(rank=3, alpha=5.0))
    layers = {}
    for kind in ("transformer_engine", "torch"):
        model = Model(path=str(of_model), dtype="fp32", layer_spec=kind)
        chunks = build_model(architecture, model, Parallel(), groups, recompute="none", trained=True)
        load_hf(chunks, of_model, architecture, groups)
        fill_adapters(chunks, architecture, groups)
        without = architecture.with_lora(None)
        frozen = build_model(without, model, Parallel(), groups, recompute="none", trained=False, base=chunks)
        assert {*frozen[0].parameters()} == {one for one in chunks[0].parameters() if one.is_base}
        layers[kind] = chunks[0].decoder.layers[0]
    fused, plain = layers["transformer_engine"], layers["torch"]
    x = torch.randn(7, 1, 32, generator=torch.Generator().manual_seed(0))
    kernels = {LayerNormLinear: normalised_product, Linear: product, GroupedLinear: products}
    with ExitStack() as stack:
        for layer, forward in kernels.items():
            stack.enter_context(patch.object(layer, "forward", forward))
        found = fused.self_attention.linear_qkv(x)[0]
        torch.testing.assert_close(found, plain.self_attention.linear_qkv(plain.input_layernorm(x))[0])
        found = fused.self_attention.linear_proj(x)[0]
        torch.testing.assert_close(found, plain.self_attention.linear_proj(x)[0])
        for name in ("linear_fc1", "linear_fc2"):
            shared, experts = getattr(fused.mlp.shared_experts, name), getattr(fused.mlp.experts, name)
            wide = x.repeat(1, 1, 2)[..., : shared.weight.shape[1]]
            expected = getattr(plain.mlp.shared_experts, name)(wide)[0]
            torch.testing.assert_close(shared(wide)[0], expected)
            tokens, splits = x[:, 0, : experts.weight0.shape[1]], [2, 0, 4, 1]
            parts = zip(plain.mlp.experts.local_experts, tokens.split(splits), strict=True)
            expected = torch.cat([getattr(expert, name)(part)[0] for expert, part in parts])
            torch.testing.assert_close(experts(tokens, splits)[0], expected)


def test_adapters_add_to_its_layers_what_they_add_to_torchs(tmp_path: Path) -> None:
    call(check_adapters, tmp_path)


def moments(engine: TrainedEngine) -> list[dict[str, torch.Tensor]]:
    return [state for part in engine.optimizer.chained_optimizers for state in part.optimizer.state.values()]


COMPACT = OPTIM.model_copy(update={"moments_dtype": "bf16", "offload_fraction": 0.5})


def check_adam(folder: str) -> None:
    from transformer_engine.pytorch.optimizers import FusedAdam

    folders = {"actor": hf_folder(Path(folder) / "actor", "qwen3_moe", **MIXTURES["qwen3_moe"])}
    store = CheckpointStore(Path(folder) / "checkpoints", 0, Exchange(dist.group.WORLD))
    for dtype, optim in (("fp32", OPTIM), ("bf16", OPTIM), ("bf16", COMPACT)):
        case = Case(Layout((0,)), dtype=dtype, optim=optim)
        engines = build_engines(folders, {"actor": case})
        optimizers = [part.optimizer for part in engines["actor"].optimizer.chained_optimizers]
        assert len(optimizers) == 2 and all(isinstance(getattr(one, "_adam", one), FusedAdam) for one in optimizers)
        for steps in (0, 1):
            path = save_checkpoint(store, steps, engines, {})
            resumed = build_engines(folders, {"actor": case})
            store.load(path, resumed)
            for found, expected in zip(moments(resumed["actor"]), moments(engines["actor"]), strict=True):
                assert_equal(found, expected)
            for group in resumed["actor"].optimizer.param_groups:
                assert group.get("step", 0) == steps
            for optimizer in optimizers:
                set_gradients(optimizer)
                optimizer.step()
            for state in moments(engines["actor"]):
                state["exp_avg"].normal_()  # as the kernel would leave them
                state["exp_avg_sq"].uniform_()


def set_gradients(optimizer: torch.optim.Optimizer | CompactAdam) -> None:
    generator = torch.Generator().manual_seed(0)
    name = "decoupled_grad" if isinstance(optimizer, CompactAdam) else "grad"
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            setattr(parameter, name, torch.randn(parameter.shape, generator=generator))


def test_adams_state_is_saved_and_resumed_before_and_after_the_first_step(tmp_path: Path) -> None:
    call(check_adam, tmp_path)


def adam_kernel(
    chunk_size: int,
    noop: torch.Tensor,
    lists: list[list[torch.Tensor]],
    lr: float,
    beta: float,
    beta_sq: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    assert mode == bias_correction == 1
    for gradient, parameter, m, v in zip(*lists, strict=True):
        m.lerp_(gradient, 1 - beta)
        v.mul_(beta_sq).addcmul_(gradient, gradient, value=1 - beta_sq)
        update = m / (1 - beta**step) / ((v / (1 - beta_sq**step)).sqrt() + eps)
        parameter -= lr * (update + weight_decay * parameter)


def check_compact(folder: str) -> None:
    """Two steps of FusedAdam's Python in fp32, with states on the device and with half of them in host memory."""
    folders = {"actor": hf_folder(Path(folder), "qwen2")}
    for dtype in ("fp32", "bf16"):
        found = []
        for optim in (OPTIM, OPTIM.model_copy(update={"offload_fraction": 0.5})):
            engines = build_engines(folders, {"actor": Case(Layout((0,)), dtype=dtype, optim=optim)})
            [part] = engines["actor"].optimizer.chained_optimizers
            getattr(part.optimizer, "_adam", part.optimizer).multi_tensor_adam = adam_kernel
            for _ in range(2):
                set_gradients(part.optimizer)
                part.step_with_ready_grads()
            parameters = [one for group in part.optimizer.param_groups for one in group["params"]]
            tensors = [part.optimizer.state[one][name] for one in parameters for name in ("exp_avg", "exp_avg_sq")]
            found.append(dict(enumerate([*tensors, *(one.data for one in engines["actor"].chunks[0].parameters())])))
        assert_equal(*found)


def test_adam_steps_alike_wherever_its_states_lie(tmp_path: Path) -> None:
    call(check_compact, tmp_path)


def check_packs(folder: str) -> None:
    from transformer_engine.pytorch import DotProductAttention

    groups = build_groups({"actor": Layout((0,))}, seed=0)["actor"]
    engine = make_engine(hf_folder(Path(folder), "qwen2"), Case(Layout((0,))), groups, "actor")
    packed = pack(make_rows(91), 1, platform.device())
    boundaries = engine._output(packed, lambda **given: given)["packed_seq_params"]
    attention = engine.chunks[0].decoder.layers[0].self_attention
    heads = torch.zeros(packed.input_ids.shape[1], 4, 8)
    with patch.object(DotProductAttention, "forward", autospec=True, return_value=heads) as forward:
        attention.core_attention(
            heads, heads[:, :2], heads[:, :2], None, attention.attn_mask_type, packed_seq_params=boundaries
        )
    given = forward.call_args.kwargs
    assert (given["qkv_format"], given["attn_mask_type"]) == ("thd", "padding_causal")
    for side in ("q", "kv"):
        assert given[f"cu_seqlens_{side}"].dtype == torch.int32
        assert given[f"cu_seqlens_{side}"][-1] == len(heads)
        assert type(given[f"max_seqlen_{side}"]) is int


def test_attention_takes_our_packs(tmp_path: Path) -> None:
    call(check_packs, tmp_path)

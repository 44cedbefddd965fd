"""One rank's part of a model: the chunks of its pipeline stage, its tensor shard of each, without weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_find_correction_range,
    _yarn_linear_ramp_mask,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

from megappo.architecture.architecture import Architecture
from megappo.architecture.families import ROTARY_PART
from megappo.architecture.parameters import EMBEDDING_WEIGHT, by_name, is_beside_base, is_trained, list_parameters
from megappo.architecture.switches import SwitchContext, decide, te_fault
from megappo.config.schema import Model
from megappo.config.sections import Parallel
from megappo.models.heads import ValueHead, add_value_head, return_hidden_states, with_plain_strides
from megappo.models.layer_specs import (
    add_norms_of_all_heads,
    change_outputs,
    layer_kind,
    layer_spec,
    scale_layers,
    separate_expert_outputs,
    use_local_rope,
)
from megappo.models.lora import add_adapters
from megappo.models.megatron_config import gpt_arguments, transformer_config
from megappo.models.vision_tower import add_vision
from megappo.placement.groups import ComponentGroups
from megappo.runtime import platform

ModelChunks = list[GPTModel]
"""A rank's part of a model, from the first layer to the last: chunk i of pipeline stage s is number i * pipeline + s of
the model. One chunk without virtual pipeline stages."""


def build_model(
    architecture: Architecture,
    model: Model,
    parallel: Parallel,
    groups: ComponentGroups,
    *,
    recompute: str,
    trained: bool,
    base: ModelChunks | None = None,
) -> ModelChunks:
    """Build this rank's part of the model, on its device, in `model.dtype`. Load its weights before use.

    Args:
        architecture: the model and its head: "policy" is GPTModel's own output layer, which returns the hidden
            states (see `return_hidden_states`); "value" puts a ValueHead in its place, and the embeddings are then not
            tied; "policy_value" has both, the ValueHead as `value_head` (see `add_value_head`).
        groups: the component's groups, built for the layout of `parallel`; this rank is a member.
        recompute: "none", "selective" or "full".
        trained: False freezes every parameter; True only parameters that adapters adapt, and `architecture.frozen`.
        base: a model with adapters in the same layout: the built one uses its frozen weights, and has no copy.
    Raises:
        ConfigError: the model does not fit the layout; model.layer_spec names layers that cannot compute it here.
    """
    capability = platform.compute_capability()
    fault = te_fault(architecture, parallel, model.dtype, capability)
    has_te = layer_kind(model.layer_spec, fault) == "transformer_engine"
    context = SwitchContext(
        architecture,
        parallel,
        data=groups.layout.data,
        dtype=model.dtype,
        is_trained=trained,
        capability=capability,
        has_te=has_te,
        has_varlen=platform.has_varlen_attn(),
        has_fla=platform.has_fla(),
    )
    config = transformer_config(architecture, model, parallel, recompute, decide(context))
    if base is not None:  # most weights will be the base's: these are allocated on the host, unmarked
        config.use_cpu_initialization = True
        config.perform_initialization = False
    with groups.active():
        chunks = [_chunk(architecture, config, has_te, groups, index) for index in range(parallel.virtual_pipeline)]
    for index, chunk in enumerate(chunks):
        _mark(chunk, architecture, trained)
        if "gradient_accumulation_fusion" in config.switches:
            _fuse_gradient_accumulation(chunk)
        if base is not None:
            _share_base(chunk, base[index], architecture)
        with router_bias_kept(chunk):
            chunk.to(platform.device(), config.params_dtype)
    return chunks


def _mark(chunk: GPTModel, architecture: Architecture, trained: bool) -> None:
    """Freeze the parameters that do not change, and mark parameters of experts and parameters that checkpoints lack."""
    for name, parameter in chunk.named_parameters():
        if ".mlp.experts." in name:
            # Megatron marks biases that no rank cuts as biases of a dense layer: it would sum their gradients over
            # tensor-parallel ranks, which have other experts, or the same, and count them on the first rank only.
            parameter.sequence_parallel = False
            parameter.tensor_model_parallel = True
            # Megatron does so with expert parallelism only. Without, it would not sum the gradients of experts over
            # tensor-parallel ranks, each of which sends its own tokens to its own copy.
            parameter.allreduce = False
        changes = is_trained(name, architecture)
        parameter.is_base = architecture.lora is not None and not changes
        parameter.requires_grad_(trained and changes)


def _share_base(chunk: GPTModel, base: GPTModel, architecture: Architecture) -> None:
    """Replace a chunk's frozen weights and rotary frequencies by the tensors of another model's chunk."""
    shared: dict[str, object] = {}
    for name, weight in base.named_parameters():
        if weight.is_base:
            shared[name] = weight
    for name, module in base.named_modules():
        if name.endswith("rotary_pos_emb"):
            shared[name] = module
    for name, _ in chunk.named_parameters():
        if is_beside_base(name, architecture):
            shared.pop(name, None)
    for name, value in shared.items():
        path, _, attribute = name.rpartition(".")
        setattr(chunk.get_submodule(path), attribute, value)


def _fuse_gradient_accumulation(chunk: GPTModel) -> None:
    """Make TransformerEngine's layers add their weights' gradients to `main_grad` themselves.

    TransformerConfig's field of that name does so, too, but then Megatron's own output layer, whose product the heads
    compute, needs Apex (megatron-core 0.16.1, tensor_parallel/layers.py).
    """
    for module in chunk.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def _chunk(
    architecture: Architecture,
    config: TransformerConfig,
    has_te: bool,
    groups: ComponentGroups,
    index: int,
) -> GPTModel:
    """Build chunk `index` of this rank's stage: the first of all has the embedding, the last of all the head."""
    layout = groups.layout
    stage = groups.collection.pp.rank()
    gpt = GPTModel(
        config,
        layer_spec(config, architecture.family, has_te, stage, index),
        pre_process=index == 0 and stage == 0,
        post_process=index == layout.virtual_pipeline - 1 and stage == layout.pipeline - 1,
        pg_collection=groups.collection,
        vp_stage=index,
        **gpt_arguments(architecture, layout.tensor),
    )
    _scale_rope(gpt, architecture)
    use_local_rope(gpt, architecture)
    add_norms_of_all_heads(gpt, architecture)
    change_outputs(gpt, architecture, has_te)
    scale_layers(gpt, architecture.family)
    separate_expert_outputs(gpt)
    if gpt.pre_process:
        gpt.embedding.register_forward_hook(lambda embedding, inputs, output: with_plain_strides(output))
        factor = torch.tensor(architecture.scales.embedding).to(config.params_dtype).item()  # as transformers rounds it
        if factor != 1:
            gpt.embedding.register_forward_hook(lambda embedding, inputs, output: output * factor)
    if gpt.post_process and architecture.head == "value":
        gpt.output_layer = ValueHead(config, groups.collection.tp, architecture.value_bias, architecture.num_values)
    elif gpt.post_process:
        return_hidden_states(gpt, architecture.scales.logits)
    if gpt.post_process and architecture.head == "policy_value":
        add_value_head(gpt, architecture.value_bias, architecture.num_values)
    if architecture.lora is not None:
        sizes = {"tensor": layout.tensor, "expert_tensor": layout.expert_tensor}
        add_adapters(gpt, architecture.lora, by_name(list_parameters(architecture, **sizes)))
    if gpt.pre_process and config.recompute_granularity == "full" and not is_trained(EMBEDDING_WEIGHT, architecture):
        # A layer that is computed again has gradients only where its input requires one.
        gpt.embedding.register_forward_hook(lambda embedding, inputs, output: output.requires_grad_())
    add_vision(gpt, architecture)
    return gpt


def _scale_rope(gpt: GPTModel, architecture: Architecture) -> None:
    """Scale the model's rotary frequencies; Megatron's own argument for Llama 3 takes only one of the four numbers.

    Latent attention scales its own, see `_latent_arguments`.

    Source: transformers 5, modeling_rope_utils.py.
    """
    if architecture.latent:
        return
    rope = architecture.rope
    embedding = gpt.rotary_pos_emb
    if rope.kind == "linear":
        embedding.inv_freq = embedding.inv_freq / rope.numbers["factor"]
    elif rope.kind == "llama3":
        embedding.inv_freq = embedding._apply_scaling(embedding.inv_freq, **rope.numbers)
    elif rope.kind == "proportional" and architecture.full_heads:
        size = architecture.full_heads.size
        embedding.inv_freq = rope.base ** -(torch.arange(0, size, 2, device=embedding.inv_freq.device) / size)
        embedding.inv_freq[int(rope.numbers[ROTARY_PART] * size // 2) :] = 0
    elif rope.kind == "longrope":
        embedding.inv_freq = embedding.inv_freq / embedding.inv_freq.new_tensor(rope.divisors)
    elif rope.kind == "yarn":
        numbers = rope.numbers
        size = 2 * len(embedding.inv_freq)
        bounds = _yarn_find_correction_range(
            numbers["beta_fast"],
            numbers["beta_slow"],
            size,
            rope.base,
            numbers["original_max_position_embeddings"],
            bool(numbers["truncate"]),
        )
        share = _yarn_linear_ramp_mask(*bounds, size // 2, embedding.inv_freq.device)
        embedding.inv_freq = embedding.inv_freq * (1 - share + share / numbers["factor"])


@contextmanager
def router_bias_kept(model: torch.nn.Module) -> Iterator[None]:
    """Keep the routers' biases in fp32, to the bit, while the model is cast or moved.

    Megatron casts them back to fp32 before each use, but a cast to bf16 has rounded them by then.
    """
    routers = [module for module in model.modules() if getattr(module, "expert_bias", None) is not None]
    kept = [router.expert_bias for router in routers]
    yield
    for router, bias in zip(routers, kept, strict=True):
        router.expert_bias = bias.to(router.expert_bias.device)

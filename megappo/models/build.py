"""One rank's part of a model: its pipeline stage and tensor shard, without weights."""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from megappo import platform
from megappo.config.schema import Model, Parallel
from megappo.models.hf_config import HeadKind, gpt_arguments, transformer_config
from megappo.models.layer_specs import layer_spec
from megappo.models.rope import scale_rope
from megappo.models.routing import router_bias_kept
from megappo.models.value_head import ValueHead, add_value_head, has_bias
from megappo.placement.groups import ComponentGroups


def build_model(
    hf_config: dict[str, Any],
    model: Model,
    parallel: Parallel,
    groups: ComponentGroups,
    *,
    head: HeadKind,
    recompute: str,
    trained: bool,
) -> GPTModel:
    """This rank's GPTModel, on its device, in `model.dtype`. Its weights are not set: load them before use.

    Args:
        hf_config: config.json.
        groups: the component's groups, built for the layout of `parallel`; this rank is a member.
        head: "policy" is GPTModel's own output layer; "value" puts a ValueHead in its place, and the embeddings are
            then not tied; "policy_value" has both, the ValueHead as `value_head` (see `add_value_head`).
        recompute: "none", "selective" or "full".
        trained: False freezes every parameter.
    """
    config = transformer_config(hf_config, model, parallel, recompute)
    stage = groups.collection.pp.rank()
    with groups.active():
        gpt = GPTModel(
            config,
            layer_spec(config, model.layer_spec, stage),
            pre_process=stage == 0,
            post_process=stage == parallel.pipeline - 1,
            pg_collection=groups.collection,
            **gpt_arguments(hf_config, parallel.tensor, head),
        )
    scale_rope(gpt, hf_config)
    if gpt.post_process and head == "value":
        gpt.output_layer = ValueHead(config, groups.collection.tp, has_bias(hf_config))
    elif gpt.post_process and head == "policy_value":
        add_value_head(gpt, has_bias(hf_config))
    for name, parameter in gpt.named_parameters():
        if ".local_experts." in name:
            # Megatron does so with expert parallelism only. Without, it would not sum the gradients of experts over
            # tensor-parallel ranks, each of which sends its own tokens to its own copy.
            parameter.allreduce = False
    gpt.requires_grad_(trained)
    with router_bias_kept(gpt):
        return gpt.to(platform.device(), torch.bfloat16 if config.bf16 else torch.float32)

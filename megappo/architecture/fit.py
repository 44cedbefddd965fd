"""Errors of a model that does not fit its layout, with keys and remedies."""

import json
from collections.abc import Callable, Iterator

from megappo.architecture.architecture import Architecture, all_but_every
from megappo.architecture.families import FULL_KV_HEADS
from megappo.architecture.parameters import ROUTER_WEIGHT, adapted_modules, adapts_experts, is_trained
from megappo.config.config_error import Errors, nearest_divisors
from megappo.config.model_sections import Lora, Router
from megappo.config.sections import Parallel

KeyOf = Callable[[str], str]
"""Dimension of a layout, such as "tensor" -> its key for the reader: "actor.parallel.tensor", "--tensor"."""


def fit_errors(architecture: Architecture, parallel: Parallel, key_of: KeyOf = "parallel.{}".format) -> Errors:
    """Yield the errors of a layout, itself without contradictions, that does not fit the model."""
    file = architecture.file
    for dimension, name, size in divided_sizes(architecture):
        num_ranks = getattr(parallel, dimension)
        if size % num_ranks:
            yield _indivisible(f"{key_of(dimension)} {num_ranks}", f"{name} {size} of {file}", size, num_ranks)
    yield from _stage_errors(architecture, parallel, key_of)
    for dimension in ("expert", "expert_tensor"):
        if getattr(parallel, dimension) > 1 and not architecture.experts:
            setting = f"{key_of(dimension)} {getattr(parallel, dimension)}"
            yield f"{setting}: {file} is of a dense model, without experts: set it to 1"
    if parallel.dispatcher == "deepep" and parallel.expert * parallel.expert_tensor == 1:
        yield f"{key_of('dispatcher')} deepep needs {key_of('expert')} or expert_tensor above 1: set it to alltoall"
    if parallel.expert_tensor > 1 and architecture.family.linear_bias:
        yield (
            f"{key_of('expert_tensor')} {parallel.expert_tensor}: the experts of {file} have biases, which each of "
            "their ranks would add: set it to 1"
        )
    if parallel.context > 1 and architecture.linear:
        yield (
            f"{key_of('context')} {parallel.context}: {file} has layers with linear attention, whose state "
            "passes through all tokens of a row in order: set it to 1"
        )
    first, *_ = parallel.pipeline_split or (architecture.num_layers // parallel.num_chunks,)
    deepstack = len(architecture.vision.deepstack_layers) if architecture.vision else 0
    if deepstack > first:
        yield (
            f"{key_of('pipeline_split')}: the first {deepstack} layers of {file} get features of images (deepstack), "
            f"but the first chunk has {first} layers: begin it with {deepstack} or more"
        )
    if architecture.experts and parallel.tensor > 1 and not parallel.sequence:
        yield (
            f"{key_of('sequence')} must be true with {key_of('tensor')} {parallel.tensor}, as {file} is of a "
            "mixture of experts"
        )


def divided_sizes(architecture: Architecture) -> Iterator[tuple[str, str, int]]:
    """Yield the sizes that a layout divides: the dimension of the layout, the size's key in config.json, the size."""
    yield "tensor", "num_attention_heads", architecture.num_heads
    for key, size in _shared_heads(architecture):
        yield "tensor", key, size
    if architecture.linear:
        yield "tensor", "linear_num_key_heads", architecture.linear.key_heads
    if architecture.num_dense_layers:
        yield "tensor", "intermediate_size", architecture.ffn_size
    experts = architecture.experts
    written = architecture.family.experts
    if experts and written:
        yield "expert", written.count[-1], experts.count
        yield "expert_tensor", written.ffn, experts.ffn_size
        if experts.shared_ffn_size:
            yield "tensor", " x ".join(written.shared_ffn), experts.shared_ffn_size


def _shared_heads(architecture: Architecture) -> Iterator[tuple[str, int]]:
    """Yield the numbers of key-value heads: the key of config.json, the number."""
    if architecture.latent is None:  # whose heads all make their keys and values of the same vector
        yield "num_key_value_heads", architecture.num_kv_heads
    if architecture.full_heads:
        yield FULL_KV_HEADS, architecture.full_heads.kv_heads


def _indivisible(divisor: str, divided: str, size: int, num_ranks: int) -> str:
    return f"{divisor} does not divide {divided}: {nearest_divisors(size, num_ranks)} would"


def _stage_errors(architecture: Architecture, parallel: Parallel, key_of: KeyOf) -> Errors:
    layers = architecture.num_layers
    chunks = parallel.num_chunks
    split = parallel.pipeline_split
    written = f"num_hidden_layers {layers} of {architecture.file}"
    product = f"{key_of('pipeline')} {parallel.pipeline} x virtual_pipeline {parallel.virtual_pipeline} = {chunks}"
    if split is not None:
        if sum(split) != layers:
            yield (
                f"{key_of('pipeline_split')} {list(split)} has {sum(split)} layers together, num_hidden_layers of "
                f"{architecture.file} is {layers}: make them as many"
            )
    elif layers < chunks:
        yield f"{product} is more than {written}: lower it"
    elif layers % chunks:
        yield f"{_indivisible(product, written, layers, chunks)}, or set {key_of('pipeline_split')}"


def dense_stage_errors(architecture: Architecture, parallel: Parallel, component: str) -> Errors:
    """Yield the error of an optimizer that must be sharded: a rank without experts, whose whole Adam for experts would
    have no number of steps to save."""
    split = parallel.pipeline_split
    dense = architecture.num_dense_layers
    first = split[0] if split else architecture.num_layers // parallel.pipeline
    if architecture.experts and parallel.pipeline > 1 and first <= dense:
        yield (
            f"{component}.optim.distributed must be true, as the first {dense} layers of {architecture.file} have no "
            f"experts and the first of {component}.parallel.pipeline {parallel.pipeline} stages has {first} layers"
        )


def adapter_errors(
    architecture: Architecture,
    lora: Lora,
    parallel: Parallel,
    component: str,
) -> Errors:
    """Yield the errors of adapters that the model has no place for: latent attention takes none, nor do experts that
    are cut."""
    if architecture.vision:
        yield f"{component}.lora: {architecture.file} has a vision tower, beside which no adapters can stand: drop lora"
    if parallel.expert_tensor > 1 and adapts_experts(architecture.with_lora(lora)):
        yield (
            f"{component}.parallel.expert_tensor {parallel.expert_tensor} cuts the experts of {architecture.file}, "
            f"which have adapters: set it to 1, or leave gate_proj, up_proj and down_proj out of "
            f"{component}.lora.target_modules"
        )
    there = adapted_modules(architecture)
    if lacking := ", ".join(name for name in lora.modules if name not in there):
        remaining = ", ".join(name for name in lora.modules if name in there)
        remedy = f"leave {remaining}" if remaining else "drop lora"
        yield (
            f"{component}.lora.target_modules: adapters cannot stand beside {lacking} of {architecture.file}: {remedy}"
        )


def router_errors(architecture: Architecture, router: Router, component: str) -> Errors:
    """Yield the errors of balancing the experts of a model with its adapters and frozen parameters."""
    key = f"{component}.router"
    file = architecture.file
    written = architecture.family.experts
    if router == Router():
        return
    if architecture.experts is None or written is None:
        yield f"{key}: {file} is of a dense model, without experts: drop it"
    elif not is_trained(ROUTER_WEIGHT, architecture):
        yield f"{key}: lora or freeze of {component} keeps the routers of {file} fixed: drop {key}, or train them"
    elif router.bias_update_rate and not written.router_bias:
        yield f"{key}.bias_update_rate {router.bias_update_rate}: the routers of {file} have no biases: set it to 0"
    if router.aux_loss_coef and router.seq_aux_loss_coef:
        yield f"{key}.aux_loss_coef and {key}.seq_aux_loss_coef are both above 0: set one to 0"


def engine_fit_errors(architecture: Architecture, num_ranks: int) -> Errors:
    """Yield the errors of a model that SGLang cannot serve, or cannot cut over `num_ranks` ranks.

    SGLang repeats key-value heads where there are fewer. It reads only `full_attention_interval` about layers with
    linear attention (0.5.23, srt/configs/qwen3_next.py), and only `rope_theta` and `rope_scaling` about OLMo 3's rotary
    positions (srt/configs/olmo3.py), which folders that transformers has written lack. DeepSeek-V2's experts are always
    in groups there (srt/models/deepseek_v2.py).
    """
    heads = architecture.num_heads
    setting = f"rollout.tensor_parallel {num_ranks}"
    if heads % num_ranks:
        yield _indivisible(setting, f"num_attention_heads {heads} of {architecture.file}", heads, num_ranks)
    for key, shared in _shared_heads(architecture):
        if heads % num_ranks == 0 and shared % num_ranks and num_ranks % shared:
            yield (
                f"{setting} neither divides {key} {shared} of {architecture.file} nor is a multiple of it: choose one "
                "that does"
            )
    if architecture.vision:
        tower = architecture.vision.config.get("num_heads", 16)
        if tower % num_ranks:
            yield _indivisible(setting, f"vision_config.num_heads {tower} of {architecture.file}", tower, num_ranks)
    raw = architecture.raw_config
    if raw.get("topk_method") == "greedy" and (raw.get("topk_group") or 1) < (raw.get("n_group") or 1):
        yield (
            f"{architecture.file}: topk_method is greedy, but SGLang would choose experts from topk_group of n_group "
            "groups only: set both to 1"
        )
    if architecture.family.flat_rope:
        base = architecture.rope.base
        nested = raw.get("rope_parameters") or {}
        read = {"rope_theta": base, "rope_scaling": nested.get("full_attention")}
        if lacking := {key: value for key, value in read.items() if value and not raw.get(key)}:
            yield (
                f"{architecture.file}: SGLang reads rope_theta and rope_scaling, not rope_parameters: add "
                f"{json.dumps(lacking)[1:-1]} to it"
            )
        if architecture.local_rope_base != base:
            yield (
                f"{architecture.file}: SGLang reads one rope_theta for all layers, but sliding_attention has another: "
                "choose another model"
            )
    if architecture.linear is not None:
        layers = architecture.linear.layers
        every = (*layers, False).index(False) + 1
        if layers != all_but_every(every, len(layers)):
            yield (
                f"{architecture.file}: layer_types is not a regular pattern, and SGLang serves only models in which "
                "every N-th layer has full attention: choose such a model"
            )
        elif architecture.linear.full_interval != every:
            yield (
                f"{architecture.file} has layer_types, of which SGLang reads nothing: add "
                f'"full_attention_interval": {every} to it'
            )

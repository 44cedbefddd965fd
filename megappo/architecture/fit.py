"""Errors of a model that does not fit its layout, with keys and remedies."""

from collections.abc import Callable, Iterator

from megappo.architecture.architecture import Architecture
from megappo.architecture.parameters import adapted_modules
from megappo.config.config_error import nearest_divisors, shorten
from megappo.config.schema import Lora, Parallel

KeyOf = Callable[[str], str]
"""From a dimension of a layout, such as "tensor", to its key for the reader: "actor.parallel.tensor", "--tensor"."""


def fit_errors(architecture: Architecture, parallel: Parallel, key_of: KeyOf = "parallel.{}".format) -> Iterator[str]:
    """Errors of a layout, itself without contradictions, that the model cannot have."""
    file, has_experts = architecture.file, architecture.num_experts > 0
    for name, (size, dimension) in divided_sizes(architecture).items():
        num_ranks = getattr(parallel, dimension)
        if size % num_ranks:
            advice = f"{nearest_divisors(size, num_ranks)} would"
            yield f"{key_of(dimension)} {num_ranks} does not divide {name} {size} of {file}: {advice}"
    yield from _stages(architecture, parallel, key_of)
    for dimension in ("expert", "expert_tensor"):
        if getattr(parallel, dimension) > 1 and not has_experts:
            found = f"{key_of(dimension)} {getattr(parallel, dimension)}"
            yield f"{found}: {file} is of a dense model, without experts: set it to 1"
    if has_experts and parallel.tensor > 1 and not parallel.sequence:
        yield (
            f"{key_of('sequence')} must be true with {key_of('tensor')} {parallel.tensor}, as {file} is of a "
            "mixture of experts"
        )


def divided_sizes(architecture: Architecture) -> dict[str, tuple[int, str]]:
    """Sizes that a layout divides, by their keys in config.json: the size, and the dimension of the layout."""
    divided = {"num_attention_heads": (architecture.num_heads, "tensor")}
    if architecture.latent is None:  # whose heads all make their keys and values of the same vector
        divided["num_key_value_heads"] = (architecture.num_kv_heads, "tensor")
    if architecture.num_dense_layers:
        divided["intermediate_size"] = (architecture.ffn_size, "tensor")
    experts, written = architecture.experts, architecture.family.experts
    if experts and written:
        divided[written.count[-1]] = (experts.count, "expert")
        divided[written.ffn] = (experts.ffn_size, "expert_tensor")
        if written.shared and experts.shared_ffn_size:
            divided[" x ".join(written.shared.keys)] = (experts.shared_ffn_size, "tensor")
    return divided


def _stages(architecture: Architecture, parallel: Parallel, key_of: KeyOf) -> Iterator[str]:
    layers, file = architecture.num_layers, architecture.file
    chunks, split = parallel.num_chunks, parallel.pipeline_split
    product = f"{key_of('pipeline')} {parallel.pipeline} x virtual_pipeline {parallel.virtual_pipeline} = {chunks}"
    if split is not None and sum(split) != layers:
        yield (
            f"{key_of('pipeline_split')} {list(split)} has {sum(split)} layers together, num_hidden_layers of "
            f"{file} is {layers}: make them as many"
        )
    elif split is None and layers < chunks:
        yield f"{product} is more than num_hidden_layers {layers} of {file}: lower it"
    elif split is None and layers % chunks:
        more = layers % chunks
        example = shorten(str([layers // chunks + (chunk < more) for chunk in range(chunks)]))
        yield (
            f"{product} does not divide num_hidden_layers {layers} of {file}: "
            f"{nearest_divisors(layers, chunks)} would, or set {key_of('pipeline_split')}, such as {example}"
        )


def dense_stage_errors(architecture: Architecture, parallel: Parallel, component: str) -> Iterator[str]:
    """Error of an optimizer that must be sharded: a rank without experts, whose whole Adam for experts would have no
    number of steps to save."""
    split, dense = parallel.pipeline_split, architecture.num_dense_layers
    first = split[0] if split else architecture.num_layers // parallel.pipeline
    if architecture.num_experts and parallel.pipeline > 1 and first <= dense:
        yield (
            f"{component}.optim.distributed must be true, as the first {dense} layers of {architecture.file} have no "
            f"experts and the first of {component}.parallel.pipeline {parallel.pipeline} stages has {first} layers"
        )


def adapter_errors(architecture: Architecture, lora: Lora, component: str) -> Iterator[str]:
    """Error of adapters that the model has no place for: experts and latent attention take none."""
    there = adapted_modules(architecture)
    if lacking := [name for name in lora.modules if name not in there]:
        remedy = f"leave {', '.join(name for name in lora.modules if name in there)}" if there else "drop lora"
        lacking_of = f"{', '.join(lacking)} of {architecture.file}"
        yield f"{component}.lora.target_modules: adapters cannot stand beside {lacking_of}: {remedy}"


def engine_fit_errors(architecture: Architecture, num_ranks: int) -> Iterator[str]:
    """Error of a model that SGLang cannot cut over so many ranks; it repeats key-value heads where there are fewer."""
    heads, shared, file = architecture.num_heads, architecture.num_kv_heads, architecture.file
    if heads % num_ranks:
        yield (
            f"rollout.tensor_parallel {num_ranks} does not divide num_attention_heads {heads} of {file}: "
            f"{nearest_divisors(heads, num_ranks)} would"
        )
    elif architecture.latent is None and shared % num_ranks and num_ranks % shared:
        yield (
            f"rollout.tensor_parallel {num_ranks} neither divides num_key_value_heads {shared} of {file} nor is a "
            "multiple of it: choose one that does"
        )

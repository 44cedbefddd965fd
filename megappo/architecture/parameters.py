"""A model's parameters: the Hugging Face tensors that each Megatron parameter is made of, and how it is cut."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import prod
from operator import itemgetter
from typing import NamedTuple

from megappo.architecture import parameter_tables as tables
from megappo.architecture.architecture import Architecture, Heads
from megappo.architecture.families import LINEAR_BLOCK, ExpertFormat
from megappo.architecture.vision import TOWER
from megappo.config.model_sections import Lora
from megappo.config.sections import Parallel
from megappo.config.values import ADAPTED_MODULES, ParameterGroup

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
VALUE_HEAD = "score.weight"
VALUE_BIAS = "score.bias"
EMBEDDING_WEIGHT = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer"
SECOND_HEAD = "value_head"
ROUTER_WEIGHT = ".mlp.router.weight"
ROUTER_BIAS = "router.expert_bias"
LAYER_SCALAR = "layer_scalar"
ADAPTER = "_adapter"
"""Ends the name of a module with adapters, after the name of the linear layer that it adapts."""
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
"""End the names of adapters as PEFT writes them, after the name of the matrix without ".weight"."""
FREEZABLE: dict[ParameterGroup, str] = {"embedding": "embedding.", "attention": ".self_attention.", "mlp": ".mlp."}
"""Group of parameters -> a part of their names in every family."""
FUSED_NORMS = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
"""The norms before attention and MLP by their names in TransformerEngine's layers; they belong to no group."""
LOGITS_AT_A_TIME = {"cpu": 2**21, "cuda": 2**25}
"""Logits that a policy's head computes at a time, on each kind of device: on a CPU as many as its caches hold."""

LINE = re.compile(r"(?P<megatron>.+) <-\s+(?P<hf>\S+) \((?P<sizes>.+)\)")
EXPERT_NUMBER = re.compile(r"(?<=local_experts\.)\d+")


@dataclass(frozen=True)
class HFTensor:
    """A Hugging Face tensor, and the shard of it that each rank holds.

    Attributes:
        shard_shape: the last ranks' shards of a padded vocabulary reach beyond `shape`: that part is padding.
        shard_dim: dimension cut over tensor-parallel ranks, an expert's over expert-tensor-parallel ones; None =
            replicated.
        expert: number of its expert, of which an expert-parallel rank holds a run.
        with_next: it is exported in one bucket with the tensor after it.
    """

    name: str
    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    shard_dim: int | None
    expert: int | None = None
    with_next: bool = False


@dataclass(frozen=True)
class Parameter:
    """One Megatron parameter. Its dimension 0 is `groups` repeats of [rows of tensor 1, rows of tensor 2, ...].

    Attributes:
        names: names with layers and experts numbered over the whole model, one for each layer spec that has its own.
        layer: None outside the layers.
        groups: 1, or the KV heads of a rank: queries, keys and values alternate per head (q q k v, q q k v, ...); key
            heads of linear attention.
    """

    names: tuple[str, ...]
    layer: int | None
    hf_tensors: tuple[HFTensor, ...]
    groups: int

    @property
    def is_buffer(self) -> bool:
        """True for a router's bias, which is no parameter to torch and stays in fp32."""
        return self.names[0].endswith(ROUTER_BIAS)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of the parameter on each rank."""
        return (sum(hf.shard_shape[0] for hf in self.hf_tensors), *self.hf_tensors[0].shard_shape[1:])


def list_parameters(
    architecture: Architecture,
    *,
    tensor: int = 1,
    expert_tensor: int = 1,
    num_experts: int | None = None,
) -> list[Parameter]:
    """Return every parameter of the model under its head, with buffers (`is_buffer`), in the order of the tables.

    Args:
        tensor: tensor-parallel ranks, for which the vocabulary is padded.
        expert_tensor: ranks that cut each expert.
        num_experts: take only this number of experts of each layer, the first; None = all.
    """
    num_experts = architecture.num_experts if num_experts is None else num_experts
    found: list[tuple[int | None, str]] = [
        (None, tables.MODEL + _output_table(architecture) + _tower_table(architecture))
    ]
    found += enumerate(_layer_tables(architecture, num_experts))
    num_ranks = {"": 1, "tp": tensor, "etp": expert_tensor}
    joined = {f"{part}.weight" for parts in architecture.stacks.values() for part in parts[:-1]}
    parameters: list[Parameter] = []
    for layer, table in found:
        sizes = _sizes(architecture, architecture.heads_of(layer or 0))
        parameters += _read(table, layer, sizes, num_ranks, joined)
    return parameters


def is_adapter(name: str) -> bool:
    """Return whether a Megatron parameter is an adapter's."""
    return f"{ADAPTER}." in name


def adapted_modules(architecture: Architecture) -> set[str]:
    """Return the matrices that can have adapters, by their names in `Lora.target_modules`."""
    layers = set(_layer_tables(architecture, 1))
    return {name for table in layers for _, name in _adaptable(table, architecture)}


def adapts_experts(architecture: Architecture) -> bool:
    """Return whether matrices of experts have adapters."""
    wanted = architecture.lora.modules if architecture.lora else ()
    return architecture.experts is not None and not {"gate_proj", "up_proj", "down_proj"}.isdisjoint(wanted)


def is_trained(name: str, architecture: Architecture) -> bool:
    """Return whether a Megatron parameter is trained where its model is: all are but frozen groups, factors of layers
    and vision towers, or with adapters only these and a value head."""
    if name.endswith(LAYER_SCALAR) or name.startswith(TOWER):
        return False
    if architecture.lora is None:
        is_frozen = any(FREEZABLE[group] in name for group in architecture.frozen)
        return not is_frozen or name.endswith(FUSED_NORMS)
    return is_beside_base(name, architecture)


def is_beside_base(name: str, architecture: Architecture) -> bool:
    """Return whether a Megatron parameter is an adapter's or a value head's: no two models share it."""
    is_value_head = name.startswith(SECOND_HEAD) or (architecture.head == "value" and name.startswith(OUTPUT_LAYER))
    return is_adapter(name) or is_value_head


def by_name(parameters: Iterable[Parameter]) -> dict[str, Parameter]:
    """Return the parameters by their names under either layer spec."""
    return {name: parameter for parameter in parameters for name in parameter.names}


def hf_tensors_of(parameters: Iterable[Parameter]) -> dict[str, HFTensor]:
    """Return every Hugging Face tensor of the model by name, once, in the order of the tables."""
    return {hf.name: hf for parameter in parameters for hf in parameter.hf_tensors}


def hf_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the model's Hugging Face tensors, without a tied head, which is the embedding."""
    return {name: hf.shape for name, hf in hf_tensors_of(list_parameters(architecture)).items()}


class ExpertStack(NamedTuple):
    """One tensor of a layer's experts in files and engines: [experts, in, n x out] of the n matrices [out, in] of each
    expert, or [experts, n x out] of their biases. Outputs of the n alternate: g0 u0 g1 u1 ... for gate and up.

    Attributes:
        parts: names of the matrices, or biases, expert by expert.
    """

    shape: tuple[int, ...]
    parts: tuple[str, ...]


def expert_stacks(architecture: Architecture) -> dict[str, ExpertStack]:
    """Return the stacks of the model's experts by name; none if its family does not stack them."""
    experts = architecture.experts
    written = architecture.family.experts
    found: dict[str, ExpertStack] = {}
    if experts is None or written is None or not written.stacked:
        return found
    hidden = architecture.hidden_size
    count = experts.count
    for layer in range(experts.num_dense_layers, architecture.num_layers):
        prefix = f"model.layers.{layer}.{written.block}.experts."
        for stack, modules, into, out in (
            ("gate_up_proj", (written.gate, written.up), hidden, 2 * experts.ffn_size),
            ("down_proj", (written.down,), experts.ffn_size, hidden),
        ):
            for ending, kind, shape in (("", "weight", (count, into, out)), ("_bias", "bias", (count, out))):
                parts = tuple(f"{prefix}{expert}.{name}.{kind}" for expert in range(count) for name in modules)
                found[f"{prefix}{stack}{ending}"] = ExpertStack(shape, parts)
    return found


def linear_stacks(architecture: Architecture) -> dict[str, tuple[str, ...]]:
    """Return the parts of the tensors of linear attention that files and engines have whole, by name."""
    return {
        f"{stack}.weight": tuple(f"{part}.weight" for part in parts)
        for stack, parts in architecture.stacks.items()
        if f".{LINEAR_BLOCK}." in stack
    }


class StageSize(NamedTuple):
    """Numbers in the parameters that a rank of a pipeline stage holds: of experts, and of all else."""

    dense: int
    experts: int


def stage_sizes(
    architecture: Architecture,
    parallel: Parallel,
    *,
    trained: bool = False,
    beside_base: bool = False,
) -> list[StageSize]:
    """Return the sizes of each pipeline stage, without a vision tower; the model fits the layout.

    Args:
        trained: count trained parameters only (see `is_trained`).
        beside_base: count adapters and a value head only.
    """
    stages = stage_of_layers(architecture, parallel)
    local_experts = architecture.num_experts // parallel.expert
    dense = [0] * parallel.pipeline
    experts = [0] * parallel.pipeline
    cut = {"tensor": parallel.tensor, "expert_tensor": parallel.expert_tensor}
    for parameter in list_parameters(architecture, **cut, num_experts=1):  # all of a layer are alike
        name = parameter.names[0]
        hf = parameter.hf_tensors[0]
        is_embedding = name.startswith("embedding.")
        is_tied = hf.name == EMBEDDING and not is_embedding
        if parameter.is_buffer or name.startswith(TOWER) or (is_tied and parallel.pipeline == 1):
            continue
        if (trained and not is_trained(name, architecture)) or (beside_base and not is_beside_base(name, architecture)):
            continue
        outside = 0 if is_embedding else -1
        stage = outside if parameter.layer is None else stages[parameter.layer]
        if hf.expert is None:
            dense[stage] += prod(parameter.shard_shape)
        else:
            experts[stage] += prod(parameter.shard_shape) * local_experts
    return [StageSize(*sizes) for sizes in zip(dense, experts, strict=True)]


def tower_size(architecture: Architecture) -> int:
    """Return the number of parameters of a vision tower, 0 without one."""
    return sum(prod(one.shard_shape) for one in list_parameters(architecture) if one.names[0].startswith(TOWER))


def stage_of_layers(architecture: Architecture, parallel: Parallel) -> list[int]:
    """Return the pipeline stage of each layer; the model fits the layout."""
    chunks = parallel.num_chunks
    split = parallel.pipeline_split or (architecture.num_layers // chunks,) * chunks
    return [chunk % parallel.pipeline for chunk, layers in enumerate(split) for _ in range(layers)]


def padded_vocab_size(vocab_size: int, tensor: int) -> int:
    """Return the next multiple of `tensor`; rows from vocab_size on are padding."""
    return -(-vocab_size // tensor) * tensor


def _tower_table(architecture: Architecture) -> str:
    """Return the table of a vision tower, whose parameters have the names of their tensors; "" without one."""
    vision, kind = architecture.vision, architecture.family.vision
    if vision is None or kind is None:
        return ""
    table = tables.TOWERS[kind]
    table += "".join(tables.TOWER_BLOCKS[kind].format(index=index) for index in range(vision.sizes["depth"]))
    table += "".join(tables.DEEPSTACK_MERGER.format(index=index) for index in range(len(vision.deepstack_layers)))
    return re.sub(r"^(\S+)", rf"{TOWER}\1 <- {TOWER}\1", table, flags=re.M)


def _layer_tables(architecture: Architecture, num_experts: int) -> list[str]:
    """Return the table of each layer, with its first `num_experts` experts."""
    kinds = [
        (
            layer >= architecture.num_dense_layers,
            architecture.is_linear(layer),
            architecture.heads_of(layer).keys_are_values,
        )
        for layer in range(architecture.num_layers)
    ]
    of_kind = {kind: _layer_table(architecture, num_experts, *kind) for kind in set(kinds)}
    return [of_kind[kind] for kind in kinds]


def _layer_table(
    architecture: Architecture,
    num_experts: int,
    is_sparse: bool,
    is_linear: bool,
    keys_are_values: bool,
) -> str:
    """Return the table of a layer with or without experts, with either kind of attention, with or without values."""
    experts = architecture.family.experts if is_sparse else None
    latent = architecture.latent
    norms = architecture.family.norms
    lines = zip(tables.NORMS.strip().splitlines(), norms, strict=True)
    table = "".join(f"{line.format(*norms)}\n" for line, name in lines if name)
    if is_linear:
        table += tables.LINEAR_INPUTS[architecture.family.linear_attention or ""] + tables.LINEAR_ATTENTION
    elif latent:
        table += (tables.QUERY if latent.q_rank is None else tables.LATENT_QUERY) + tables.LATENT_ATTENTION
    else:
        table += tables.QUERIES_AND_KEYS + ("" if keys_are_values else tables.VALUES) + tables.ATTENTION_OUTPUT
        table += tables.QKV_BIAS if architecture.qkv_bias else ""
        table += tables.OUTPUT_BIAS if architecture.family.linear_bias else ""
        table += tables.SINKS if architecture.family.sinks else ""
        qk_norms = tables.ALL_HEADS_NORMS if architecture.family.norms_all_heads else tables.QK_NORMS
        table += qk_norms if architecture.qk_layernorm else ""
    table += _expert_table(experts, num_experts, architecture.family.linear_bias) if experts else tables.MLP
    table += tables.LAYER_SCALAR if architecture.family.layer_scalars else ""
    if architecture.lora:
        table += _adapter_table(table, architecture, architecture.lora)
    return table


def _adaptable(table: str, architecture: Architecture) -> Iterator[tuple[re.Match[str], str]]:
    """Yield the lines of the matrices that can have adapters, all except matrices of latent attention and of stacks of
    experts, each with its name in `Lora.target_modules`."""
    experts = architecture.family.experts
    roles = {experts.gate: "gate_proj", experts.up: "up_proj", experts.down: "down_proj"} if experts else {}
    for line in LINE.finditer(table):
        matrix, _, kind = line["hf"].rpartition(".")
        module = matrix.rpartition(".")[2]
        name = roles.get(module, module)
        is_latent = architecture.latent is not None and line["megatron"].startswith("self_attention.")
        is_stacked = experts is not None and experts.stacked and line["megatron"].startswith("mlp.experts.")
        if kind == "weight" and name in ADAPTED_MODULES and not is_latent and not is_stacked:
            yield line, name


def _adapter_table(table: str, architecture: Architecture, lora: Lora) -> str:
    """Return the table of a layer's adapters: one for each Hugging Face matrix, as a linear layer may hold several. A
    layer that is cut along its output cuts b [rank -> out]; a layer that is cut along its input cuts a [in -> rank]."""
    lines = []
    for line, name in _adaptable(table, architecture):
        if name in lora.modules:
            matrix = line["hf"].removesuffix(".weight")
            module = matrix.rpartition(".")[2]
            layers = []
            for weight in line["megatron"].split(" | "):
                layer, _, expert = weight.rpartition(".weight")
                layers.append(f"{layer}{ADAPTER}.local_experts.{expert}" if expert else f"{layer}{ADAPTER}")
            out, into = line["sizes"].split()
            for part, end, sizes in (("a", LORA_A, f"rank {into}"), ("b", LORA_B, f"{out} rank")):
                names = " | ".join(f"{layer}.{module}.{part}" for layer in layers)
                lines.append(f"{names} <- {matrix}{end} ({sizes})")
    return "\n".join(lines)


def _expert_table(experts: ExpertFormat, count: int, has_biases: bool) -> str:
    table = tables.ROUTER
    of_expert = tables.EXPERT
    if has_biases:
        table += tables.ROUTER_LINEAR_BIAS
        of_expert += tables.EXPERT_BIAS
    table += tables.SHARED_EXPERT if experts.shared else ""
    table += tables.SHARED_GATE if experts.shared_gated else ""
    table += tables.SCORE_BIAS if experts.router_bias else ""
    texts = [table, *(of_expert.replace("{expert}", str(expert)) for expert in range(count))]
    return "".join(texts).format(**vars(experts))


def _output_table(architecture: Architecture) -> str:
    value_output = tables.VALUE_OUTPUT + (tables.VALUE_OUTPUT_BIAS if architecture.value_bias else "")
    if architecture.head == "value":
        return value_output.format(module=OUTPUT_LAYER)
    # Tied, with pipeline stages: the last stage has a copy of the embedding for its output layer.
    table = tables.OUTPUT.format(tensor=EMBEDDING if architecture.tied else LM_HEAD)
    return table + (value_output.format(module=SECOND_HEAD) if architecture.head == "policy_value" else "")


def _sizes(architecture: Architecture, own: Heads) -> dict[str, int]:
    """Return the sizes of a layer with these heads by their names in the tables."""
    experts = architecture.experts
    latent = architecture.latent
    lora = architecture.lora
    heads = architecture.num_heads
    kv_heads = own.kv_heads
    head = own.size
    sizes = {
        "one": 1,
        "values": architecture.num_values,
        "hidden": architecture.hidden_size,
        "vocab": architecture.vocab_size,
    }
    sizes |= {"ffn": architecture.ffn_size, "rank": lora.rank if lora else 0}
    sizes |= {
        "head": head,
        "heads": heads,
        "q": heads * head,
        "kv_heads": kv_heads,
        "kv": kv_heads * head,
    }
    sizes["attended"] = heads * head
    if latent:
        sizes |= {"q": heads * (latent.plain_size + latent.rope_size), "q_latent": latent.q_rank or 0}
        sizes |= {"kv_latent": latent.kv_rank, "kv_latent_and_rope": latent.kv_rank + latent.rope_size}
        sizes |= {"k_and_v": heads * (latent.plain_size + latent.v_size), "v": heads * latent.v_size}
    if linear := architecture.linear:
        sizes |= {"q": 2 * heads * head, "kernel": linear.kernel, "linear_heads": linear.value_heads}  # q with its gate
        sizes |= {"linear_k": linear.keys, "linear_v": linear.values, "linear_v_head": linear.value_size}
        sizes |= {"linear_qkvz": 2 * (linear.keys + linear.values), "linear_ba": 2 * linear.value_heads}
        sizes |= {"linear_k_heads": linear.key_heads}
    if architecture.vision:
        sizes |= architecture.vision.sizes
    if experts:
        sizes |= {"experts": experts.count, "expert_ffn": experts.ffn_size, "shared_ffn": experts.shared_ffn_size or 0}
    return sizes


def _read(
    table: str,
    layer: int | None,
    sizes: Mapping[str, int],
    num_ranks: Mapping[str, int],
    joined: Collection[str],
) -> Iterator[Parameter]:
    """Read the parameters of a table in one layer.

    Args:
        num_ranks: what cuts a tensor -> over how many ranks.
        joined: Hugging Face tensors that are exported with the next one.
    """
    model, decoder = ("", "") if layer is None else (f"model.layers.{layer}.", f"decoder.layers.{layer}.")
    for megatron, lines in groupby(LINE.finditer(table), key=itemgetter("megatron")):
        number = EXPERT_NUMBER.search(megatron)
        expert = int(number[0]) if number else None
        hf_tensors = []
        for line in lines:
            symbols = [text.partition("/") for text in line["sizes"].split()]
            shape = tuple(sizes[size] for size, _, _ in symbols)
            shard = tuple(-(-sizes[size] // num_ranks[cut]) for size, _, cut in symbols)
            shard_dim = next((dim for dim, (_, _, cut) in enumerate(symbols) if cut), None)
            name = model + line["hf"]
            with_next = line["hf"] == tables.WITH_NEXT or name in joined
            hf_tensors.append(HFTensor(name, shape, shard, shard_dim, expert, with_next))
        groups = 1
        if megatron.startswith(("self_attention.linear_qkv.", "self_attention.conv1d")):
            heads = "linear_k_heads" if f".{LINEAR_BLOCK}." in hf_tensors[0].name else "kv_heads"
            groups = sizes[heads] // num_ranks["tp"]
        yield Parameter(tuple(decoder + name for name in megatron.split(" | ")), layer, tuple(hf_tensors), groups)

"""Bytes that a trained or frozen model takes on one GPU: parameters, gradients, optimizer states, activations, head.

The estimates are for TransformerEngine's layers, whose attention keeps no scores, with full micro-batches.
"""

from megappo.architecture.architecture import Architecture
from megappo.architecture.dtypes import DTYPES
from megappo.architecture.parameters import LOGITS_AT_A_TIME, StageSize, padded_vocab_size
from megappo.config.schema import Optim, Parallel
from megappo.config.values import TensorKind
from megappo.placement.layout import Layout

FP32_COPIES = 3
"""Memory for a chunk of logits, in fp32 copies of it: logits, probabilities, and both in the weights' dtype."""


def state_bytes(
    size: StageSize, trained: StageSize, layout: Layout, dtype: str, optim: Optim | None
) -> dict[TensorKind, float]:
    """Return the bytes that a rank keeps of a model from step to step.

    A parameter has, in bytes, its weight of `dtype` (fp32 4, bf16 2), an fp32 gradient 4, Adam's two moments 8 and, in
    bf16, the main parameter 4. A distributed optimizer cuts the last two over the ranks that hold the same parameters.

    Args:
        size: parameters of the rank's stage.
        trained: those of them that training changes.
        optim: None for a frozen model.
    Source: Megatron Core's developer guide, "Distributed Optimizer": bf16 6 + 12/d, fp32 8 + 8/d bytes per parameter.
    """
    nbytes = DTYPES[dtype].nbytes
    states: dict[TensorKind, float] = {"weights": nbytes * sum(size)}
    if optim is not None:
        replicas = layout.tensor * layout.context * layout.data // (layout.expert * layout.expert_tensor)
        cut = (layout.data * layout.context, replicas) if optim.distributed else (1, 1)
        per_parameter = 8 if nbytes == 4 else 12
        states["gradients"] = 4 * sum(trained)
        states["optimizer"] = per_parameter * (trained.dense / cut[0] + trained.experts / cut[1])
    return states


def layer_bytes(architecture: Architecture, parallel: Parallel, nbytes: int, *, layer: int) -> float:
    """Return the bytes that a layer keeps for its backward pass, per token that the rank holds of a micro-batch.

    These are inputs and outputs of both norms (sharded over tensor-parallel ranks if `sequence` is on); queries, keys,
    values and the output of attention, and queries and keys before their norms, if any; gate, up and their product of
    the MLP. A mixture of experts keeps its input, its output and the same three for each expert of a token, assuming
    that experts are chosen equally often.

    Args:
        nbytes: bytes of an element.
    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4, without
    attention's scores and dropout, for gated MLPs and fewer key-value heads.
    """
    heads, latent, experts = architecture.num_heads, architecture.latent, architecture.experts
    hidden, tensor = architecture.hidden_size, parallel.tensor
    between = 4 * hidden  # what lies between the cut matrices
    if latent:
        between += (latent.q_rank or 0) + latent.kv_rank
        cut = 2 * heads * (latent.plain_size + latent.rope_size + latent.v_size)
    else:
        cut = 2 * (heads + architecture.num_kv_heads) * architecture.head_size
        if architecture.family.qk_layernorm:
            cut += (heads + architecture.num_kv_heads) * architecture.head_size
    if layer < architecture.num_dense_layers:
        cut += 3 * architecture.ffn_size
    elif experts:
        between += experts.top_k * (2 * hidden * parallel.expert_tensor + 3 * experts.ffn_size)
        cut += 3 * (experts.shared_ffn_size or 0)
    return nbytes * (between / _sharing(parallel) + cut / tensor) + 4 * heads / tensor  # attention's normalisers: fp32


def _sharing(parallel: Parallel) -> int:
    """Return the number of ranks that share the tokens between the blocks."""
    return parallel.tensor if parallel.sequence else 1


def activation_bytes(
    architecture: Architecture,
    parallel: Parallel,
    nbytes: int,
    layers: list[int],
    *,
    tokens: float,
    in_flight: float,
    recompute: str,
) -> float:
    """Return the bytes that the backward pass needs of a stage's layers.

    With full recomputation only the input of each layer is kept, and one layer at a time is computed again; selective
    recomputation gains nothing where attention keeps no scores.

    Args:
        tokens: tokens of a micro-batch on the rank.
        in_flight: micro-batches whose backward pass is pending (see `micro_batches_in_flight`); 0 without a backward
            pass, which keeps the activations of one layer at a time.
        recompute: "none", "selective" or "full".
    """
    of_layers = [tokens * layer_bytes(architecture, parallel, nbytes, layer=layer) for layer in layers]
    largest = max(of_layers, default=0.0)
    if recompute == "full":
        inputs = tokens * nbytes * architecture.hidden_size / _sharing(parallel)
        return in_flight * len(layers) * inputs + largest
    return max(in_flight * sum(of_layers), largest)


def micro_batches_in_flight(layout: Layout, stage: int, most: int) -> float:
    """Return the most micro-batches whose activations a stage keeps at a time, counted in all of its layers.

    Source: Narayanan et al. 2021, section 2.2: one forward, one backward; Korthikanti et al. 2022, section 4.2.3, for
    several chunks on a stage, of which the first stage keeps 1 + (p - 1) / (p v) times as much.
    """
    stages, chunks = layout.pipeline, layout.virtual_pipeline
    if chunks == 1:
        return min(stages - stage, most)
    return min((2 * (stages - stage - 1) + (chunks - 1) * stages + 1) / chunks, most)


def head_bytes(
    architecture: Architecture,
    parallel: Parallel,
    nbytes: int,
    tokens: tuple[float, float],
    *,
    training: bool,
    makes_grad: bool,
) -> float:
    """Return the bytes of a policy's head: hidden states of all tokens and a copy of those that predict responses, with
    a gradient of each for the backward pass; and the logits of a limited number of words at a time.

    Args:
        tokens: tokens of a micro-batch on the rank; and those of them that predict a token of a response.
        makes_grad: the backward pass allocates a gradient of the head's weight instead of adding to the buffer.
    """
    hidden = sum(tokens) * nbytes * (2 if training else 1) + tokens[1] * 4 * training
    words = padded_vocab_size(architecture.vocab_size, parallel.tensor) / parallel.tensor
    logits = min(tokens[1] * words, LOGITS_AT_A_TIME["cuda"])
    grad = architecture.hidden_size * words * nbytes * makes_grad
    return architecture.hidden_size * hidden + logits * 4 * FP32_COPIES + grad

"""Bytes that a trained or frozen model takes on one GPU: parameters, gradients, optimizer states, activations, logits.

Reckoned for TransformerEngine's layers, whose attention keeps no scores, with full micro-batches.
"""

from megappo.architecture.architecture import Architecture
from megappo.architecture.dtypes import DTYPES
from megappo.architecture.parameters import StageSize, padded_vocab_size
from megappo.config.schema import Optim, Parallel, TensorKind
from megappo.placement.layout import Layout

HEAD_CHUNK = 1024
"""Tokens whose logits are worked on in fp32 at a time."""
FP32_COPIES = 4
"""Of such a chunk's logits: scaled, their log-probs, probabilities and gradient."""


def state_bytes(size: StageSize, layout: Layout, dtype: str, optim: Optim | None) -> dict[TensorKind, float]:
    """What a rank keeps of a model from step to step.

    A parameter has, in bytes, its weight of `dtype` (fp32 4, bf16 2), an fp32 gradient 4, Adam's two moments 8 and, in
    bf16, the main parameter 4. A distributed optimizer cuts the last two over the ranks that hold the same parameters.

    Args:
        size: of the rank's stage.
        optim: None for a frozen model.
    Source: Megatron Core's developer guide, "Distributed Optimizer": bf16 6 + 12/d, fp32 8 + 8/d bytes per parameter.
    """
    nbytes = DTYPES[dtype].nbytes
    states: dict[TensorKind, float] = {"weights": nbytes * sum(size)}
    if optim is not None:
        replicas = layout.tensor * layout.context * layout.data // (layout.expert * layout.expert_tensor)
        cut = (layout.data * layout.context, replicas) if optim.distributed else (1, 1)
        per_parameter = 8 if nbytes == 4 else 12
        states["gradients"] = 4 * sum(size)
        states["optimizer"] = per_parameter * (size.dense / cut[0] + size.experts / cut[1])
    return states


def layer_bytes(architecture: Architecture, parallel: Parallel, dtype: str, *, layer: int) -> float:
    """What a layer keeps for its backward pass, per token that the rank holds of a micro-batch.

    Inputs of both norms and their outputs (cut over tensor-parallel ranks where `sequence` is on); queries, keys,
    values and the output of attention; gate, up and their product of the MLP. Of a mixture of experts, for as many
    experts as a token goes to, if these are chosen equally often: its input, its output and the same three.

    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4, without
    attention's scores and dropout, for gated MLPs and fewer key-value heads.
    """
    nbytes, experts = DTYPES[dtype].nbytes, architecture.experts
    hidden, tensor = architecture.hidden_size, parallel.tensor
    shared = tensor if parallel.sequence else 1  # ranks that share out the tokens between the blocks
    numbers = 4 * hidden / shared + _attention(architecture) / tensor
    if layer < architecture.num_dense_layers:
        numbers += 3 * architecture.ffn_size / tensor
    elif experts:
        dispatched = experts.top_k * (2 * hidden * parallel.expert_tensor + 3 * experts.ffn_size)
        numbers += dispatched / shared + 3 * (experts.shared_ffn_size or 0) / tensor
    return nbytes * numbers + 4 * architecture.num_heads / tensor  # and attention's normalisers, in fp32


def _attention(architecture: Architecture) -> float:
    """Numbers per token: queries, keys, values, output, and latent vectors."""
    heads, latent = architecture.num_heads, architecture.latent
    if latent:
        keys = latent.plain_size + latent.rope_size
        return heads * (2 * keys + 2 * latent.v_size) + (latent.q_rank or 0) + latent.kv_rank
    return (2 * heads + 2 * architecture.num_kv_heads) * architecture.head_size


def activation_bytes(
    architecture: Architecture, parallel: Parallel, dtype: str, layers: list[int], *, tokens: float, in_flight: float
) -> dict[str, float]:
    """Of the layers of a stage: by recompute setting, "none", "selective" or "full", what the backward pass needs, and
    as "forward" what a pass without one does.

    With full recomputation only the input of each layer is kept, and one layer at a time is computed again; selective
    recomputation gains nothing where attention keeps no scores.

    Args:
        tokens: of a micro-batch, that the rank holds.
        in_flight: micro-batches whose backward pass is to come (see `micro_batches_in_flight`).
    """
    of_layers = [tokens * layer_bytes(architecture, parallel, dtype, layer=layer) for layer in layers]
    shared = parallel.tensor if parallel.sequence else 1
    inputs = tokens * DTYPES[dtype].nbytes * architecture.hidden_size / shared
    kept = sum(of_layers) * in_flight
    largest = max(of_layers, default=0.0)
    return {
        "none": kept,
        "selective": kept,
        "full": len(layers) * inputs * in_flight + largest,
        "forward": largest,
    }


def micro_batches_in_flight(layout: Layout, stage: int, most: int) -> float:
    """Micro-batches whose activations a stage keeps at most at a time, counted in all of its layers.

    Source: Narayanan et al. 2021, section 2.2: one forward, one backward; Korthikanti et al. 2022, section 4.2.3, for
    several chunks on a stage, of which the first stage keeps 1 + (p - 1) / (p v) times as much.
    """
    stages, chunks = layout.pipeline, layout.virtual_pipeline
    if chunks == 1:
        return min(stages - stage, most)
    return min((2 * (stages - stage - 1) + (chunks - 1) * stages + 1) / chunks, most)


def logits_bytes(
    architecture: Architecture,
    parallel: Parallel,
    dtype: str,
    *,
    tokens: float,
    responses: float,
    training: bool,
    full_kl: bool,
) -> float:
    """What the head of a policy takes besides its input: logits of all tokens, a copy of those that predict responses,
    for the backward pass a gradient of each, chunks of fp32; and for the full KL the reference's, too.

    Args:
        tokens: of a micro-batch, that the rank holds; `responses` of them predict one.
    """
    columns = padded_vocab_size(architecture.vocab_size, parallel.tensor) / parallel.tensor
    numbers = (tokens + responses) * ((2 if training else 1) + full_kl)
    return columns * (numbers * DTYPES[dtype].nbytes + min(tokens, HEAD_CHUNK) * 4 * FP32_COPIES * (1 + full_kl))

"""Tiny random Hugging Face models, and the same weights in Megatron's, for tests of layouts."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from tiny_shapes import SHAPE, VOCAB_SIZE
from transformers import AutoConfig, AutoModelForCausalLM

from megappo.architecture.families import HeadKind
from megappo.architecture.parsing import read_architecture
from megappo.config.schema import Model
from megappo.config.sections import Parallel
from megappo.models.gpt import ModelChunks, build_model
from megappo.models.heads import ValueHead, output_weight
from megappo.models.packed_attention import Pack
from megappo.placement.groups import ComponentGroups
from megappo.runtime import platform
from megappo.weights.load import load_hf

LENGTHS = (5, 1, 11, 7)


def hf_folder(
    folder: Path,
    model_type: str,
    dtype: torch.dtype = torch.float32,
    *,
    max_shard_size: int | str = "5GB",
    save_original_format: bool = True,
    **changes: object,
) -> Path:
    """Save a random Hugging Face model, every weight (norms and biases too) away from its initial value."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SHAPE | changes), dtype=dtype)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    move_buffers(model)
    model.save_pretrained(folder, max_shard_size=max_shard_size, save_original_format=save_original_format)
    return folder


def move_buffers(model: torch.nn.Module) -> None:
    """Give every router a bias that changes its choice of experts, in fp32 as in published models, and every layer of
    Gemma 4 a factor.

    transformers initializes these biases to 0 and the factors to 1.
    """
    generator = torch.Generator().manual_seed(3)
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias = 0.1 * torch.randn(len(module.e_score_correction_bias), generator=generator)
        if hasattr(module, "layer_scalar"):
            module.layer_scalar += torch.rand(1, generator=generator)


def hf_model(folder: Path) -> torch.nn.Module:
    """Load transformers' model; its padding token learns as others do, where transformers leaves its gradient out."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.get_input_embeddings().padding_idx = None
    return model


def sequences() -> list[torch.Tensor]:
    """Return random tokens in sequences of LENGTHS, the same on every call."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]


def build(
    folder: Path,
    parallel: Parallel,
    groups: ComponentGroups,
    *,
    head: HeadKind = "policy",
    recompute: str = "none",
    trained: bool = True,
    dtype: str = "fp32",
) -> ModelChunks:
    """Build this rank's Megatron model with the folder's weights."""
    architecture = read_architecture(folder, head)
    chunks = build_model(
        architecture,
        Model(path=str(folder), dtype=dtype),
        parallel,
        groups,
        recompute=recompute,
        trained=trained,
    )
    load_hf(chunks, folder, architecture, groups)
    return chunks


Sequences = Sequence[torch.Tensor]


def run(
    runners: Sequence[torch.nn.Module],
    groups: ComponentGroups,
    packs: Sequence[Sequences],
    on_output: Callable[[torch.Tensor, Sequences], object],
    forward_only: bool,
) -> list:
    """Run packs of sequences through Megatron's schedule; return `on_output` of [1, T, ...] on the last stage."""

    def step(iterator: object, model: torch.nn.Module) -> tuple:
        pack = next(iterator)
        tokens, positions, boundaries = inputs(pack)
        output = model(tokens, positions, None, packed_seq_params=boundaries)
        return output, lambda output, non_loss_data=False: on_output(output, pack)

    pipeline = groups.collection.pp
    config = runners[0].config
    with groups.active():
        return get_forward_backward_func(pipeline.size(), config.virtual_pipeline_model_parallel_size)(
            forward_step_func=step,
            data_iterator=[iter(packs) for _ in runners],
            model=list(runners),
            num_microbatches=len(packs),
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            pg_collection=groups.collection,
            p2p_communicator=P2PCommunicator(pipeline, config) if pipeline.size() > 1 else None,
        )


def inputs(pack: Sequences) -> tuple[torch.Tensor, torch.Tensor, Pack]:
    """Return tokens [1, T], positions [1, T] and boundaries of a pack, on the models' device."""
    device = platform.device()
    lengths = [len(tokens) for tokens in pack]
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    return torch.cat(list(pack))[None].to(device), positions[None], Pack(bounds, lengths, positions)


def outputs(chunks: ModelChunks, groups: ComponentGroups) -> torch.Tensor | None:
    """Logits or values of sequences(), packed as one: [1, T, ...] on the last stage, None on the others.

    The interleaved schedule demands a micro-batch for each stage: the others are shorter, and left out.
    """
    packs = [sequences(), *[sequences()[:2]] * (groups.layout.pipeline - 1)]
    parts = run([chunk.eval() for chunk in chunks], groups, packs, lambda output, pack: output, forward_only=True)
    if not parts:
        return None
    is_critic = isinstance(chunks[-1].output_layer, ValueHead)
    if is_critic:
        return parts[0].detach()
    logits, cap = parts[0].detach() @ output_weight(chunks[-1]).detach().T, chunks[-1].config.logit_cap
    return cap * torch.tanh(logits / cap) if cap else logits

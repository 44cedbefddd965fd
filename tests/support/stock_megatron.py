"""Checkpoints of stock megatron-core, as Megatron-LM writes them."""

from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig

SHAPE = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 200},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False},
}
PADDED_VOCABULARY = 256
"""Rows of two tensor-parallel ranks: Megatron-LM pads each to a multiple of 128."""
TOKENS = torch.arange(2, 34)[None]


def stock_model(tensor: int, pipeline: int) -> GPTModel:
    """Return this rank's shard of a random Llama, built of megatron-core's own layers as Megatron-LM does."""
    parallel_state.initialize_model_parallel(tensor, pipeline)
    get_cuda_rng_tracker().add("model-parallel-rng", 1)
    torch.manual_seed(7 + dist.get_rank())
    config = TransformerConfig(
        num_layers=SHAPE["num_hidden_layers"],
        hidden_size=SHAPE["hidden_size"],
        ffn_hidden_size=SHAPE["intermediate_size"],
        num_attention_heads=SHAPE["num_attention_heads"],
        num_query_groups=SHAPE["num_key_value_heads"],
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=PADDED_VOCABULARY,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    ).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # all ranks alike
            parameter.data += torch.linspace(-0.5, 0.5, parameter.numel())
    return model


def write_stock(rank: int, world_size: int, folder: Path, tensor: int, pipeline: int, logits: Path) -> None:
    """Write a checkpoint as Megatron-LM's torch_dist format has it."""
    model = stock_model(tensor, pipeline)
    state = {
        **{"model": model.sharded_state_dict(), "iteration": 7, "checkpoint_version": 3.0},
        "args": Namespace(tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline),
        "optimizer": ShardedTensor.from_rank_offsets("optimizer.distributed.x", torch.ones(3), (0, rank, world_size)),
        "rng_state": ShardedObject("rng_state", [{"random": (3, (1, 2), None)}], (world_size,), (rank,)),
    }
    path = folder / "iter_0000007"
    path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state, str(path))
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    if pipeline == 1:
        mask = torch.ones(1, 1, 32, 32).triu(1).bool()
        with torch.no_grad():
            found = model(TOKENS, torch.arange(32)[None], mask)
        parts = [torch.empty_like(found) for _ in range(tensor)]
        dist.all_gather(parts, found)
        torch.save(torch.cat(parts, -1)[..., : SHAPE["vocab_size"]], logits)

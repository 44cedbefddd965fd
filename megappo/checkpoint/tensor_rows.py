"""Parts of a component's tensors, read without the model and without the other tensors."""

from pathlib import Path

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException  # not an Exception

from megappo.checkpoint.folders import CheckpointError
from megappo.checkpoint.metadata import ComponentInfo
from megappo.checkpoint.safe_reading import SafeReader
from megappo.checkpoint.sharded import reason


def read_rows(folder: Path, info: ComponentInfo, name: str, start: int, stop: int) -> torch.Tensor:
    """Rows start:stop along dimension 0 of a tensor, in its dtype, whatever layout it was written in. In this process
    alone; of the files, the pieces that these rows lie in are read one by one.

    Args:
        info: of `folder`.
    Raises:
        CheckpointError: they cannot be read.
    """
    tensor = info.tensors[name]
    rows = torch.empty(stop - start, *tensor.shape[1:], dtype=tensor.dtype)
    offset = (start, *[0] * (rows.ndim - 1))
    part = ShardedTensor(name, rows, rows.dtype, tuple(rows.shape), tensor.shape, offset, axis_fragmentations=None)
    try:
        checkpoint.load(
            {name: CheckpointableShardedTensor.from_sh_ten(part)},
            storage_reader=SafeReader(folder),
            no_dist=True,
        )
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"cannot read {name} in {folder}: {reason(error)}; copy the checkpoint again") from error
    return rows

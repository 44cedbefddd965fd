"""Parameters of a module of our own, of which each tensor-parallel rank has a part, as checkpoints take them."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class CutParameters(torch.nn.Module):
    """A module whose own parameters dist_checkpointing saves and loads.

    Attributes:
        cut: name of a parameter -> the dimension that tensor-parallel ranks cut; they have the others whole.
        tp_group: these ranks.
    """

    cut: Mapping[str, int]
    tp_group: dist.ProcessGroup

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Return the state as Megatron's layers return it."""
        own = dict(self.named_parameters(recurse=False))
        groups = {"tp_group": self.tp_group, "dp_cp_group": (metadata or {})["dp_cp_group"]}
        return make_sharded_tensors_for_checkpoint(own, prefix, self.cut, sharded_offsets, **groups)

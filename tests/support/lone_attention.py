"""The torch layers' attention outside of a model."""

from collections.abc import Iterable
from types import SimpleNamespace

from megatron.core.process_groups_config import ProcessGroupCollection

from megappo.models.packed_attention import PackedAttention


def lone_attention(head_size: int, switches: Iterable[str], groups: ProcessGroupCollection) -> PackedAttention:
    """Return attention without windows and sinks."""
    config = SimpleNamespace(
        kv_channels=head_size,
        rotary_interleaved=False,
        softmax_type="vanilla",
        switches=frozenset(switches),
        window_size=None,
        window_attn_skip_freq=None,
    )
    return PackedAttention(config, groups, layer_number=1)

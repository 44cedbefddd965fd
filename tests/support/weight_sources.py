"""Weights for an engine without a Megatron model: any named tensors, in the given buckets."""

from collections.abc import Mapping

import torch

from megappo.config.model_sections import Lora
from megappo.config.schema import Config
from megappo.engines.client import EngineClient
from megappo.sync.ipc import AdapterHandles, HandleSender
from megappo.sync.sync import SyncStats, WeightSync
from megappo.sync.transport import Link
from megappo.weights.buckets import Bucket, NamedTensors, TensorSpec, num_bytes

SECTIONS = {"model": {"path": "m", "dtype": "fp32"}, "data": {"train_files": ["f"]}, "trainer": {"output_dir": "o"}}


class Given:
    """Source of whole tensors that already exist."""

    def __init__(self, weights: NamedTensors):
        self.weights = dict(weights)

    def gather(self, bucket: Bucket, flat: torch.Tensor | None = None) -> torch.Tensor:
        flat = torch.empty(num_bytes(bucket), dtype=torch.uint8) if flat is None else flat
        parts = [self.weights[tensor.name].detach().flatten().view(torch.uint8) for tensor in bucket]
        return flat.copy_(torch.cat(parts))


def specs(weights: NamedTensors) -> list[TensorSpec]:
    return [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in weights]


def handle_sender(client: EngineClient, tensor_parallel: int = 1, lora: Lora | None = None) -> HandleSender:
    """Return a sender for an engine of this process: of adapters, if their settings are given."""
    sections = SECTIONS | {"rollout": {"tensor_parallel": tensor_parallel}, "actor": {"lora": lora}}
    link = Link(Config.model_validate(sections), None, bucket_bytes=1, num_engines=1)
    return AdapterHandles(link, client) if lora else HandleSender(link, client)


def push(
    client: EngineClient,
    weights: NamedTensors,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    tensor_parallel: int = 1,
    bucket_bytes: int = 2**20,
) -> SyncStats:
    """Send tensors to an engine of this process."""
    sync = WeightSync(
        specs(weights),
        Given(weights),
        [handle_sender(client, tensor_parallel)],
        [],
        shapes,
        bucket_bytes=bucket_bytes,
        barrier=lambda: None,
        engines_keep=False,
    )
    return sync()

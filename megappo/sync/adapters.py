"""Send adapters (LoRA) alone to engines that have the model's other weights from model.path.

An engine takes an adapter whole, in place of the one before: its tensors come as one bucket.
"""

import hashlib
from collections.abc import Mapping

import torch

from megappo.architecture.parameters import LORA_A, LORA_B
from megappo.config.schema import Lora
from megappo.engines.client import EngineClient
from megappo.runtime import platform
from megappo.sync.ipc import HandleSender
from megappo.sync.transport import FLATTENED_BUCKET, Link, Receiver, Sender
from megappo.weights.buckets import Bucket, views
from megappo.weights.hf_folder import peft_config, staged, write_adapters


def adapter_shapes(shapes: Mapping[str, tuple[int, ...]], lora: Lora) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a model's adapters, from those of its own tensors."""
    found = {}
    for name, shape in shapes.items():
        matrix, _, kind = name.rpartition(".")
        if kind == "weight" and matrix.rpartition(".")[2] in lora.modules:
            found[matrix + LORA_A] = (lora.rank, shape[1])
            found[matrix + LORA_B] = (shape[0], lora.rank)
    return found


class AdapterHandles(HandleSender):
    """Hands adapters to an engine as handles, as `HandleSender` does weights.

    On a CPU SGLang reads some of them as late as the first request: they stay as they are until the engine has the next
    ones, because the two buffers take turns. With rollout.sync.verify the engine compares checksums the first time.
    """

    def __init__(self, link: Link, client: EngineClient | None):
        super().__init__(link, client)
        self._config = peft_config(link.config.actor.lora)
        self._verify = link.config.rollout.sync.verify
        self._checksums: dict[str, str] | None = None

    def open(self) -> None:
        """Do nothing: the engine's other weights stay."""

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        self._checksums = _checksums(bucket, flat) if self._verify else None
        super().send(bucket, flat)
        self._verify = False

    def _post(self, payloads: list[str]) -> None:
        body = {
            "config_dict": self._config,
            "serialized_named_tensors": payloads,
            "load_format": FLATTENED_BUCKET,
            "expected_checksums": self._checksums,
        }
        self.client.load_adapter("/load_lora_adapter_from_tensors", body)

    def close(self) -> None:
        if platform.has_cuda():
            torch.cuda.ipc_collect()


def _checksums(bucket: Bucket, flat: torch.Tensor) -> dict[str, str]:
    """Return each tensor's checksum as SGLang computes it."""
    parts = flat.cpu().split([tensor.nbytes for tensor in bucket])
    return {tensor.name: hashlib.sha256(part.numpy()).hexdigest() for tensor, part in zip(bucket, parts, strict=True)}


class AdapterWriter(Sender):
    """Writes adapters as a folder of PEFT."""

    def __init__(self, link: Link):
        self.link = link

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        with staged(self.link.folder) as folder:
            write_adapters(folder, views(bucket, flat), self.link.config.actor.lora, self.link.config.model.path)


class AdapterReader(Receiver):
    """Has an engine read the folder once it is complete."""

    def __init__(self, link: Link, client: EngineClient):
        self.folder = link.folder
        self.client = client

    def close(self) -> None:
        self.client.load_adapter("/load_lora_adapter", {"lora_path": str(self.folder)})

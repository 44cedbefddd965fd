"""Pass weights, or adapters alone, to engines through a folder that all nodes share. Slow; the last resort."""

import contextlib
import shutil

import torch

from megappo.architecture.model_folder import write_model_config
from megappo.engines.client import EngineClient
from megappo.sync.transport import Link, Receiver, Sender
from megappo.weights.buckets import Bucket, views
from megappo.weights.hf_folder import staged, temporary_folder, write_adapters
from megappo.weights.safetensors_io import ShardedWriter


class DiskWriter(Sender):
    """Writes the folder, a file for each bucket."""

    def __init__(self, link: Link):
        self.link = link
        self._staged = contextlib.ExitStack()

    def open(self) -> None:
        self._temporary = self._staged.enter_context(staged(self.link.folder))
        self._writer = ShardedWriter(self._temporary, self.link.bucket_bytes)

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        self._writer.add(views(bucket, flat))

    def close(self) -> None:
        self._writer.finish()
        write_model_config(self.link.architecture, self._temporary)
        self._staged.close()

    def abort(self) -> None:
        shutil.rmtree(temporary_folder(self.link.folder), ignore_errors=True)


class DiskReader(Receiver):
    """Has an engine read the folder once it is complete."""

    def __init__(self, link: Link, client: EngineClient):
        self.folder = link.folder
        self.client = client

    def close(self) -> None:
        # SGLang treats this as a whole update.
        body = {"model_path": str(self.folder), "flush_cache": not self.client.keeps_cache}
        self.client.post("/update_weights_from_disk", body, timeout=self.client.timeout)


class AdapterWriter(Sender):
    """Writes adapters as a PEFT folder."""

    def __init__(self, link: Link):
        self.link = link

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        with staged(self.link.folder) as folder:
            write_adapters(folder, views(bucket, flat), self.link.config.actor.lora, self.link.config.model.path)


class AdapterReader(DiskReader):
    """Has an engine read the adapters' folder once it is complete."""

    def close(self) -> None:
        self.client.load_adapter("/load_lora_adapter", {"lora_path": str(self.folder)})

"""Weights for engines through a Hugging Face folder, on a file system that all nodes share. Slow; the last resort."""

import contextlib
import shutil
from pathlib import Path

import torch

from megappo.architecture.architecture import Architecture
from megappo.architecture.files import write_model_config
from megappo.sync.handover import HandOver, Receiver
from megappo.weights.buckets import Bucket, views
from megappo.weights.safetensors_io import ShardedWriter
from megappo.weights.staging import staged, temporary_folder


class DiskWriter(HandOver):
    """Writes the folder, in files of up to `shard_bytes`; the rank is the actor's."""

    def __init__(self, folder: Path, architecture: Architecture, shard_bytes: int):
        self.folder = folder
        self.architecture = architecture
        self.shard_bytes = shard_bytes
        self._staged = contextlib.ExitStack()

    def open(self) -> None:
        self._temporary = self._staged.enter_context(staged(self.folder))
        self._writer = ShardedWriter(self._temporary, self.shard_bytes)

    def send(self, bucket: Bucket, flat: torch.Tensor | None) -> None:
        if flat is None:
            raise ValueError("weights are written by one of the actor's ranks")
        self._writer.add(views(bucket, flat))

    def close(self) -> None:
        self._writer.finish()
        write_model_config(self.architecture, self._temporary)
        self._staged.close()

    def abort(self) -> None:
        shutil.rmtree(temporary_folder(self.folder), ignore_errors=True)


class DiskReader(HandOver):
    """Lets an engine read the folder; the rank owns the engine."""

    needs_weights = False

    def __init__(self, receiver: Receiver, folder: Path):
        self.receiver = receiver
        self.folder = folder

    def send(self, bucket: Bucket, flat: torch.Tensor | None) -> None:
        pass  # it comes with the folder

    def settle(self) -> None:
        self.receiver.update_weights_from_disk(self.folder)

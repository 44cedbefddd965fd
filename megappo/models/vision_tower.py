"""Vision towers before a model: transformers' modules, frozen, whose features stand in for embeddings of tokens.

Each rank of the first pipeline stage has a whole tower, in host memory. Its weights are on the device only while a pass
computes features that are not kept.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megappo.architecture.architecture import Architecture
from megappo.architecture.vision import KEPT_BYTES, TOWER
from megappo.batch.images import Image, ImageSource
from megappo.errors import ActionableError
from megappo.models.packed_attention import Pack
from megappo.runtime import platform
from megappo.runtime.heartbeat import heartbeat
from megappo.weights.safetensors_io import HFFolder

PREFIX = TOWER.removesuffix(".")
_TOWERS: "WeakValueDictionary[tuple[Path, torch.dtype], VisionTower]" = WeakValueDictionary()
"""Towers of this process: models of one folder share one."""


def tower_of(architecture: Architecture, dtype: torch.dtype) -> "VisionTower":
    """Return the tower of the folder that an architecture was read from."""
    return _TOWERS.setdefault((architecture.file.parent.resolve(), dtype), VisionTower(architecture, dtype))


class VisionTower:
    """Vision tower of a model's folder, which is read when it is first needed, and features of images.

    Neither the tower nor an image changes, so features are kept from pass to pass, and from step to step.
    """

    def __init__(self, architecture: Architecture, dtype: torch.dtype):
        self._architecture = architecture
        self._dtype = dtype
        self._kept: dict[tuple, Tensor] = {}  # in the order of their last use

    @cached_property
    def module(self) -> torch.nn.Module:
        """Return transformers' module, with the folder's weights.

        Raises:
            ActionableError: the folder lacks a weight, or one is not finite.
        """
        from transformers import AutoConfig, AutoModel  # here, as this takes seconds
        from transformers.initialization import no_init_weights

        kind = f"{self._architecture.family.vision}_vision"
        values = dict(self._architecture.vision.config)
        values.pop("model_type", None)  # published ones have another
        with no_init_weights():
            module = AutoModel.from_config(AutoConfig.for_model(kind, **values), dtype=self._dtype)
        module.eval().requires_grad_(False)
        folder = self._architecture.file.parent
        with HFFolder(folder, self._architecture) as source:
            for name, parameter in module.named_parameters(prefix=PREFIX):
                heartbeat.beat()
                if name not in source.names():
                    raise ActionableError(f"{folder} lacks {name} of its vision tower: copy the folder again")
                parameter.copy_(source.read_finite(name))
        return module

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tower's parameters by their names in the model."""
        return self.module.named_parameters(prefix=PREFIX)

    def features(self, images: Sequence[Image], source: ImageSource) -> Tensor:
        """Return the features of images, one image after the other.

        Each is computed alone: so its features are the same in any micro-batch.

        Returns:
            [tokens, (1 + deepstack layers) x hidden], on the device: what stands in for embeddings, and what is added
            to the outputs of the first layers.
        """
        found = []
        for image in images:
            features = self._kept.pop(image.key, None)
            self._kept[image.key] = self._compute(image, source) if features is None else features
            found.append(self._kept[image.key])
        while sum(one.nbytes for one in self._kept.values()) > KEPT_BYTES:
            del self._kept[next(iter(self._kept))]
        return torch.cat(found).to(platform.device())

    def rest(self) -> None:
        """Take the weights off the device."""
        if "module" in vars(self):
            self.module.to("cpu")

    @torch.no_grad()
    def _compute(self, image: Image, source: ImageSource) -> Tensor:
        heartbeat.beat()
        device = platform.device()
        pixels = source.pixels(image).to(device, self._dtype)
        output = self.module.to(device)(pixels, grid_thw=torch.tensor([image.grid], device=device))
        return torch.cat([output.pooler_output, *output.get("deepstack_features", ())], dim=-1).cpu()


def add_vision(gpt: GPTModel, architecture: Architecture) -> None:
    """Let a chunk of a model read images: rotate by positions of three numbers, and take features for embeddings."""
    vision = architecture.vision
    if vision is None:
        return
    gpt.rotary_axes = torch.tensor(vision.frequency_axes)
    gpt.register_forward_pre_hook(_prepare, with_kwargs=True)
    if gpt.pre_process:
        gpt.tower = tower_of(architecture, gpt.config.params_dtype)
        for layer in gpt.decoder.layers[: len(vision.deepstack_layers)]:
            layer.register_forward_hook(_add_features, with_kwargs=True)


def towers(chunks: Sequence[GPTModel]) -> list[VisionTower]:
    """Return the vision tower of a rank's chunks, if it has one."""
    return [chunk.tower for chunk in chunks if hasattr(chunk, "tower")]


def _prepare(gpt: GPTModel, args: tuple, options: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Give a pack its angles and features before a chunk's forward pass.

    They are in the pack, not in the chunk: layers of an older micro-batch that are computed again find their own.
    """
    pack = options["packed_seq_params"]
    pack.angles = rotary_angles(pack.packed.mrope_positions, gpt.rotary_pos_emb.inv_freq, gpt.rotary_axes)
    if not gpt.pre_process or not pack.packed.images:
        return args, options
    places = (pack.image_slots >= 0).nonzero()[:, 0]
    features = gpt.tower.features(pack.packed.images, pack.image_source)[pack.image_slots[places]]
    pack.image_places = places
    embeddings, *pack.deepstack = features.split(gpt.config.hidden_size, dim=-1)
    embedded = gpt.embedding(input_ids=options["input_ids"], position_ids=options["position_ids"])
    return args, options | {"decoder_input": _at_places(embedded, pack, embeddings, adds=False)}


def _add_features(layer: torch.nn.Module, args: tuple, options: dict[str, Any], output: tuple) -> tuple:
    """Add the features of a layer to its output."""
    pack = options["packed_seq_params"]
    if not pack.packed.images:
        return output
    hidden, *others = output
    return _at_places(hidden, pack, pack.deepstack[layer.layer_number - 1], adds=True), *others


def _at_places(hidden: Tensor, pack: Pack, features: Tensor, *, adds: bool) -> Tensor:
    """Return hidden states [T, 1, H] with features [n, H] in the places of images, or added there."""
    index = pack.image_places, torch.zeros_like(pack.image_places)
    return hidden.index_put(index, features.to(hidden.dtype), accumulate=adds)


def rotary_angles(positions: Tensor, inv_freq: Tensor, axes: Tensor) -> Tensor:
    """Return the angles by which queries and keys are rotated, [T, 1, R], each twice: in either half of R.

    Args:
        positions: [3, T].
        inv_freq: [R / 2] frequencies. axes: [R / 2], the number that each takes of a position.
    """
    angles = positions[axes.to(positions.device)].T * inv_freq.to(positions.device)
    return torch.cat((angles, angles), dim=-1)[:, None]

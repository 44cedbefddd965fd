"""Checkpoints that keep the experts of a layer in two 3-D tensors, read under the names of the hub's per-expert ones.

transformers 5 holds a mixture of experts so, and writes it so where it is asked for its own format:

    mlp.experts.gate_up_proj [experts, 2 x ffn, hidden]     mlp.experts.down_proj [experts, hidden, ffn]
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from megappo.architecture.architecture import Architecture
from megappo.weights.safetensors_io import HFFolder, WeightsError


@dataclass(frozen=True)
class _View:
    """Rows [start, stop) of an expert's matrix in a stored tensor; without `expert` all of it, named otherwise."""

    stored: str
    expert: int | None = None
    start: int = 0
    stop: int = 0


class PerExpertFolder(HFFolder):
    """An `HFFolder` that has a tensor for each matrix of each expert, whichever way they are stored.

    Raises:
        WeightsError: also when a fused tensor has another shape than config.json gives.
    """

    def __init__(self, folder: str | Path, architecture: Architecture):
        super().__init__(folder)
        self._views: dict[str, _View] = {}
        for layer in range(architecture.num_layers if architecture.experts else 0):
            self._views |= self._views_of(f"model.layers.{layer}.", architecture)
        self._stored = {view.stored for view in self._views.values()}

    def names(self) -> set[str]:
        return (super().names() - self._stored) | set(self._views)

    def shape(self, name: str) -> tuple[int, ...]:
        view = self._views.get(name)
        if view is None or view.expert is None:
            return super().shape(view.stored if view else name)
        return view.stop - view.start, super().shape(view.stored)[2]

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        view = self._views.get(name)
        if view is None or view.expert is None:
            return super().read(view.stored if view else name, dim, start, stop)
        part = [slice(view.start, view.stop), slice(None)]
        first = part[dim].start or 0
        part[dim] = slice(first + start, part[dim].stop if stop is None else first + stop)
        return self._slice(view.stored)[view.expert, part[0], part[1]]

    def _views_of(self, layer: str, architecture: Architecture) -> dict[str, _View]:
        experts, written = architecture.experts, architecture.family.experts
        stored, hub = f"{layer}mlp.experts.", f"{layer}{written.block}."
        if f"{stored}gate_up_proj" not in super().names():
            return {}
        count, ffn, hidden = experts.count, experts.ffn_size, architecture.hidden_size
        self._check(f"{stored}gate_up_proj", (count, 2 * ffn, hidden))
        self._check(f"{stored}down_proj", (count, hidden, ffn))
        views = {}
        for expert in range(count):
            name = f"{hub}experts.{expert}."
            views[f"{name}{written.gate}.weight"] = _View(f"{stored}gate_up_proj", expert, 0, ffn)
            views[f"{name}{written.up}.weight"] = _View(f"{stored}gate_up_proj", expert, ffn, 2 * ffn)
            views[f"{name}{written.down}.weight"] = _View(f"{stored}down_proj", expert, 0, hidden)
        router = f"{layer}mlp.gate.weight"
        return views | ({f"{hub}gate.weight": _View(router)} if router in super().names() else {})

    def _check(self, name: str, expected: tuple[int, ...]) -> None:
        if name not in super().names():
            raise WeightsError(f"{self.folder} lacks {name}, which goes with the fused experts it has; copy it again")
        if super().shape(name) != expected:
            raise WeightsError(
                f"{name} in {self.folder} has shape {[*super().shape(name)]}, but its config.json gives {[*expected]}"
            )

"""Read the models of a run and count the parts of them that ranks hold, once each."""

from functools import cached_property
from math import prod

from megappo.architecture.architecture import Architecture
from megappo.architecture.families import HeadKind
from megappo.architecture.parameters import StageSize, list_parameters, stage_of_layers, stage_sizes
from megappo.architecture.parsing import read_architecture
from megappo.config.schema import Lora, Parallel
from megappo.estimate.flops import Flops, flops_of
from megappo.placement.components import ComponentSpec


class Shape:
    """A model with a head, in any layout."""

    def __init__(self, architecture: Architecture):
        self.architecture = architecture
        self._stages: dict[tuple[Parallel, bool], list[StageSize]] = {}

    @cached_property
    def flops(self) -> Flops:
        return flops_of(self.architecture)

    @property
    def size(self) -> int:
        """Parameters of the whole model."""
        return sum(self.stages(Parallel())[0])

    @property
    def expert_share(self) -> float:
        """Share of the parameters that experts have."""
        return self.stages(Parallel())[0].experts / self.size

    def stages(self, parallel: Parallel, *, trained: bool = False) -> list[StageSize]:
        """Return the size of each pipeline stage (see `stage_sizes`)."""
        if (parallel, trained) not in self._stages:
            self._stages[parallel, trained] = stage_sizes(self.architecture, parallel, trained=trained)
        return self._stages[parallel, trained]

    def largest(self, parallel: Parallel) -> int:
        """Return the number of elements of the largest tensor on a rank."""
        cut = {"tensor": parallel.tensor, "expert_tensor": parallel.expert_tensor}
        parameters = list_parameters(self.architecture, num_experts=1, **cut)  # experts are alike
        return max(prod(parameter.shard_shape) for parameter in parameters)

    def layers(self, parallel: Parallel, stage: int) -> list[int]:
        """Return the numbers of the layers that a stage holds."""
        stages = stage_of_layers(self.architecture, parallel)
        return [layer for layer, at in enumerate(stages) if at == stage]


class Shapes:
    """The models of a run's folders, each read once."""

    def __init__(self) -> None:
        self._shapes: dict[tuple[str, HeadKind, Lora | None], Shape] = {}

    def of(self, spec: ComponentSpec) -> Shape:
        """Return the shape of a component."""
        return self.at(spec.folder.value, spec.head, spec.lora)

    def at(self, folder: str, head: HeadKind = "policy", lora: Lora | None = None) -> Shape:
        """Return the shape of a folder's model with a head and adapters."""
        key = folder, head, lora
        if key not in self._shapes:
            self._shapes[key] = Shape(read_architecture(folder, head).with_lora(lora))
        return self._shapes[key]

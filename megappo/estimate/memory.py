"""What is on each GPU in each phase of a step, and what the host holds meanwhile."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megappo.architecture.fit import fit_errors
from megappo.config.checks import longest_row
from megappo.config.errors import ConfigError
from megappo.config.schema import Config, TensorKind
from megappo.config.transports import GPU_BUCKET_BYTES
from megappo.estimate.engine_memory import cache_bytes_per_token, weight_bytes, working_bytes
from megappo.estimate.gpus import GIB
from megappo.estimate.model_memory import (
    activation_bytes,
    logits_bytes,
    micro_batches_in_flight,
    state_bytes,
)
from megappo.estimate.shapes import Shapes
from megappo.placement.arithmetic import batch_splits
from megappo.placement.components import ComponentSpec, components_of
from megappo.placement.layout import Layout
from megappo.placement.ranks import placement_layouts
from megappo.placement.uses import NOTHING, uses_of

CONTEXT_BYTES, ENGINE_CONTEXT_BYTES, COMMUNICATOR_BYTES = 0.7 * GIB, 1.2 * GIB, 0.1 * GIB
"""Assumed, not measured: what CUDA, cuBLAS and kernels take of a GPU for a rank and for an engine, and NCCL for each
communicator."""
PROCESS_BYTES, ENGINE_PROCESS_BYTES = 5 * GIB, 6 * GIB
"""Of host memory, assumed: a rank and an engine's process for a GPU, libraries and all."""
GPUS_PER_NODE = 8
SAVED_BYTES_PER_PARAMETER = 12
"""Main parameter and moments in fp32, gathered on the first host of a model's data-parallel ranks."""
OVERHEAD = "contexts, communicators"
ROLLOUT, SYNC, PROBE, SAVE = "rollout", "sync", "probe", "save"

Ledger = dict[str, float]
"""What -> bytes."""


@dataclass(frozen=True)
class Place:
    """What is on a rank: the stage of each component that is there, and an engine or none. Many ranks are alike."""

    stages: tuple[tuple[str, int], ...]
    has_engine: bool


class MemoryEstimate:
    """A run's memory on GPUs of a size.

    Args:
        gpu_bytes: what a program can have of a GPU.
        shapes: models read before, of this config or another one.
    Attributes:
        places: each kind of rank, with the ranks of it.
        states: component -> what a rank of each of its stages keeps from step to step (see `state_bytes`).
        ledgers: phase by phase, what is on a GPU of each kind of rank.
    Raises:
        ConfigError: the placement is wrong, or a model's config.json.
    """

    def __init__(self, config: Config, world_size: int, gpu_bytes: float, shapes: Shapes | None = None):
        self.config = config
        self.gpu_bytes = gpu_bytes
        self.shapes = shapes or Shapes()
        self.specs = components_of(config)
        self._check_fit()
        self.layouts = placement_layouts(config, world_size)
        self.places = _places(self.layouts, world_size)
        self._splits = batch_splits(config, self.layouts)
        self.uses = uses_of(self.specs)
        self._policy = self.shapes.at(config.model.path)
        self.states = {name: self._states_of(name) for name in self.specs}
        self.ledgers = {place: self._on(place) for place in self.places}

    def _check_fit(self) -> None:
        errors: list[str] = []
        for spec in self.specs.values():
            key, parallel = spec.parallel
            errors += fit_errors(self.shapes.of(spec).architecture, parallel, f"{key}.{{}}".format)
        if errors:
            raise ConfigError(*errors)

    @property
    def phases(self) -> list[str]:
        """In the order of a step."""
        forward = [spec.forward.phase for spec in self.specs.values() if spec.forward]
        updates = [f"update_{name}" for name, spec in self.specs.items() if spec.training]
        return [ROLLOUT, *forward, *updates, SYNC, PROBE, SAVE]

    def peak(self) -> tuple[float, Place, str]:
        """The most bytes that any GPU holds, where, and in which phase."""
        found = (
            (sum(ledger.values()), place, phase)
            for place, ledgers in self.ledgers.items()
            for phase, ledger in ledgers.items()
        )
        return max(found, key=lambda one: one[0])

    def cache_tokens(self) -> float:
        """Tokens of which an engine can hold keys and values; below 0 where its weights alone are too many."""
        per_token = cache_bytes_per_token(self._policy.architecture, self.config.model.dtype, self.config.rollout)
        return (self._static_bytes - self._engine_weights) / per_token

    def host(self) -> dict[str, float]:
        """What -> bytes of host memory, of the node that holds most."""
        nodes: dict[int, Ledger] = defaultdict(lambda: defaultdict(float))
        for place, ranks in self.places.items():
            asleep = sum(self._copied(name, stage) for name, stage in place.stages)
            for rank in ranks:
                node = nodes[rank // GPUS_PER_NODE]
                node["processes"] += PROCESS_BYTES + place.has_engine * ENGINE_PROCESS_BYTES
                node["what sleeps"] += asleep
        for number, size in self._saved_on().items():
            nodes[number]["a save"] = size
        fullest = max(nodes.values(), key=lambda ledger: sum(ledger.values()))
        return dict(fullest)

    def _states_of(self, name: str) -> list[dict[TensorKind, float]]:
        spec, layout = self.specs[name], self.layouts[name]
        optim = spec.training.section.optim if spec.training else None
        sizes = self.shapes.of(spec).stages(spec.parallel.value)
        return [state_bytes(size, layout, self.config.model.dtype, optim) for size in sizes]

    def _on(self, place: Place) -> dict[str, Ledger]:
        return {phase: dict(self._entries(place, phase)) for phase in self.phases}

    def _entries(self, place: Place, phase: str) -> Iterator[tuple[str, float]]:
        for name, stage in place.stages:
            use = self.uses.get(SYNC if phase == PROBE else phase, {}).get(name, NOTHING)
            for kind, size in self.states[name][stage].items():
                if kind in use or kind not in self.specs[name].offload.value:
                    yield f"{name} {kind}", size
            yield from self._passes(name, stage, phase)
        if place.has_engine:
            yield from self._engine(place, phase)
        communicators = sum(_communicators(self.layouts[name]) for name, _ in place.stages) + 1
        contexts = (bool(place.stages) * CONTEXT_BYTES) + place.has_engine * ENGINE_CONTEXT_BYTES
        yield OVERHEAD, contexts + communicators * COMMUNICATOR_BYTES

    def _engine(self, place: Place, phase: str) -> Iterator[tuple[str, float]]:
        """An engine that shares its GPU with models sleeps while they are trained, and while a checkpoint is saved."""
        stays, holds_actor = not place.stages, "actor" in dict(place.stages)
        if stays or phase in (ROLLOUT, SYNC, PROBE):
            yield "engine weights", self._engine_weights
        if stays or phase in (ROLLOUT, PROBE):
            yield "KV cache", max(self._static_bytes - self._engine_weights, 0)
            policy = self._policy.architecture
            yield "engine working memory", working_bytes(policy, self.config.model.dtype, self.config.rollout)
        if phase == SYNC:
            yield (
                "sync buckets",
                (2 if holds_actor else 1) * (self.config.rollout.sync.bucket_bytes or GPU_BUCKET_BYTES),
            )

    @property
    def _engine_weights(self) -> float:
        return weight_bytes(self._policy.size, self.config.model.dtype, self.config.rollout)

    @property
    def _static_bytes(self) -> float:
        """SGLang's share for weights and cache, of what is free when it starts, which is before any model is built."""
        return self.config.rollout.mem_fraction_static * (self.gpu_bytes - CONTEXT_BYTES - ENGINE_CONTEXT_BYTES)

    def _passes(self, name: str, stage: int, phase: str) -> Iterator[tuple[str, float]]:
        """Activations and logits of a forward pass or an update."""
        spec = self.specs[name]
        is_forward = spec.forward is not None and phase == spec.forward.phase
        if not is_forward and phase != f"update_{name}":
            return
        shape, parallel, dtype = self.shapes.of(spec), spec.parallel.value, self.config.model.dtype
        recompute = spec.training.section.recompute if spec.training and not is_forward else "forward"
        tokens = spec.max_tokens.value / parallel.context
        in_flight = micro_batches_in_flight(self.layouts[name], stage, self._splits[name].micro_batches[1])
        layers = shape.layers(parallel, stage)
        kept = activation_bytes(shape.architecture, parallel, dtype, layers, tokens=tokens, in_flight=in_flight)
        yield f"{name} activations", kept[recompute]
        if stage == parallel.pipeline - 1 and spec.head != "value":
            share = self.config.rollout.max_response_length / longest_row(self.config)
            full_kl = _compares(spec, is_forward)
            yield (
                f"{name} logits",
                logits_bytes(
                    shape.architecture,
                    parallel,
                    dtype,
                    tokens=tokens,
                    responses=tokens * share,
                    training=not is_forward,
                    full_kl=full_kl,
                ),
            )

    def _copied(self, name: str, stage: int) -> float:
        """Pinned host memory; gradients are freed and made anew."""
        kinds = set(self.specs[name].offload.value) - {"gradients"}
        return sum(size for kind, size in self.states[name][stage].items() if kind in kinds)

    def _saved_on(self) -> dict[int, float]:
        """Node -> bytes of optimizer states that a save gathers there, of the component with most: one at a time."""
        most: dict[int, float] = defaultdict(float)
        for name, spec in self.specs.items():
            if spec.training is None:
                continue
            layout, sizes = self.layouts[name], self.shapes.of(spec).stages(spec.parallel.value)
            nodes: dict[int, float] = defaultdict(float)
            for stage, size in enumerate(sizes):
                for rank in layout.block(stage, 0):
                    nodes[rank // GPUS_PER_NODE] += SAVED_BYTES_PER_PARAMETER * sum(size)
            most |= {node: max(most[node], size) for node, size in nodes.items()}
        return most


def _compares(spec: ComponentSpec, is_forward: bool) -> bool:
    """Whether the head looks at the reference's logits, too."""
    if is_forward:
        return spec.forward is not None and "full_kl" in spec.forward.fields
    return spec.training is not None and spec.training.full_kl


def _places(layouts: Mapping[str, Layout], world_size: int) -> dict[Place, tuple[int, ...]]:
    stages: list[list[tuple[str, int]]] = [[] for _ in range(world_size)]
    for name, layout in layouts.items():
        if name != "rollout":
            for number, rank in enumerate(layout.ranks):
                stages[rank].append((name, number * layout.pipeline // len(layout.ranks)))
    engines, places = set(layouts["rollout"].ranks), defaultdict(list)
    for rank, held in enumerate(stages):
        places[Place(tuple(held), rank in engines)].append(rank)
    return {place: tuple(ranks) for place, ranks in places.items()}


def _communicators(layout: Layout) -> int:
    sizes = (layout.tensor, layout.context, layout.data, layout.pipeline, layout.expert * layout.expert_tensor)
    return sum(size > 1 for size in sizes)

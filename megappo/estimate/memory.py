"""What is on each GPU in each phase of a step, and what the host holds meanwhile."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from megappo.architecture.dtypes import DTYPES
from megappo.architecture.fit import fit_errors
from megappo.config.checks import longest_row
from megappo.config.errors import ConfigError
from megappo.config.kinds import TensorKind
from megappo.config.transports import GPU_BUCKET_BYTES
from megappo.estimate.engine_memory import EngineMemory
from megappo.estimate.gpus import GIB
from megappo.estimate.model_memory import activation_bytes, head_bytes, micro_batches_in_flight, state_bytes
from megappo.estimate.shapes import Shapes
from megappo.placement.arithmetic import batch_splits
from megappo.placement.components import build_order
from megappo.placement.layout import Layout
from megappo.placement.run_plan import RunPlan
from megappo.placement.uses import Use, uses_of

CONTEXT_BYTES, ENGINE_CONTEXT_BYTES, COMMUNICATOR_BYTES = 0.7 * GIB, 1.2 * GIB, 0.1 * GIB
"""Assumed, not measured: what CUDA, cuBLAS and kernels take of a GPU for a rank and for an engine, and NCCL for each
communicator."""
PROCESS_BYTES, ENGINE_PROCESS_BYTES = 5 * GIB, 6 * GIB
"""Of host memory, assumed: a rank and an engine's process for a GPU, libraries and all."""
GPUS_PER_NODE = 8
"""Where nobody says."""
STATE_BYTES_PER_PARAMETER = 12
"""Main parameter and moments in fp32, which a save copies to the hosts of the ranks that share them out."""
START, ROLLOUT, SYNC, PROBE, SAVE = "start", "rollout", "sync", "probe", "save"

Ledger = dict[str, float]
"""What -> bytes."""


@dataclass(frozen=True)
class Cluster:
    """The GPUs that a run's ranks are on, one each.

    Attributes:
        gpu_bytes: memory of a GPU that a program can use.
        gpus_per_node: ranks that share a node's memory and the links between its GPUs.
        shapes: of the models read so far.
    """

    gpu_bytes: float
    gpus_per_node: int = GPUS_PER_NODE
    shapes: Shapes = field(default_factory=Shapes)


@dataclass(frozen=True)
class Place:
    """What is on a rank: the stage of each component that is there, and an engine or none. Many ranks are alike."""

    stages: tuple[tuple[str, int], ...]
    has_engine: bool


class MemoryEstimate:
    """A run's memory.

    Args:
        plan: without an undecided offload.
    Attributes:
        phases: the start, then those of a step in their order.
        places: each kind of rank, with the ranks of it.
        ledgers: place -> phase -> what is on a GPU of such a rank.
    Raises:
        ConfigError: a model's config.json is wrong, or its layout does not fit the model.
    """

    def __init__(self, plan: RunPlan, cluster: Cluster):
        self.plan, self.config, self.cluster = plan, plan.config, cluster
        self.specs, self.layouts, config = plan.components, plan.layouts, plan.config
        self._check_fit()
        self.places = _places(self.layouts, plan.world_size, has_engines=not config.rollout.engines)
        self.splits = batch_splits(plan)
        policy, free = cluster.shapes.at(config.model.path), cluster.gpu_bytes - CONTEXT_BYTES - ENGINE_CONTEXT_BYTES
        self.engine = EngineMemory(config, policy.architecture, policy.size, free)
        self.uses = uses_of(self.specs)
        forward = [spec.forward.phase for spec in self.specs.values() if spec.forward]
        updates = [f"update_{name}" for name, spec in self.specs.items() if spec.training]
        self.phases = [START, ROLLOUT, *forward, *updates, SYNC, PROBE, SAVE]
        self.ledgers: dict[Place, dict[str, Ledger]] = {
            place: {phase: dict(self._entries(place, phase)) for phase in self.phases} for place in self.places
        }

    @property
    def bucket_bytes(self) -> int:
        """Weights that are handed to an engine at a time."""
        return self.config.rollout.sync.bucket_bytes or GPU_BUCKET_BYTES

    @property
    def num_buckets(self) -> int:
        """Buckets of a sync."""
        return math.ceil(self._policy_bytes / self.bucket_bytes)

    @property
    def _policy_bytes(self) -> float:
        return self.cluster.shapes.at(self.config.model.path).size * DTYPES[self.config.model.dtype].nbytes

    def _check_fit(self) -> None:
        errors: list[str] = []
        for spec in self.specs.values():
            key, parallel = spec.parallel
            errors += fit_errors(self.cluster.shapes.of(spec).architecture, parallel, f"{key}.{{}}".format)
        if errors:
            raise ConfigError(*errors)

    def peak(self, place: Place) -> tuple[float, str]:
        """The most bytes that a GPU holds, and in which phase."""
        return max((sum(ledger.values()), phase) for phase, ledger in self.ledgers[place].items())

    @property
    def fullest(self) -> Place:
        """Where the GPUs hold most."""
        return max(self.places, key=self.peak)

    def passes(self, phase: str) -> dict[str, Use]:
        """The components that a phase runs, each for a forward pass or (where it needs gradients) an update."""
        return {} if phase in (START, ROLLOUT, SYNC, PROBE, SAVE) else self.uses[phase]

    def states(self, name: str, stage: int) -> dict[TensorKind, float]:
        """What a rank of a component's stage keeps from step to step (see `state_bytes`)."""
        spec = self.specs[name]
        shape, parallel = self.cluster.shapes.of(spec), spec.parallel.value
        sizes = shape.stages(parallel)[stage], shape.stages(parallel, trained=True)[stage]
        optim = spec.training.section.optim if spec.training else None
        return state_bytes(*sizes, self.layouts[name], self.config.model.dtype, optim)

    def copied(self, name: str, stage: int) -> dict[TensorKind, float]:
        """What of that sleeps in pinned host memory; gradients are freed and made anew."""
        kinds = set(self.specs[name].offload.value) - {"gradients"}
        return {kind: size for kind, size in self.states(name, stage).items() if kind in kinds}

    def host(self) -> Ledger:
        """Host memory of the node that holds most."""
        nodes: dict[int, Ledger] = defaultdict(lambda: defaultdict(float))
        for place, ranks in self.places.items():
            asleep = sum(sum(self.copied(name, stage).values()) for name, stage in place.stages)
            for rank in ranks:
                node = nodes[rank // self.cluster.gpus_per_node]
                node["processes"] += PROCESS_BYTES + place.has_engine * ENGINE_PROCESS_BYTES
                node["what sleeps"] += asleep
        # Those in the background keep their copies' memory, else one component's goes before the next one's is taken.
        in_background = self.config.trainer.async_save
        for name, spec in self.specs.items():
            for number, size in self._saved(name).items() if spec.training else ():
                before = nodes[number]["a save"]
                nodes[number]["a save"] = before + size if in_background else max(before, size)
        fullest = max(nodes.values(), key=lambda held: sum(held.values()))
        return dict(fullest)

    @property
    def checkpoint_bytes(self) -> float:
        """Of all that is trained."""
        return sum(sum(self._saved(name).values()) for name, spec in self.specs.items() if spec.training)

    @property
    def loading_bytes(self) -> float:
        """Of a node's memory while a checkpoint is loaded: each rank holds a stored tensor, in fp32, at a time."""
        sizes = [self.cluster.shapes.of(spec).largest(spec.parallel.value) for spec in self.specs.values()]
        return 4 * max(sizes) * min(self.cluster.gpus_per_node, self.plan.world_size)

    def _building(self, place: Place) -> Ledger:
        """Models at the fullest moment of building them: each is built whole, then what sleeps leaves for the next."""
        stages, resident, moments = dict(place.stages), Ledger(), [Ledger()]
        for name in filter(stages.__contains__, build_order(self.specs)):
            states, spec = self.states(name, stages[name]), self.specs[name]
            moments.append(resident | {f"{name} {kind}": size for kind, size in states.items()})
            if spec.training and spec.training.section.optim.distributed:  # Megatron copies them into its buffer
                held = {f"{name} {kind}": states[kind] for kind in ("weights", "gradients")}
                copied = states["gradients"] * DTYPES[self.config.model.dtype].nbytes / 4
                moments.append(resident | held | {f"{name} weights, copied": copied})
            resident |= {f"{name} {kind}": size for kind, size in states.items() if kind not in spec.offload.value}
        return max(moments, key=lambda held: sum(held.values()))

    def _entries(self, place: Place, phase: str) -> Iterator[tuple[str, float]]:
        if phase == START:
            yield from self._building(place).items()
        for name, stage in place.stages if phase != START else ():
            use = self.uses.get(SYNC if phase == PROBE else phase, {}).get(name, {})
            for kind, size in self.states(name, stage).items():
                if kind in use or kind not in self.specs[name].offload.value:
                    yield f"{name} {kind}", size
            if name in self.passes(phase):
                yield from self._pass(name, stage, trains="gradients" in use)
        # An engine that shares its GPU with models sleeps while they are trained, and while a checkpoint is saved.
        stays_awake = not place.stages or self.config.rollout.sleep == "never"
        if place.has_engine and (stays_awake or phase in (ROLLOUT, SYNC, PROBE)):
            yield "engine weights", self.engine.weights
            if stays_awake or phase != SYNC:
                yield "KV cache", self.engine.cache
                yield "CUDA graphs", self.engine.graphs
                yield "engine working memory", self.engine.working
        buckets = 2 if "actor" in dict(place.stages) else int(place.has_engine)
        if phase == SYNC and buckets:  # where the actor is one is gathered while the one before is handed over
            yield "sync buckets", min(buckets * self.bucket_bytes, self._policy_bytes)
        # Each stage of the actor sends to engines that have GPUs of their own, in a group of its own.
        weights = self.layouts["actor"].pipeline if place.has_engine and not place.stages else 1
        communicators = sum(_communicators(self.layouts[name]) for name, _ in place.stages) + weights
        contexts = CONTEXT_BYTES + place.has_engine * ENGINE_CONTEXT_BYTES
        yield "CUDA contexts", contexts
        yield "NCCL communicators", communicators * COMMUNICATOR_BYTES

    def _pass(self, name: str, stage: int, *, trains: bool) -> Iterator[tuple[str, float]]:
        spec, nbytes = self.specs[name], DTYPES[self.config.model.dtype].nbytes
        shape, parallel = self.cluster.shapes.of(spec), spec.parallel.value
        tokens, most = spec.max_tokens.value / parallel.context, self.splits[name].micro_batches[1]
        size = activation_bytes(
            shape.architecture,
            parallel,
            nbytes,
            shape.layers(parallel, stage),
            tokens=tokens,
            in_flight=micro_batches_in_flight(self.layouts[name], stage, most) if trains else 0,
            recompute=spec.training.section.recompute if spec.training else "none",
        )
        yield f"{name} activations", size
        if stage == parallel.pipeline - 1 and spec.head != "value":
            predicting = tokens * self.config.rollout.max_response_length / longest_row(self.config)
            size = head_bytes(
                shape.architecture,
                parallel,
                nbytes,
                (tokens, predicting),
                training=trains,
                hands_grad_on=trains and spec.lora is None and self.layouts[name].data * parallel.context > 1,
            )
            yield f"{name} head", size

    def _saved(self, name: str) -> dict[int, float]:
        """Node -> bytes of a component that a save copies there."""
        spec, layout = self.specs[name], self.layouts[name]
        each = STATE_BYTES_PER_PARAMETER + DTYPES[self.config.model.dtype].nbytes
        nodes: dict[int, float] = defaultdict(float)
        of_stage = len(layout.ranks) // layout.pipeline
        for stage, size in enumerate(self.cluster.shapes.of(spec).stages(spec.parallel.value, trained=True)):
            numbers = size.dense * layout.tensor + size.experts * layout.expert * layout.expert_tensor
            for rank in layout.ranks[stage * of_stage : (stage + 1) * of_stage]:
                nodes[rank // self.cluster.gpus_per_node] += each * numbers / of_stage
        return nodes


def _places(layouts: Mapping[str, Layout], world_size: int, *, has_engines: bool) -> dict[Place, list[int]]:
    stages: list[list[tuple[str, int]]] = [[] for _ in range(world_size)]
    for name, layout in layouts.items():
        if name != "rollout":
            for number, rank in enumerate(layout.ranks):
                stages[rank].append((name, number * layout.pipeline // len(layout.ranks)))
    engines, places = set(layouts["rollout"].ranks if has_engines else ()), defaultdict(list)
    for rank, held in enumerate(stages):
        places[Place(tuple(held), rank in engines)].append(rank)
    return dict(places)


def _communicators(layout: Layout) -> int:
    """NCCL's communicators of a rank: one for each set of ranks that share collectives, those of a dimension, of the
    gradients or of the gradient norm."""
    sizes = {"t": layout.tensor, "c": layout.context, "d": layout.data, "p": layout.pipeline}
    spanned = {"".join(one for one in dims if sizes[one] > 1) for dims in ("t", "c", "cd", "p", "tcdp")}
    experts = layout.expert * layout.expert_tensor
    return len(spanned - {""}) + (2 if experts > 1 else 0)

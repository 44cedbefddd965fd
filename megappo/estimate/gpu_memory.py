"""Estimate the memory of each GPU in each phase of a step, and the memory of the hosts."""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from megappo.architecture.dtypes import DTYPES
from megappo.architecture.fit import fit_errors
from megappo.config.config_error import ConfigError
from megappo.config.eval_sets import longest_row
from megappo.config.transports import GPU_BUCKET_BYTES
from megappo.estimate.engine_memory import EngineMemory
from megappo.estimate.gpus import GIB
from megappo.estimate.placed_model import PlacedModel
from megappo.estimate.shapes import Shapes
from megappo.placement.batch_split import batch_splits
from megappo.placement.components import build_order
from megappo.placement.layout import Layout
from megappo.placement.run_plan import RunPlan
from megappo.placement.uses import DeviceUse, uses_of

CONTEXT_BYTES, ENGINE_CONTEXT_BYTES, COMMUNICATOR_BYTES = 0.7 * GIB, 1.2 * GIB, 0.1 * GIB
"""Assumed, not measured: GPU memory of CUDA, cuBLAS and kernels for a rank and for an engine, and of NCCL for each
communicator."""
PROCESS_BYTES, ENGINE_PROCESS_BYTES = 5 * GIB, 6 * GIB
"""Assumed: host memory of a rank and of an engine's process for a GPU, including libraries."""
GPUS_PER_NODE = 8
"""Default of `Cluster.gpus_per_node`."""
START, ROLLOUT, SYNC, PROBE, SAVE = "start", "rollout", "sync", "probe", "save"

Ledger = dict[str, float]
"""Entry -> bytes."""


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
class RankKind:
    """Ranks that hold the same: the pipeline stage of each model that is there, and an engine or none."""

    stages: tuple[tuple[str, int], ...]
    has_engine: bool


class MemoryEstimate:
    """The memory of a run.

    Args:
        plan: without an undecided offload.
    Attributes:
        models: the run's models on their ranks, by name.
        phases: the start, then those of a step in their order.
        places: each kind of rank, with its ranks.
        ledgers: place -> phase -> memory of a GPU of such a rank.
    Raises:
        ConfigError: a model's config.json is wrong, or its layout does not fit the model.
    """

    def __init__(self, plan: RunPlan, cluster: Cluster):
        self.plan, self.config, self.cluster = plan, plan.config, cluster
        self._check_fit()
        splits = batch_splits(plan)
        self.models: dict[str, PlacedModel] = {}
        for name, spec in plan.components.items():
            shape, dtype = cluster.shapes.of(spec), plan.config.model.dtype
            self.models[name] = PlacedModel(spec, plan.layouts[name], shape, splits[name], dtype)
        policy, free = cluster.shapes.at(plan.config.model.path), cluster.gpu_bytes
        self.engine = EngineMemory(
            plan.config, policy.architecture, policy.size, free - CONTEXT_BYTES - ENGINE_CONTEXT_BYTES
        )
        self.policy_bytes = policy.size * DTYPES[plan.config.model.dtype].nbytes
        self.uses = uses_of(plan.components)
        forward = [spec.forward.phase for spec in plan.components.values() if spec.forward]
        self.phases = [START, ROLLOUT, *forward, *(f"update_{name}" for name in plan.training), SYNC, PROBE, SAVE]
        self.places = self._places()
        self.ledgers: dict[RankKind, dict[str, Ledger]] = {
            place: {phase: dict(self._entries(place, phase)) for phase in self.phases} for place in self.places
        }

    def _check_fit(self) -> None:
        errors: list[str] = []
        for spec in self.plan.components.values():
            key, parallel = spec.parallel
            errors += fit_errors(self.cluster.shapes.of(spec).architecture, parallel, f"{key}.{{}}".format)
        if errors:
            raise ConfigError(*errors)

    def _places(self) -> dict[RankKind, list[int]]:
        has_engines = not self.config.rollout.engines
        engines = set(self.plan.layouts["rollout"].ranks if has_engines else ())
        stages = defaultdict[int, list[tuple[str, int]]](list)
        for name, model in self.models.items():
            for stage, ranks in enumerate(model.layout.stages):
                for rank in ranks:
                    stages[rank].append((name, stage))
        places = defaultdict[RankKind, list[int]](list)
        for rank in range(self.plan.world_size):
            places[RankKind(tuple(stages[rank]), rank in engines)].append(rank)
        return dict(places)

    @property
    def bucket_bytes(self) -> int:
        """Bytes of weights that an engine receives at a time."""
        return self.config.rollout.sync.bucket_bytes or GPU_BUCKET_BYTES

    @property
    def num_buckets(self) -> int:
        """Buckets of a sync."""
        return math.ceil(self.policy_bytes / self.bucket_bytes)

    @property
    def checkpoint_bytes(self) -> float:
        """Bytes of all trained models in a checkpoint."""
        return sum(sum(model.saved(self.cluster.gpus_per_node).values()) for model in self.models.values())

    @property
    def loading_bytes(self) -> float:
        """Host memory of a node while a checkpoint is loaded: each rank holds one stored tensor in fp32."""
        largest = max(model.shape.largest(model.parallel) for model in self.models.values())
        return 4 * largest * min(self.cluster.gpus_per_node, self.plan.world_size)

    @property
    def fullest(self) -> RankKind:
        """The place with the highest peak."""
        return max(self.places, key=self.peak)

    def peak(self, place: RankKind) -> tuple[float, str]:
        """Return the most bytes that a GPU holds, and in which phase."""
        return max((sum(ledger.values()), phase) for phase, ledger in self.ledgers[place].items())

    def passes(self, phase: str) -> dict[str, DeviceUse]:
        """Return the models that a phase runs: an update if the use has gradients, else a forward pass."""
        return {} if phase in (START, ROLLOUT, SYNC, PROBE, SAVE) else self.uses[phase]

    def host(self) -> Ledger:
        """Return the host memory of the node that holds most."""
        nodes = defaultdict[int, Ledger](lambda: defaultdict(float))
        for place, ranks in self.places.items():
            asleep = sum(sum(self.models[name].copied(stage).values()) for name, stage in place.stages)
            for rank in ranks:
                node = nodes[rank // self.cluster.gpus_per_node]
                node["processes"] += PROCESS_BYTES + place.has_engine * ENGINE_PROCESS_BYTES
                node["what sleeps"] += asleep
        for model in self.models.values():
            for number, size in model.saved(self.cluster.gpus_per_node).items():
                # A save in the background keeps all copies; else one model's are freed before the next one's are made.
                before, in_background = nodes[number]["a save"], self.config.trainer.async_save
                nodes[number]["a save"] = before + size if in_background else max(before, size)
        fullest = max(nodes, key=lambda number: sum(nodes[number].values()))
        return dict(nodes[fullest])

    def _entries(self, place: RankKind, phase: str) -> Iterator[tuple[str, float]]:
        if phase == START:
            yield from self._building(place).items()
        else:
            yield from self._model_entries(place, phase)
        if place.has_engine:
            yield from self._engine_entries(place, phase)
        num_buckets = 2 if "actor" in dict(place.stages) else int(place.has_engine)
        if phase == SYNC and num_buckets:  # the actor's ranks gather a bucket while they send the one before
            yield "sync buckets", min(num_buckets * self.bucket_bytes, self.policy_bytes)
        # Each stage of the actor sends to engines with GPUs of their own in a group of its own.
        sync_groups = self.models["actor"].layout.pipeline if place.has_engine and not place.stages else 1
        communicators = sum(_communicators(self.models[name].layout) for name, _ in place.stages) + sync_groups
        yield "CUDA contexts", CONTEXT_BYTES + place.has_engine * ENGINE_CONTEXT_BYTES
        yield "NCCL communicators", communicators * COMMUNICATOR_BYTES

    def _building(self, place: RankKind) -> Ledger:
        """Return the fullest moment of building: each model is built whole, then offloaded before the next one."""
        stages, resident, moments = dict(place.stages), Ledger(), [Ledger()]
        for name in build_order(self.plan.components):
            if name not in stages:
                continue
            model = self.models[name]
            built = {f"{name} {kind}": size for kind, size in model.states(stages[name]).items()}
            moments.append(resident | built)
            if model.section and model.section.optim.distributed:  # Megatron copies the weights into its buffer
                weights, gradients = f"{name} weights", f"{name} gradients"
                copied = {f"{weights}, copied": built[gradients] * model.nbytes / 4}
                moments.append(resident | {weights: built[weights], gradients: built[gradients]} | copied)
            offloaded = {f"{name} {kind}" for kind in model.spec.offload.value}
            resident |= {entry: size for entry, size in built.items() if entry not in offloaded}
        return max(moments, key=lambda held: sum(held.values()))

    def _model_entries(self, place: RankKind, phase: str) -> Iterator[tuple[str, float]]:
        uses = self.uses.get(SYNC if phase == PROBE else phase, {})
        response_share = self.config.rollout.max_response_length / longest_row(self.config)
        for name, stage in place.stages:
            model, use = self.models[name], uses.get(name, {})
            for kind, size in model.states(stage).items():
                if kind in use or kind not in model.spec.offload.value:
                    yield f"{name} {kind}", size
            if name in self.passes(phase):
                trains = "gradients" in use
                yield f"{name} activations", model.activations(stage, trains=trains)
                if stage == model.layout.pipeline - 1 and model.spec.head != "value":
                    yield f"{name} head", model.head(response_share, trains=trains)

    def _engine_entries(self, place: RankKind, phase: str) -> Iterator[tuple[str, float]]:
        """Yield the memory of an engine, which sleeps while models on its GPUs are trained or saved."""
        stays_awake = not place.stages or self.config.rollout.sleep == "never"
        if stays_awake or phase in (ROLLOUT, SYNC, PROBE):
            yield "engine weights", self.engine.weights
        if stays_awake or phase in (ROLLOUT, PROBE):
            yield "KV cache", self.engine.cache
            yield "CUDA graphs", self.engine.graphs
            yield "engine working memory", self.engine.working


def _communicators(layout: Layout) -> int:
    """Return the NCCL communicators of a rank: one for each set of ranks that share collectives, those of a dimension,
    of the gradients or of the gradient norm."""
    sizes = {"t": layout.tensor, "c": layout.context, "d": layout.data, "p": layout.pipeline}
    spanned = {"".join(one for one in dims if sizes[one] > 1) for dims in ("t", "c", "cd", "p", "tcdp")}
    experts = layout.expert * layout.expert_tensor
    return len(spanned - {""}) + (2 if experts > 1 else 0)

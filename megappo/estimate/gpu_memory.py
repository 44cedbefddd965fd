"""Estimate the memory of each GPU in each phase of a step, and the memory of the hosts."""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from megappo.architecture.architecture import DTYPES
from megappo.architecture.fit import fit_errors
from megappo.config.config_error import ConfigError
from megappo.config.eval_sets import longest_row
from megappo.config.methods import GPU_BUCKET_BYTES
from megappo.config.schema import Config
from megappo.estimate.gpus import GIB, GPUS_PER_NODE
from megappo.estimate.placed_model import PlacedModel, Shape, Shapes
from megappo.placement.components import DeviceUse, build_order, uses_of
from megappo.placement.layout import Layout
from megappo.placement.run_plan import RunPlan

CONTEXT_BYTES, ENGINE_CONTEXT_BYTES, COMMUNICATOR_BYTES = 0.7 * GIB, 1.2 * GIB, 0.1 * GIB
"""Assumed, not measured: GPU memory of CUDA, cuBLAS and kernels for a rank and for an engine, and of NCCL for each
communicator."""
PROCESS_BYTES, ENGINE_PROCESS_BYTES = 5 * GIB, 6 * GIB
"""Assumed: host memory of a rank and of an engine's process for a GPU, including libraries."""
PREFILL_CHUNK = 8192
"""Tokens of prompts that an engine computes at a time, on GPUs of 80 GB and more."""
GRAPH_BYTES = 2 * 2**20
"""Bytes of CUDA graphs per sequence of the largest batch. Source: SGLang 0.5.23, arg_groups/memory_hook.py."""
LAYER_BUFFERS = 3
"""Assumed: tensors of a layer's width, and of its MLP's, that an engine holds at a time."""
FP32_LOGITS = 3
"""Copies of a batch's logits that sampling makes."""
START, ROLLOUT, SYNC, PROBE, SAVE = "start", "rollout", "sync", "probe", "save"

NOT_TORCH = (
    *("engine weights", "KV cache", "CUDA graphs", "engine working memory"),
    *("CUDA contexts", "NCCL communicators"),
)
"""Entries that torch's allocator in a rank does not hold."""

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


class EngineMemory:
    """Bytes of one SGLang engine on each of its GPUs.

    Args:
        policy: the model that it serves.
        free_bytes: free memory of a GPU when the engine starts, before any model is built.
    Attributes:
        weights: the policy's, sharded over the engine's GPUs.
        cache: keys and values, which fill the rest of SGLang's share of `free_bytes`.
        cache_per_token: bytes of a token in the cache.
        cache_tokens: tokens that the cache can hold; below 0 if the weights alone are too large.
        graphs: CUDA graphs of decoding.
        working: a layer's activations for a chunk of prompts, and logits to sample from.
    """

    def __init__(self, config: Config, policy: Shape, free_bytes: float):
        rollout, architecture, nbytes = config.rollout, policy.architecture, DTYPES[config.model.dtype].nbytes
        experts, latent = architecture.experts, architecture.latent
        self.weights = policy.size * nbytes / rollout.tensor_parallel
        if latent:  # each GPU caches the whole latent vector
            cached: float = latent.kv_rank + latent.rope_size
        else:  # keys and values, whose heads are repeated if there are fewer than GPUs
            cached = 2 * max(architecture.num_kv_heads / rollout.tensor_parallel, 1) * architecture.head_size
        self.cache_per_token = nbytes * architecture.num_layers * cached
        room = (rollout.mem_fraction_static * free_bytes - self.weights) / self.cache_per_token
        self.cache_tokens = min(room, rollout.max_total_tokens or room)
        self.cache = max(self.cache_tokens, 0) * self.cache_per_token
        self.graphs = rollout.max_running_requests * GRAPH_BYTES
        widest = max(architecture.ffn_size, experts.top_k * experts.ffn_size if experts else 0)
        layer = LAYER_BUFFERS * (architecture.hidden_size + widest / rollout.tensor_parallel)
        sampled = rollout.max_running_requests * architecture.vocab_size * 4 * FP32_LOGITS
        self.working = sampled + PREFILL_CHUNK * nbytes * layer


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
        rank_kinds: each kind of rank, with its ranks.
        ledgers: kind of rank -> phase -> memory of a GPU of such a rank.
    Raises:
        ConfigError: a model's config.json is wrong, or its layout does not fit the model.
    """

    def __init__(self, plan: RunPlan, cluster: Cluster):
        self.plan, self.config, self.cluster = plan, plan.config, cluster
        self._check_fit()
        splits, dtype = plan.batch_splits, plan.config.model.dtype
        self.models: dict[str, PlacedModel] = {}
        for name, spec in plan.components.items():
            self.models[name] = PlacedModel(spec, plan.layouts[name], cluster.shapes.of(spec), splits[name], dtype)
        policy = cluster.shapes.at(plan.config.model.path)
        self.engine = EngineMemory(plan.config, policy, cluster.gpu_bytes - CONTEXT_BYTES - ENGINE_CONTEXT_BYTES)
        self.policy_bytes = policy.size * DTYPES[dtype].nbytes
        self.uses = uses_of(plan.components)
        forward = [spec.forward.phase for spec in plan.components.values() if spec.forward]
        self.phases = [START, ROLLOUT, *forward, *(f"update_{name}" for name in plan.training), SYNC, PROBE, SAVE]
        self.rank_kinds = self._rank_kinds()
        self.ledgers: dict[RankKind, dict[str, Ledger]] = {}
        for rank_kind in self.rank_kinds:
            self.ledgers[rank_kind] = {phase: dict(self._entries(rank_kind, phase)) for phase in self.phases}

    def _check_fit(self) -> None:
        errors: list[str] = []
        for spec in self.plan.components.values():
            key, parallel = spec.parallel
            errors += fit_errors(self.cluster.shapes.of(spec).architecture, parallel, f"{key}.{{}}".format)
        if errors:
            raise ConfigError(*errors)

    def _rank_kinds(self) -> dict[RankKind, list[int]]:
        rank_kinds = defaultdict[RankKind, list[int]](list)
        for rank in range(self.plan.world_size):
            coordinates = {name: layout.coordinates(rank) for name, layout in self.plan.layouts.items()}
            has_engine = coordinates.pop("rollout") is not None and not self.config.rollout.engines
            stages = tuple((name, found.stage) for name, found in coordinates.items() if found is not None)
            rank_kinds[RankKind(stages, has_engine)].append(rank)
        return dict(rank_kinds)

    @property
    def bucket_bytes(self) -> int:
        """Bytes of weights that an engine receives at a time."""
        return self.config.rollout.sync.bucket_bytes or GPU_BUCKET_BYTES

    @property
    def num_buckets(self) -> int:
        """Buckets of a sync."""
        return math.ceil(self.policy_bytes / self.bucket_bytes)

    @property
    def fullest(self) -> RankKind:
        """The kind of rank with the highest peak."""
        return max(self.rank_kinds, key=self.peak)

    def peak(self, rank_kind: RankKind) -> tuple[float, str]:
        """Return the most bytes that a GPU holds, and in which phase."""
        return max((sum(ledger.values()), phase) for phase, ledger in self.ledgers[rank_kind].items())

    def allocated(self) -> dict[str, float]:
        """Return phase -> bytes that torch's allocator should hold at most, on the rank that has most."""
        held: dict[str, float] = {}
        for ledgers in self.ledgers.values():
            for phase, ledger in ledgers.items():
                of_torch = sum(size for entry, size in ledger.items() if entry not in NOT_TORCH)
                held[phase] = max(held.get(phase, 0.0), of_torch)
        return held

    def passes(self, phase: str) -> dict[str, DeviceUse]:
        """Return the models that a phase runs: an update if the use has gradients, else a forward pass."""
        return {} if phase in (START, ROLLOUT, SYNC, PROBE, SAVE) else self.uses[phase]

    def host(self) -> Ledger:
        """Return the host memory of the node that holds most."""
        nodes = defaultdict[int, Ledger](lambda: defaultdict(float))
        for rank_kind, ranks in self.rank_kinds.items():
            asleep = sum(sum(self.models[name].copied(stage).values()) for name, stage in rank_kind.stages)
            for rank in ranks:
                node = nodes[rank // self.cluster.gpus_per_node]
                node["processes"] += PROCESS_BYTES + rank_kind.has_engine * ENGINE_PROCESS_BYTES
                node["offloaded states"] += asleep
        # A save in the background keeps all copies; else one model's are freed before the next one's are made.
        combined = sum if self.config.trainer.async_save else max
        saves = [model.saved(self.cluster.gpus_per_node) for model in self.models.values()]
        for number, node in nodes.items():
            node["checkpoint copies"] = combined([saved.get(number, 0.0) for saved in saves])
        fullest = max(nodes, key=lambda number: sum(nodes[number].values()))
        return dict(nodes[fullest])

    def _entries(self, rank_kind: RankKind, phase: str) -> Iterator[tuple[str, float]]:
        yield from (self._building(rank_kind).items() if phase == START else self._model_entries(rank_kind, phase))
        if rank_kind.has_engine:
            yield from self._engine_entries(rank_kind, phase)
        num_buckets = 2 if "actor" in dict(rank_kind.stages) else int(rank_kind.has_engine)
        if phase == SYNC and num_buckets:  # the actor's ranks gather a bucket while they send the one before
            yield "sync buckets", min(num_buckets * self.bucket_bytes, self.policy_bytes)
        # Each stage of the actor sends to engines with GPUs of their own in a group of its own.
        sync_groups = self.models["actor"].layout.pipeline if rank_kind.has_engine and not rank_kind.stages else 1
        communicators = sum(_communicators(self.models[name].layout) for name, _ in rank_kind.stages) + sync_groups
        yield "CUDA contexts", CONTEXT_BYTES + rank_kind.has_engine * ENGINE_CONTEXT_BYTES
        yield "NCCL communicators", communicators * COMMUNICATOR_BYTES

    def _building(self, rank_kind: RankKind) -> Ledger:
        """Return the fullest moment of building: each model is built whole, then offloaded before the next one."""
        stages = dict(rank_kind.stages)
        resident: Ledger = {}
        moments: list[Ledger] = [{}]
        for name in filter(stages.__contains__, build_order(self.plan.components)):
            model = self.models[name]
            states = model.states(stages[name])
            moments.append(resident | {f"{name} {kind}": size for kind, size in states.items()})
            if model.settings and model.settings.optim.distributed:  # Megatron copies the weights into its buffer
                copied = {f"{name} weights, copied": states["gradients"] * model.nbytes / DTYPES["fp32"].nbytes}
                kept = {f"{name} {kind}": states[kind] for kind in ("weights", "gradients")}
                moments.append(resident | kept | copied)
            staying = states.keys() - set(model.spec.offload.value)
            resident |= {f"{name} {kind}": size for kind, size in states.items() if kind in staying}
        return max(moments, key=lambda held: sum(held.values()))

    def _model_entries(self, rank_kind: RankKind, phase: str) -> Iterator[tuple[str, float]]:
        uses = self.uses.get(SYNC if phase == PROBE else phase, {})
        response_share = self.config.rollout.max_response_length / longest_row(self.config)
        for name, stage in rank_kind.stages:
            model, use = self.models[name], uses.get(name, {})
            for kind, size in model.states(stage).items():
                if kind in use or kind not in model.spec.offload.value:
                    yield f"{name} {kind}", size
            if name in self.passes(phase):
                trains = "gradients" in use
                yield f"{name} activations", model.activations(stage, trains=trains)
                if stage == model.layout.pipeline - 1 and model.spec.head != "value":
                    yield f"{name} head", model.head(response_share, trains=trains)

    def _engine_entries(self, rank_kind: RankKind, phase: str) -> Iterator[tuple[str, float]]:
        """Yield the memory of an engine, which sleeps while models on its GPUs are trained or saved."""
        stays_awake = not rank_kind.stages or self.config.rollout.sleep == "never"
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
    return len(spanned - {""}) + (2 if layout.expert_run > 1 else 0)

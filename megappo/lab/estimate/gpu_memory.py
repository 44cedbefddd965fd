"""Estimate the memory of each GPU in each phase of a step, and the memory of the hosts."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megappo.architecture.architecture import DTYPES, Architecture
from megappo.architecture.fit import fit_errors
from megappo.architecture.vision import KEPT_BYTES
from megappo.config.config_error import ConfigError
from megappo.config.eval_sets import longest_response, longest_row
from megappo.config.methods import GPU_BUCKET_BYTES
from megappo.config.schema import Config
from megappo.config.sections import Parallel
from megappo.lab.estimate.placed_model import PlacedModel, Shapes
from megappo.placement.components import build_order, uses_of
from megappo.placement.layout import Layout
from megappo.placement.run_plan import RunPlan
from megappo.runtime.gpus import GIB, GPUS_PER_NODE

CONTEXT_BYTES, ENGINE_CONTEXT_BYTES, COMMUNICATOR_BYTES = 0.7 * GIB, 1.2 * GIB, 0.1 * GIB
"""Assumed, not measured: GPU memory of CUDA, cuBLAS and kernels for a rank and for an engine, and of NCCL for each
communicator."""
PROCESS_BYTES, ENGINE_PROCESS_BYTES = 5 * GIB, 6 * GIB
"""Assumed: host memory of a rank and of an engine's process for a GPU, including libraries."""
QUEUED_TOKEN_BYTES = 100
"""Host memory of a token of a response that waits for training: Python's objects of its number, log-prob, reward, turn
and version."""
PREFILL_CHUNK = 8192
"""Tokens of prompts that an engine computes at a time, on GPUs of 80 GB and more."""
GRAPH_BYTES = 2 * 2**20
"""Bytes of CUDA graphs per sequence of the largest batch. Source: SGLang 0.5.23, arg_groups/memory_hook.py."""
LAYER_BUFFERS = 3
"""Assumed: tensors of a layer's width, and of its MLP's, that an engine holds at a time."""
FP32_LOGITS = 3
"""Copies of a batch's logits that sampling makes."""
START, ROLLOUT, SYNC, PROBE, SAVE = "start", "rollout", "sync", "probe", "save"

MARGIN_BYTES = 10 * GIB
"""Free memory that a plan should keep for what is assumed. Others measured 0.6 to 1 GB for one communicator of eight
GPUs (https://github.com/sgl-project/sglang/pull/30908, https://github.com/vllm-project/vllm/pull/51485), which does not
sleep with an engine."""

NOT_TORCH = (
    *("engine weights", "KV cache", "CUDA graphs", "engine working memory"),
    *(ASSUMED := ("CUDA contexts", "NCCL communicators")),
)
"""Entries that torch's allocator in a rank does not hold; ASSUMED: entries that are assumed, not derived."""

Ledger = dict[str, float]
"""Entry -> bytes."""


@dataclass(frozen=True)
class Cluster:
    """The GPUs that a run's ranks are on, one each.

    Attributes:
        gpu_bytes: memory of a GPU that a program can use.
        gpus_per_node: ranks that share a node's memory and the links between its GPUs.
        shapes: shapes of the models read so far.
    """

    gpu_bytes: float
    gpus_per_node: int = GPUS_PER_NODE
    shapes: Shapes = field(default_factory=Shapes)


class EngineMemory(NamedTuple):
    """Bytes of one SGLang engine on each of its GPUs.

    Attributes:
        weights: the policy's, sharded over the engine's GPUs.
        states: states of linear attention, for all running requests.
        cache_per_token: keys and values of a token.
        cache_tokens: tokens that the cache can hold; below 0 if the weights alone are too large.
        graphs: CUDA graphs of decoding.
        working: a layer's activations for a chunk of prompts, and logits to sample from.
    """

    weights: float
    states: float
    cache_per_token: float
    cache_tokens: float
    graphs: float
    working: float

    @property
    def cache(self) -> float:
        """Keys and values of all tokens, and states."""
        return max(self.cache_tokens, 0) * self.cache_per_token + self.states


def engine_memory(config: Config, policy: Architecture, num_parameters: int, free_bytes: float) -> EngineMemory:
    """Return the memory of an engine, whose cache fills the rest of SGLang's share of `free_bytes`.

    Args:
        policy: the model that it serves.
        free_bytes: free memory of a GPU when the engine starts, before any model is built.
    """
    rollout = config.rollout
    nbytes = DTYPES[config.model.dtype].nbytes
    tensor = config.rollout.tensor_parallel
    weights = num_parameters * nbytes / tensor
    if rollout.server_args.get("quantization") == "fp8":  # of the layers' matrices
        embeddings = policy.vocab_size * policy.hidden_size * (1 if policy.tied else 2)
        weights -= (num_parameters - embeddings) * (nbytes - 1) / tensor
    if policy.latent:  # each GPU caches the whole latent vector
        cached: float = policy.num_layers * (policy.latent.kv_rank + policy.latent.rope_size)
    else:  # keys and values, whose heads are repeated if there are fewer than GPUs
        heads = [policy.heads_of(layer) for layer in range(policy.num_layers) if not policy.is_linear(layer)]
        cached = sum(2 * max(own.kv_heads / tensor, 1) * own.size for own in heads)
    cache_per_token = nbytes * cached
    states = 0.0
    if linear := policy.linear:  # in fp32, and the last tokens that the convolution reads
        last = nbytes * (2 * linear.keys + linear.values) * (linear.kernel - 1)
        states = rollout.max_running_requests * policy.num_linear_layers * (4 * linear.state + last) / tensor
    room = (rollout.mem_fraction_static * free_bytes - weights - states) / cache_per_token
    of_experts = policy.experts.top_k * policy.experts.ffn_size if policy.experts else 0
    layer_width = policy.hidden_size + max(policy.ffn_size, of_experts) / tensor
    logits = rollout.max_running_requests * policy.vocab_size * 4 * FP32_LOGITS
    return EngineMemory(
        weights=weights,
        states=states,
        cache_per_token=cache_per_token,
        cache_tokens=min(room, rollout.max_total_tokens or room),
        graphs=rollout.max_running_requests * GRAPH_BYTES,
        working=logits + PREFILL_CHUNK * nbytes * LAYER_BUFFERS * layer_width,
    )


def engine_pinned(config: Config, engine: EngineMemory, policy: Architecture) -> float:
    """Return the host memory that an engine pins for each of its GPUs.

    It holds the pool of CUDA graphs, the weights where a sync sends adapters only, and for routing replay an int32
    for each choice of an expert for each token of the cache.
    Source: SGLang 0.5.23, full_cuda_graph_backend.py, state_capturer/base.py; `server_arguments` of engines.
    """
    pinned = engine.graphs
    if config.sent_lora is not None:
        pinned += engine.weights
    if config.rollout.routing_replay and policy.experts is not None:
        pinned += 4 * policy.num_layers * policy.experts.top_k * max(engine.cache_tokens, 0)
    return pinned


def queue_bytes(config: Config) -> float:
    """Return the host memory that responses need at most, over all owners of engines, until they are trained.

    With rollout.max_staleness k the prompts of 1 + k batches have been started and not trained; 0 without it.
    """
    if not config.rollout.runs_ahead:
        return 0.0
    num_responses = (1 + config.rollout.max_staleness) * config.data.train_batch_size * config.rollout.n
    return num_responses * longest_row(config) * QUEUED_TOKEN_BYTES


@dataclass(frozen=True)
class RankKind:
    """Ranks that hold the same.

    Attributes:
        stages: model -> number of its pipeline stage that is there.
        has_engine: an engine is there.
        ledgers: phase -> memory of a GPU of such a rank.
    """

    ranks: list[int]
    stages: Mapping[str, int]
    has_engine: bool
    ledgers: Mapping[str, Ledger]

    @property
    def peak(self) -> tuple[float, str]:
        """The most bytes that a GPU holds, and the phase with the most."""
        return max((sum(ledger.values()), phase) for phase, ledger in self.ledgers.items())


class MemoryEstimate:
    """The memory of a run.

    Args:
        plan: plan without an undecided offload.
    Attributes:
        models: the run's models on their ranks, by name.
        engine: one of the run's engines.
        sent_bytes: bytes of the weights, or adapters, that a sync sends.
        bucket_bytes: weights that an engine receives at a time; num_buckets: in a sync.
        uses: phase -> model -> its use.
        passes: the same for the phases that run models: an update if the use has gradients, else a forward pass.
        phases: the start, then the phases of a step in their order.
        rank_kinds: each kind of rank; fullest: the one with the highest peak.
    Raises:
        ConfigError: a model's config.json is wrong, or its layout does not fit the model.
    """

    def __init__(self, plan: RunPlan, cluster: Cluster):
        self.plan = plan
        self.config = plan.config
        self.cluster = cluster
        self._check_fit()
        dtype = plan.config.model.dtype
        self.models = dict[str, PlacedModel]()
        for name, spec in plan.components.items():
            shape = cluster.shapes.of(spec)
            self.models[name] = PlacedModel(spec, plan.layouts[name], shape, plan.batch_splits[name], dtype)
        is_policy = "actor" in plan.components
        policy = cluster.shapes.at(plan.config.model.path, "policy" if is_policy else "value")
        free_bytes = cluster.gpu_bytes - CONTEXT_BYTES - ENGINE_CONTEXT_BYTES
        self.engine = engine_memory(plan.config, policy.architecture, policy.size, free_bytes)
        self._engine_pinned = engine_pinned(plan.config, self.engine, policy.architecture)
        nbytes = DTYPES[dtype].nbytes
        self.sent_bytes = policy.size * nbytes
        self.bucket_bytes = plan.config.rollout.sync.bucket_bytes or GPU_BUCKET_BYTES
        if plan.config.recipe.has_rollouts and plan.route.adapters:  # an engine takes them all at once
            adapters = self.models["actor"].shape.stages(Parallel(), trained=True)[0]
            self.sent_bytes = self.bucket_bytes = sum(adapters) * nbytes
        # A tensor that is larger than a bucket is one by itself.
        self._largest_bucket = max(self.bucket_bytes, policy.largest_tensor * nbytes)
        self.num_buckets = math.ceil(self.sent_bytes / self.bucket_bytes)
        self._choice_bytes = policy.architecture.choice_bytes if plan.config.rollout.routing_replay else 0
        self.uses = uses_of(plan.components)
        forward = [spec.forward.phase for spec in plan.components.values() if spec.forward]
        updates = [f"update_{name}" for name in plan.training]
        runs = uses_of({name: replace(spec, base=None) for name, spec in plan.components.items()})
        self.passes = {phase: runs[phase] for phase in forward + updates}
        self.phases = [START, *self.passes, SAVE]
        if plan.config.recipe.has_rollouts:
            self.phases = [START, ROLLOUT, *self.passes, SYNC, PROBE, SAVE]
        self.rank_kinds = self._rank_kinds()
        self.fullest = max(self.rank_kinds, key=lambda kind: kind.peak)

    def _check_fit(self) -> None:
        errors: list[str] = []
        for spec in self.plan.components.values():
            key, parallel = spec.parallel
            errors += fit_errors(self.cluster.shapes.of(spec).architecture, parallel, f"{key}.{{}}".format)
        if errors:
            raise ConfigError(*errors)

    def _rank_kinds(self) -> list[RankKind]:
        layouts = dict(self.plan.layouts)
        engines = layouts.pop("rollout", None)
        engine_ranks = engines.ranks if engines is not None and self.config.starts_engines else ()
        found = defaultdict[tuple, list[int]](list)
        for rank in range(self.plan.world_size):
            places = {name: layout.coordinates(rank) for name, layout in layouts.items()}
            stages = tuple((name, place.stage) for name, place in places.items() if place)
            found[stages, rank in engine_ranks].append(rank)
        kinds = []
        for (stages, has_engine), ranks in found.items():
            ledgers = {phase: self._ledger(dict(stages), has_engine, phase) for phase in self.phases}
            kinds.append(RankKind(ranks, dict(stages), has_engine, ledgers))
        return kinds

    def allocated(self) -> Ledger:
        """Return phase -> bytes that torch's allocator should hold at most, on the rank that has most."""
        held = dict.fromkeys(self.phases, 0.0)
        for kind in self.rank_kinds:
            for phase, ledger in kind.ledgers.items():
                of_torch = sum(size for entry, size in ledger.items() if entry not in NOT_TORCH)
                held[phase] = max(held[phase], of_torch)
        return held

    def expert_loads(self) -> dict[str, float]:
        """Return trained model -> how often its even share of the tokens a rank's experts may get before its GPU is
        full, if the experts are divided over ranks."""
        loads: dict[str, float] = {}
        for kind in self.rank_kinds:
            for name, stage in kind.stages.items():
                ledger = kind.ledgers.get(f"update_{name}")
                if ledger and (even := self.models[name].expert_activations(stage)):
                    load = 1 + (self.cluster.gpu_bytes - sum(ledger.values())) / even
                    loads[name] = min(load, loads.get(name, load))
        return loads

    def host(self) -> Ledger:
        """Return the host memory of the node that holds most."""
        gpus_per_node = self.cluster.gpus_per_node
        nodes = defaultdict[int, Ledger](lambda: defaultdict(float))
        num_tokens = self.config.data.train_batch_size * self.config.rollout.n * longest_row(self.config)
        choices = num_tokens * self._choice_bytes
        for kind in self.rank_kinds:
            asleep = sum(sum(self.models[name].copied(stage).values()) for name, stage in kind.stages.items())
            on_host = sum(self.models[name].on_host(stage) for name, stage in kind.stages.items())
            for rank in kind.ranks:
                node = nodes[rank // gpus_per_node]
                node["processes"] += PROCESS_BYTES + kind.has_engine * ENGINE_PROCESS_BYTES
                node["offloaded states"] += asleep
                node["optimizer states"] += on_host
                node["vision towers"] += self._towers(kind.stages)
                node["pinned by engines"] += kind.has_engine * self._engine_pinned
                if "actor" in kind.stages:
                    node["expert choices"] += choices / self.models["actor"].layout.data
        for engine in self.plan.route.engines if self.config.recipe.has_rollouts else ():
            queued = queue_bytes(self.config) / len(self.plan.route.engines)
            nodes[engine.owner // gpus_per_node]["queued responses"] += queued
            waiting = (1 + self.config.rollout.max_staleness) * choices / len(self.plan.route.engines)
            nodes[engine.owner // gpus_per_node]["expert choices"] += waiting
        # A save in the background keeps all copies; else one model's are freed before the next one's are made.
        combined = sum if self.config.trainer.async_save else max
        saves = [model.saved(gpus_per_node) for model in self.models.values()]
        for number, node in nodes.items():
            node["checkpoint copies"] = combined([saved.get(number, 0.0) for saved in saves])
        fullest = max(nodes, key=lambda number: sum(nodes[number].values()))
        return dict(nodes[fullest])

    def _towers(self, stages: Mapping[str, int]) -> float:
        """Return the host memory of a rank's vision towers, one for each folder, with the features that they keep."""
        tokens = self.config.data.train_batch_size * self.config.data.max_prompt_length
        found = {}
        for name, stage in stages.items():
            model = self.models[name]
            if tower := model.tower(stage):
                kept = min(KEPT_BYTES, tokens / model.layout.data * model.feature_bytes)
                found[model.spec.folder.value] = tower + kept
        return sum(found.values())

    def _ledger(self, stages: Mapping[str, int], has_engine: bool, phase: str) -> Ledger:
        ledger = self._building(stages) if phase == START else self._model_entries(stages, phase)
        if has_engine:
            ledger |= self._engine_entries(phase, stays_awake=not stages or self.config.rollout.sleep == "never")
        num_buckets = 2 if "actor" in stages and not self.config.replays else int(has_engine)
        if phase == SYNC and num_buckets:  # the actor's ranks gather a bucket while they send the one before
            ledger["sync buckets"] = min(num_buckets * self._largest_bucket, self.sent_bytes)
        # Each stage of the actor sends to engines with GPUs of their own in a group of its own.
        sync_groups = self.models["actor"].layout.pipeline if has_engine and not stages else 1
        communicators = sum(_communicators(self.models[name].layout) for name in stages) + sync_groups
        ledger["CUDA contexts"] = CONTEXT_BYTES + has_engine * ENGINE_CONTEXT_BYTES
        ledger["NCCL communicators"] = communicators * COMMUNICATOR_BYTES
        return ledger

    def _building(self, stages: Mapping[str, int]) -> Ledger:
        """Return the memory at the peak of building the models: each is built whole, then offloaded before the next
        one."""
        resident: Ledger = {}
        moments: list[Ledger] = [{}]
        for name in build_order(self.plan.components):
            if name not in stages:
                continue
            model = self.models[name]
            states = model.states(stages[name])
            built = {f"{name} {kind}": size for kind, size in states.items()}
            moments.append(resident | built)
            if model.settings and model.settings.optim.distributed:  # Megatron copies the weights into its buffer
                copy = states["gradients"] * model.nbytes / DTYPES["fp32"].nbytes
                without_optimizer = {entry: size for entry, size in built.items() if entry != f"{name} optimizer"}
                moments.append(resident | without_optimizer | {f"{name} weights, copied": copy})
            staying = states.keys() - set(model.spec.offload.value)
            resident |= {f"{name} {kind}": states[kind] for kind in states if kind in staying}
        return max(moments, key=lambda held: sum(held.values()))

    def _model_entries(self, stages: Mapping[str, int], phase: str) -> Ledger:
        uses = self.uses.get(SYNC if phase == PROBE else phase, {})
        response_share = longest_response(self.config) / longest_row(self.config)
        ledger: Ledger = {}
        for name, stage in stages.items():
            model = self.models[name]
            use = uses.get(name, {})
            for kind, size in model.states(stage).items():
                if size and (kind in use or kind not in model.spec.offload.value):
                    ledger[f"{name} {kind}"] = size
            if name in self.passes.get(phase, ()):
                trains = "gradients" in use
                ledger[f"{name} activations"] = model.activations(stage, trains=trains)
                if images := model.images(stage, self.config.data.max_prompt_length):
                    ledger[f"{name} images"] = images
                if stage == model.layout.pipeline - 1 and model.spec.head != "value":
                    ledger[f"{name} head"] = model.head(response_share, trains=trains)
        return ledger

    def _engine_entries(self, phase: str, *, stays_awake: bool) -> Ledger:
        """Return the memory of an engine, which sleeps while models on its GPUs are trained or saved."""
        engine = self.engine
        ledger = dict[str, float]()
        if stays_awake or phase in (ROLLOUT, SYNC, PROBE):
            ledger["engine weights"] = engine.weights
        if stays_awake or phase in (ROLLOUT, PROBE):
            ledger |= {"KV cache": engine.cache, "CUDA graphs": engine.graphs, "engine working memory": engine.working}
        return ledger


def _communicators(layout: Layout) -> int:
    """Return the NCCL communicators of a rank: one for each set of ranks that share the collectives of a dimension, of
    the gradients or of the gradient norm."""
    sizes = {"t": layout.tensor, "c": layout.context, "d": layout.data, "p": layout.pipeline}
    spanned = {"".join(one for one in dims if sizes[one] > 1) for dims in ("t", "c", "cd", "p", "tcdp")}
    return len(spanned - {""}) + (2 if layout.expert_run > 1 else 0)

"""Estimate the seconds of each phase of a step: work and bytes over the share of its data sheet that a GPU reaches.

The estimate compares layouts, and shows where a step's time goes. It assumes that every row has the maximum length,
that experts, data-parallel ranks and teachers have equal shares, and that nothing overlaps, except rollouts with
training where engines on GPUs of their own run ahead (`rollout.max_staleness`).
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from megappo.architecture.architecture import DTYPES, Architecture
from megappo.architecture.parameters import (
    expert_stacks,
    hf_tensors_of,
    is_adapter,
    linear_stacks,
    list_parameters,
)
from megappo.config.eval_sets import longest_response, longest_row
from megappo.lab.estimate.gpu_memory import ROLLOUT, SAVE, SYNC, MemoryEstimate, RankKind
from megappo.lab.estimate.placed_model import PlacedModel, Shape
from megappo.runtime.gpus import GPU

MATMUL_SHARE = 0.45
"""Share of a GPU's peak that layers reach. Source: Korthikanti et al. 2022, table 5: 42 to 56 % on A100."""
MEMORY_SHARE, LINK_SHARE = 0.6, 0.6
"""Assumed shares of the bandwidths that decoding and collectives reach."""
LAUNCH_SECONDS = 15e-6
"""Assumed seconds of a layer in a decoding step, besides its reads."""
SYNC_SHARE = 0.3
"""Assumed share of the link between GPUs: gathering, packing and sending take turns."""
BUCKET_SECONDS, TENSOR_SECONDS, GROUP_SECONDS = 0.004, 80e-6, 65e-6
"""Seconds of a bucket's messages between ranks and to its engine; of a tensor, which ranks copy and the engine's Python
loads; and of a process group at the start, for each rank, which meets the others at one store. The last two are
assumed, the first follows: on an H100 1.1 GiB over CUDA IPC, 310 tensors in three buckets, took 45 ms."""
BETWEEN_STEPS = (SAVE, "export")


class Overlap(NamedTuple):
    """A step in which the engines sample while the models train, in seconds; both sides wait for the weight sync.

    Attributes:
        trainers: work of the models.
        trainers_wait: time until a batch is complete, before they begin.
        engines_wait: time in which engines have no prompt that they may start.
    """

    trainers: float
    trainers_wait: float
    engines_wait: float
    sync: float

    @property
    def step(self) -> float:
        """Seconds of the slower side, and of the sync."""
        return self.trainers + self.trainers_wait + self.sync


class TimeEstimate:
    """The seconds of a run on a type of GPU.

    Attributes:
        seconds: phase -> seconds of a step, in the step's order; "rollout" counts one batch alone.
        num_tensors: tensors of a weight sync.
        mfu: phase that computes -> the models' own work over what their ranks could do meanwhile.
    """

    def __init__(self, memory: MemoryEstimate, gpu: GPU):
        self.memory = memory
        self.gpu = gpu
        self.config = memory.config
        self._rows = self.config.data.train_batch_size * self.config.rows_per_prompt
        self._row = longest_row(self.config)
        self._nbytes = DTYPES[self.config.model.dtype].nbytes
        self._peak = gpu.flops if self._nbytes == 2 else gpu.fp32_flops
        self._reached = self._peak * MATMUL_SHARE
        of_rollouts = {ROLLOUT: self._rollout() if self.config.samples else 0.0}
        self.seconds = of_rollouts if self.config.recipe.has_rollouts else {}
        self.mfu: dict[str, float] = {}
        for phase, uses in memory.passes.items():
            self._add_passes(phase, [memory.models[name] for name in uses])
        sends = self.config.samples and "actor" in memory.plan.training
        self.num_tensors = 0
        if sends:
            actor, adapters = memory.models["actor"].shape.architecture, memory.plan.route.adapters
            self.num_tensors = num_exported(actor.with_head("policy"), adapters=adapters)
        received = min(memory.engine.weights, memory.sent_bytes)  # by a rank of an engine
        sending = received / (gpu.link * SYNC_SHARE) + memory.num_buckets * BUCKET_SECONDS
        if self.config.recipe.has_rollouts:
            self.seconds[SYNC] = sends * (sending + self.num_tensors * TENSOR_SECONDS)
        # Offloaded tensors move over the rank's own bus, once for each phase that needs them; moves for a save do not
        # count.
        if moved := max(map(self._moved, memory.rank_kinds)):
            self.seconds["offload"] = moved / (gpu.host * LINK_SHARE)

    @property
    def step(self) -> float:
        """Seconds of a step. Phases of models on separate ranks add up, too, though they run at once."""
        return self.overlap.step if self.overlap else sum(self.seconds.values())

    @cached_property
    def overlap(self) -> Overlap | None:
        """The two sides of a step; None if they take turns, as they do in effect on GPUs that they share.

        Prompts of k = rollout.max_staleness batches are in progress while the models train, and of one more while they
        wait for the oldest batch. `on_sync: finish` completes them before each sync, so that a step's batch is alone.
        """
        rollout = self.config.rollout
        if not rollout.runs_ahead or not self.is_apart:
            return None
        behind, ahead = (rollout.max_staleness, 1) if rollout.on_sync == "continue" else (1, 0)
        trainers = sum(self.seconds.values()) - self.seconds[ROLLOUT] - self.seconds[SYNC]
        sampled = trainers / self._rollout(behind)  # share of a batch
        return Overlap(
            trainers,
            trainers_wait=max(1 - sampled, 0) * self._rollout(behind + ahead),
            engines_wait=max(trainers - self.seconds[ROLLOUT], 0),
            sync=self.seconds[SYNC],
        )

    @property
    def is_apart(self) -> bool:
        """True if no engine is on a GPU of a model."""
        layouts = self.memory.plan.layouts
        models = {rank for name, layout in layouts.items() if name != ROLLOUT for rank in layout.ranks}
        return bool(self.config.rollout.engines) or models.isdisjoint(layouts[ROLLOUT].ranks)

    def _add_passes(self, phase: str, models: Sequence[PlacedModel]) -> None:
        """Add a phase's forward passes: a model's, and the passes of the reference that its head compares itself with.

        An update adds the backward passes, the recomputation of layers and logits, and the exchanges of the optimizer
        steps.
        """
        model = models[0]
        settings = model.settings
        seconds = sum(map(self._pass, models))
        work = sum(map(self._work, models))
        if settings is not None and phase.startswith("update_"):
            backward = model.shape.flops.training - 1
            work += backward * self._work(model)
            seconds += backward * self._pass(model) + self._head(model)
            if settings.recompute == "full":
                seconds += self._pass(model)
            passes = model.split.epochs / model.spec.members
            work *= passes
            seconds = passes * seconds + self._optimizer_steps(model)
        self.seconds[phase] = seconds
        self.mfu[phase] = work / (seconds * len(model.layout.ranks) * self._peak)

    def _work(self, model: PlacedModel) -> float:
        """Return the operations of a forward pass over all rows of a step, or a teacher's share of them."""
        num_sharing = 1 if model.spec.teacher is None else len(self.config.teachers)
        return self._rows / num_sharing * model.shape.flops.forward([(self._row, longest_response(self.config))])

    def _pass(self, model: PlacedModel) -> float:
        """Return the seconds of a forward pass over all rows of a step, including the exchanges of tensor-parallel
        ranks and experts, and the slots in which pipeline stages wait.

        Source: Narayanan et al. 2021, section 2.2: (p - 1) of (m v + p - 1) slots are empty.
        """
        layout = model.layout
        compute = self._work(model) / (len(layout.ranks) * self._reached)
        tokens = model.split.shard_trajectories[1] * self._row
        filling = layout.filling(tokens, model.shape.architecture.hidden_size, "cuda")
        slots = max(model.split.micro_batches[1], filling) * layout.virtual_pipeline
        return (compute + self._exchanges(model)) * (slots + layout.pipeline - 1) / slots

    def _head(self, model: PlacedModel) -> float:
        """Return the seconds to compute the logits of all responses of a step once, on the last stage's ranks."""
        outputs = self._rows * longest_response(self.config)
        return outputs * model.shape.flops.per_output / (len(model.layout.stages[-1]) * self._reached)

    def _exchanges(self, model: PlacedModel) -> float:
        """Return the seconds of exchanges within a forward pass: a layer gathers and scatters its input over
        tensor-parallel ranks twice, or sums it, which is as much; and sends a token to each of its experts and back.

        Source: Korthikanti et al. 2022, section 4.2.2.
        """
        layout = model.layout
        architecture = model.shape.architecture
        tokens = self._rows * self._row / (layout.data * layout.context)
        seconds = 4 * tokens * (layout.tensor - 1) / layout.tensor / self.gpu.link
        if architecture.experts and layout.expert_run > 1:
            sent = 2 * tokens * architecture.experts.top_k / layout.tensor
            seconds += sent / self._bandwidth(layout.ranks[: layout.expert_run])
        layers = architecture.num_layers / layout.pipeline
        return layers * architecture.hidden_size * self._nbytes * seconds / LINK_SHARE

    def _optimizer_steps(self, model: PlacedModel) -> float:
        """Return the seconds in which data-parallel ranks exchange fp32 gradients, and weights."""
        data = model.layout.data * model.layout.context
        largest = max(map(sum, model.shape.stages(model.parallel, trained=True)))
        exchanged = (4 + self._nbytes) * largest * (data - 1) / data
        return model.split.optimizer_steps * exchanged / (self._bandwidth(model.layout.ranks) * LINK_SHARE)

    def _bandwidth(self, ranks: Sequence[int]) -> float:
        gpus_per_node = self.memory.cluster.gpus_per_node
        is_one_node = ranks[0] // gpus_per_node == ranks[-1] // gpus_per_node
        return self.gpu.link if is_one_node else self.gpu.network

    def _rollout(self, batches: int = 1) -> float:
        """Return the seconds of a batch's prompts' pass and of decoding: in turns of as many sequences as an engine
        holds at once, each of which reads weights and cache.

        Args:
            batches: batches that are in progress at once.
        """
        rollout = self.config.rollout
        sequences = self._rows / self.memory.plan.layouts[ROLLOUT].data
        at_once = min(batches * sequences, self.most_at_once)
        decoding = sequences / at_once * rollout.max_response_length * self.decoding_step(at_once)
        return decoding + sequences * self.prompt_pass

    @property
    def most_at_once(self) -> float:
        """Sequences that an engine decodes at once at most, by rollout.max_running_requests and its cache."""
        return min(self.config.rollout.max_running_requests, max(self.memory.engine.cache_tokens / self.context, 1.0))

    @property
    def context(self) -> float:
        """Mean tokens of a sequence in progress."""
        return self.config.data.max_prompt_length + self.config.rollout.max_response_length / 2

    @property
    def prompt_pass(self) -> float:
        """Seconds of an engine for a prompt."""
        policy = self.memory.cluster.shapes.at(self.config.model.path)
        return policy.flops.forward([(self.config.data.max_prompt_length, 1)]) / self._engine_reached

    def decoding_step(self, at_once: float, context: float | None = None) -> float:
        """Return the seconds in which an engine decodes a token of each of some sequences.

        Args:
            context: mean tokens of a sequence; None = `self.context`.
        """
        engine = self.memory.engine
        policy = self.memory.cluster.shapes.at(self.config.model.path)
        cached = at_once * (context or self.context) * engine.cache_per_token
        read = engine.weights * _touched(policy, at_once) + cached
        reading = read / (self.gpu.memory_bandwidth * MEMORY_SHARE)
        computing = at_once * policy.flops.forward([(1, 1)]) / self._engine_reached
        return max(reading, computing) + policy.architecture.num_layers * LAUNCH_SECONDS

    @property
    def _engine_reached(self) -> float:
        """Operations per second of an engine."""
        return self._reached * self.config.rollout.tensor_parallel

    def _moved(self, rank_kind: RankKind) -> float:
        """Return the bytes that a rank moves in a step between its GPU and the host: a state that changes on the GPU
        both ways, another one there; optimizer states in host memory both ways in each optimizer step."""
        moved = 0.0
        for name, stage in rank_kind.stages.items():
            model = self.memory.models[name]
            moved += 2 * model.split.optimizer_steps * model.on_host(stage)
            copied = model.copied(stage)
            for phase, uses in self.memory.uses.items():
                if phase in BETWEEN_STEPS or name not in uses:
                    continue
                for kind, changes in uses[name].items():
                    moved += copied.get(kind, 0.0) * (1 + changes)
        return moved


def _touched(policy: Shape, tokens: float) -> float:
    """Return the share of the parameters that a step of `tokens` tokens reads: it does not choose every expert."""
    experts = policy.architecture.experts
    if experts is None:
        return 1.0
    untouched = (1 - experts.top_k / experts.count) ** tokens
    return 1 - policy.expert_share * untouched


def num_exported(architecture: Architecture, *, adapters: bool = False) -> int:
    """Return the number of tensors of a weight sync, as engines get them: the model's, or its adapters alone."""
    names = hf_tensors_of(one for one in list_parameters(architecture) if is_adapter(one.names[0]) == adapters)
    if adapters:
        return len(names)
    stacks = [*linear_stacks(architecture).values(), *(stack.parts for stack in expert_stacks(architecture).values())]
    return len(names) - sum(len(parts) - 1 for parts in stacks)

"""Estimate the seconds of each phase of a step: work and bytes over the share of its data sheet that a GPU reaches.

The estimate compares layouts, and shows where a step's time goes. It assumes that every row has the maximum length,
that experts and data-parallel ranks have equal shares, and that nothing overlaps.
"""

from collections.abc import Sequence

from megappo.architecture.architecture import DTYPES
from megappo.config.eval_sets import longest_row
from megappo.estimate.gpu_memory import ROLLOUT, SAVE, SYNC, MemoryEstimate, RankKind
from megappo.estimate.gpus import GPU
from megappo.estimate.placed_model import PlacedModel, Shape

MATMUL_SHARE = 0.45
"""Share of a GPU's peak that layers reach. Source: Korthikanti et al. 2022, table 5: 42 to 56 % on A100."""
MEMORY_SHARE, LINK_SHARE = 0.6, 0.6
"""Assumed shares of the bandwidths that decoding and collectives reach."""
LAUNCH_SECONDS = 15e-6
"""Assumed seconds of a layer in a decoding step, besides its reads."""
SYNC_SHARE = 0.3
"""Assumed share of the link between GPUs: gathering, packing and sending take turns."""
BUCKET_SECONDS = 0.015
"""Seconds of a bucket's messages between ranks and to its engine: measured on an H100, where 1.1 GiB over CUDA IPC in
three buckets took 45 ms."""
BETWEEN_STEPS = (SAVE, "export")


class TimeEstimate:
    """The seconds of a run on a type of GPU.

    Attributes:
        seconds: phase -> seconds of a step, in the step's order.
        mfu: phase that computes -> the models' own work over what their ranks could do meanwhile.
    """

    def __init__(self, memory: MemoryEstimate, gpu: GPU):
        self.memory = memory
        self.gpu = gpu
        self.config = memory.config
        self._rows = self.config.data.train_batch_size * self.config.rollout.n
        self._row = longest_row(self.config)
        self._nbytes = DTYPES[self.config.model.dtype].nbytes
        self._peak = gpu.flops if self._nbytes == 2 else gpu.fp32_flops
        self._reached = self._peak * MATMUL_SHARE
        self.seconds = {ROLLOUT: self._rollout()}
        self.mfu: dict[str, float] = {}
        for phase, uses in memory.passes.items():
            self._add_passes(phase, [memory.models[name] for name in uses])
        self.seconds[SYNC] = memory.engine.weights / (gpu.link * SYNC_SHARE) + memory.num_buckets * BUCKET_SECONDS
        # Offloaded tensors move over the rank's own bus, once a phase that needs them; those of a save do not count.
        if moved := max(map(self._moved, memory.rank_kinds)):
            self.seconds["offload"] = moved / (gpu.host * LINK_SHARE)

    @property
    def step(self) -> float:
        """Seconds of a step. Phases of models on separate ranks add up, too, though they run at once."""
        return sum(self.seconds.values())

    def _add_passes(self, phase: str, models: Sequence[PlacedModel]) -> None:
        """Add a phase's forward passes: a model's, and those of the reference that its head compares itself with.

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
            work *= settings.ppo_epochs
            seconds = settings.ppo_epochs * seconds + self._optimizer_steps(model)
        self.seconds[phase] = seconds
        self.mfu[phase] = work / (seconds * len(model.layout.ranks) * self._peak)

    def _work(self, model: PlacedModel) -> float:
        """Return the operations of a forward pass over all rows of a step."""
        return self._rows * model.shape.flops.forward([(self._row, self.config.rollout.max_response_length)])

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
        outputs = self._rows * self.config.rollout.max_response_length
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

    def _rollout(self) -> float:
        """Return the seconds of the prompts' pass and of decoding: in turns of as many sequences as an engine holds at
        once, each of which reads weights and cache."""
        engine = self.memory.engine
        rollout = self.config.rollout
        prompt = self.config.data.max_prompt_length
        policy = self.memory.cluster.shapes.at(self.config.model.path)
        reached = self._reached * rollout.tensor_parallel
        context = prompt + rollout.max_response_length / 2
        sequences = self._rows / self.memory.plan.layouts["rollout"].data
        at_once = min(sequences, rollout.max_running_requests, max(engine.cache_tokens / context, 1.0))
        read = engine.weights * _touched(policy, at_once) + at_once * context * engine.cache_per_token
        reading = read / (self.gpu.memory_bandwidth * MEMORY_SHARE)
        computing = at_once * policy.flops.forward([(1, 1)]) / reached
        step = max(reading, computing) + policy.architecture.num_layers * LAUNCH_SECONDS
        decoding = sequences / at_once * rollout.max_response_length * step
        return decoding + sequences * policy.flops.forward([(prompt, 1)]) / reached

    def _moved(self, rank_kind: RankKind) -> float:
        """Return the bytes that a rank moves in a step between its GPU and the host: a state that changes on the GPU
        both ways, another one there."""
        moved = 0.0
        for name, stage in rank_kind.stages.items():
            copied = self.memory.models[name].copied(stage)
            for phase, uses in self.memory.uses.items():
                if phase in BETWEEN_STEPS or name not in uses:
                    continue
                for kind, changes in uses[name].items():
                    moved += copied.get(kind, 0.0) * (1 + changes)
        return moved


def _touched(policy: Shape, tokens: float) -> float:
    """Return the share of the parameters that a step of so many tokens reads: it does not choose every expert."""
    experts = policy.architecture.experts
    if experts is None:
        return 1.0
    untouched = (1 - experts.top_k / experts.count) ** tokens
    return 1 - policy.expert_share * untouched

"""How long each phase of a step may take: work and bytes over what GPUs are known to reach of their data sheets.

An estimate to compare layouts by, and to see what a step is spent on: every row is as long as it may be, experts and
data-parallel ranks have equal shares, nothing overlaps.
"""

from collections.abc import Mapping, Sequence

from megappo.architecture.architecture import Architecture
from megappo.architecture.dtypes import DTYPES
from megappo.config.checks import longest_row
from megappo.estimate.gpus import GPU
from megappo.estimate.memory import ROLLOUT, SAVE, SYNC, MemoryEstimate, Place
from megappo.estimate.shapes import Shape
from megappo.placement.layout import Layout
from megappo.placement.uses import Use

MATMUL_SHARE = 0.45
"""Of a GPU's peak that layers reach. Source: Korthikanti et al. 2022, table 5: 42 to 56 % on A100."""
MEMORY_SHARE, LINK_SHARE = 0.6, 0.6
"""Of the bandwidths, assumed: what decoding and collectives reach."""
LAUNCH_SECONDS = 15e-6
"""Of a layer in a decoding step, besides its reads, assumed."""
SYNC_SHARE = 0.3
"""Of the link between GPUs, assumed: gathering, packing and handing over take turns."""
BUCKET_SECONDS = 0.015
"""Of a bucket's messages between ranks and to its engine: measured on an H100, 1.1 GiB over CUDA IPC in three buckets
took 45 ms."""
READING = 1.5e9
"""Bytes per second that a rank reads, sums or loads at most: on an H100 and an H200 one loaded 7.8 GiB in 5 to 6 s."""
BETWEEN_STEPS = (SAVE, "export")


def resume_seconds(memory: MemoryEstimate, storage: float) -> float:
    """Of comparing a checkpoint with its sums and loading it, each of which reads all of it once over all ranks.

    Args:
        storage: bytes per second that it gives all nodes together.
    """
    return 2 * memory.checkpoint_bytes / min(storage, memory.plan.world_size * READING)


class TimeEstimate:
    """Of a run whose memory is estimated, on a type of GPU.

    Attributes:
        seconds: phase -> seconds of a step, in the step's order.
        mfu: of phases that compute: the models' own work over what their ranks could do meanwhile.
    """

    def __init__(self, memory: MemoryEstimate, gpu: GPU):
        self.memory, self.gpu, self.config = memory, gpu, memory.config
        self._rows, self._row = self.config.data.train_batch_size * self.config.rollout.n, longest_row(self.config)
        self._nbytes = DTYPES[self.config.model.dtype].nbytes
        self._peak = gpu.flops if self._nbytes == 2 else gpu.fp32_flops
        self._policy = memory.cluster.shapes.at(self.config.model.path)
        self.seconds, self.mfu = {ROLLOUT: self._rollout()}, dict[str, float]()
        for phase in memory.phases:
            if uses := memory.passes(phase):
                self._compute(phase, uses)
        self.seconds[SYNC] = memory.engine.weights / (gpu.link * SYNC_SHARE) + memory.num_buckets * BUCKET_SECONDS
        # To the host and back, once a phase that needs it, over the rank's own bus; a save's are left out.
        if moved := max(map(self._moved, memory.places)):
            self.seconds["offload"] = moved / (gpu.host * LINK_SHARE)

    @property
    def step(self) -> float:
        """Seconds of a step: of phases of components on ranks of their own, too, though they run side by side."""
        return sum(self.seconds.values())

    def _compute(self, phase: str, uses: Mapping[str, Use]) -> None:
        """A phase's forward passes, of a component and of the reference that it compares itself with; in an update the
        backward passes, too, what these compute anew (the layers, the head's logits), and the exchanges of the
        optimizer steps."""
        name = next(iter(uses))
        spec, ranks = self.memory.specs[name], len(self.memory.layouts[name].ranks)
        section = spec.training.section if spec.training and "gradients" in uses[name] else None
        seconds, work = sum(map(self._pass, uses)), sum(map(self._work, uses))
        if section is not None:
            backward = self._shape(name).flops.training - 1
            seconds += (backward + (section.recompute == "full")) * self._pass(name) + self._head(name)
            seconds = section.ppo_epochs * seconds + self._optimizer_steps(name)
            work = section.ppo_epochs * (work + backward * self._work(name))
        self.seconds[phase], self.mfu[phase] = seconds, work / (seconds * ranks * self._peak)

    def _work(self, name: str) -> float:
        """The model's own, of a forward pass over all rows of a step."""
        row = (self._row, self.config.rollout.max_response_length)
        return self._rows * self._shape(name).flops.forward([row])

    def _shape(self, name: str) -> Shape:
        return self.memory.cluster.shapes.of(self.memory.specs[name])

    def _pass(self, name: str) -> float:
        """Forward, over all rows of a step: the layers and the head; what tensor-parallel ranks and experts exchange
        meanwhile; and the slots in which pipeline stages wait.

        Source: Narayanan et al. 2021, section 2.2: (p - 1) of (m v + p - 1) slots are empty.
        """
        layout, shape = self.memory.layouts[name], self._shape(name)
        compute = self._work(name) / (len(layout.ranks) * self._peak * MATMUL_SHARE)
        split, hidden = self.memory.splits[name], shape.architecture.hidden_size
        filling = layout.filling(split.shard_trajectories[1] * self._row, hidden, "cuda")
        slots = max(split.micro_batches[1], filling) * layout.virtual_pipeline
        exchanges = self._exchanges(layout, shape.architecture)
        return (compute + exchanges) * (slots + layout.pipeline - 1) / slots

    def _head(self, name: str) -> float:
        """The logits of all responses of a step, computed once, on the last stage's ranks."""
        layout, outputs = self.memory.layouts[name], self._rows * self.config.rollout.max_response_length
        ranks = len(layout.ranks) / layout.pipeline
        return outputs * self._shape(name).flops.per_output / (ranks * self._peak * MATMUL_SHARE)

    def _exchanges(self, layout: Layout, architecture: Architecture) -> float:
        """A layer gathers and scatters its input over tensor-parallel ranks twice, or sums it up, which is as much; and
        sends a token to each of its experts and back.

        Source: Korthikanti et al. 2022, section 4.2.2.
        """
        tokens, run = self._rows * self._row / (layout.data * layout.context), layout.expert * layout.expert_tensor
        of_tensor = 4 * tokens * (layout.tensor - 1) / layout.tensor / self.gpu.link
        top_k = architecture.experts.top_k if architecture.experts and run > 1 else 0
        of_experts = 2 * tokens * top_k / layout.tensor / self._bandwidth(layout.ranks[:run])
        layers = architecture.num_layers / layout.pipeline
        return layers * architecture.hidden_size * self._nbytes * (of_tensor + of_experts) / LINK_SHARE

    def _optimizer_steps(self, name: str) -> float:
        """What data-parallel ranks exchange in each: fp32 gradients, and weights."""
        layout = self.memory.layouts[name]
        data = layout.data * layout.context
        largest = max(map(sum, self._shape(name).stages(self.memory.specs[name].parallel.value, trained=True)))
        exchanged = (4 + self._nbytes) * largest * (data - 1) / data
        return self.memory.splits[name].optimizer_steps * exchanged / (self._bandwidth(layout.ranks) * LINK_SHARE)

    def _bandwidth(self, ranks: Sequence[int]) -> float:
        of_node = self.memory.cluster.gpus_per_node
        return self.gpu.link if ranks[-1] // of_node == ranks[0] // of_node else self.gpu.network

    def _rollout(self) -> float:
        """Decoding, in turns of as many sequences as an engine holds at a time, each reading weights and cache; and the
        prompts' pass."""
        policy, engine, prompt = self._policy, self.memory.engine, self.config.data.max_prompt_length
        response = self.config.rollout.max_response_length
        reached = self._peak * MATMUL_SHARE * self.config.rollout.tensor_parallel
        sequences, context = self._rows / self.memory.layouts["rollout"].data, prompt + response / 2
        room = max(engine.cache_tokens / context, 1.0)
        at_once = min(sequences, self.config.rollout.max_running_requests, room)
        read = engine.weights * self._touched(at_once) + at_once * context * engine.cache_per_token
        work = at_once * policy.flops.forward([(1, 1)])
        step = max(read / (self.gpu.memory_bandwidth * MEMORY_SHARE), work / reached)
        step += policy.architecture.num_layers * LAUNCH_SECONDS
        prompts = sequences * policy.flops.forward([(prompt, 1)]) / reached
        return sequences / at_once * response * step + prompts

    def _touched(self, tokens: float) -> float:
        """Share of the parameters that a step of so many tokens reads: not every expert is chosen."""
        experts = self._policy.architecture.experts
        return 1 - self._policy.expert_share * (1 - experts.top_k / experts.count) ** tokens if experts else 1.0

    def _moved(self, place: Place) -> float:
        """Bytes that a rank moves in a step."""
        moved = 0.0
        for name, stage in place.stages:
            uses = [use[name] for phase, use in self.memory.uses.items() if name in use and phase not in BETWEEN_STEPS]
            for kind, size in self.memory.copied(name, stage).items():
                moved += size * sum(1 + use[kind] for use in uses if kind in use)
        return moved

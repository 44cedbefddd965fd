"""How long each phase of a step may take: work and bytes over what GPUs are known to reach of their data sheets.

An estimate to compare layouts by, and to see what a step is spent on: every row is as long as it may be, experts and
data-parallel ranks have equal shares, nothing overlaps.
"""

from megappo.architecture.dtypes import DTYPES
from megappo.config.checks import longest_row
from megappo.estimate.engine_memory import cache_bytes_per_token
from megappo.estimate.flops import TRAINING
from megappo.estimate.gpus import GPU
from megappo.estimate.memory import GPUS_PER_NODE, ROLLOUT, SAVE, SYNC, MemoryEstimate, Place
from megappo.placement.arithmetic import batch_splits
from megappo.placement.components import ComponentSpec
from megappo.placement.layout import Layout

MATMUL_SHARE = 0.45
"""Of a GPU's peak that layers reach. Source: Korthikanti et al. 2022, table 5: 42 to 56 % on A100."""
MEMORY_SHARE, LINK_SHARE = 0.6, 0.6
"""Of the bandwidths, assumed: what decoding and collectives reach."""
LAUNCH_SECONDS = 15e-6
"""Of a layer in a decoding step, besides its reads, assumed."""
SYNC_SHARE = 0.3
"""Of the link between GPUs, assumed: gathering, packing and handing over take turns."""
BETWEEN_STEPS = (SAVE, "export")


class TimeEstimate:
    """Of a run whose memory is estimated, on a type of GPU.

    Attributes:
        seconds: phase -> seconds of a step, in the step's order.
    """

    def __init__(self, memory: MemoryEstimate, gpu: GPU):
        self.memory, self.gpu, self.config = memory, gpu, memory.config
        self._rows = self.config.data.train_batch_size * self.config.rollout.n
        self._splits = batch_splits(self.config, memory.layouts)
        is_bf16 = DTYPES[self.config.model.dtype].nbytes == 2
        self._peak = gpu.flops if is_bf16 else gpu.fp32_flops
        found = {ROLLOUT: self._rollout()}
        for name, spec in memory.specs.items():
            if spec.forward is not None:
                found[spec.forward.phase] = self._pass(name, spec)
            if spec.training is not None:
                found[f"update_{name}"] = self._update(name, spec)
        found[SYNC] = self._sync()
        if (moves := self._moves()) > 0:
            found["offload"] = moves
        order = {phase: number for number, phase in enumerate([*memory.phases, "offload"])}
        self.seconds = dict(sorted(found.items(), key=lambda one: order[one[0]]))

    @property
    def step(self) -> float:
        """Seconds of a step: of phases of components on ranks of their own, too, though they run side by side."""
        return sum(self.seconds.values())

    def flops(self, name: str, spec: ComponentSpec) -> float:
        """Of a component's forward pass over all rows of a step, each as long as it may be."""
        row = (longest_row(self.config), self.config.rollout.max_response_length)
        return self._rows * self.memory.shapes.of(spec).flops.forward([row])

    def _pass(self, name: str, spec: ComponentSpec) -> float:
        """Forward: the model's work, and what tensor-parallel ranks and experts exchange meanwhile."""
        layout = self.memory.layouts[name]
        compute = self.flops(name, spec) / (len(layout.ranks) * self._peak * MATMUL_SHARE)
        return (compute + self._exchanges(name, spec)) * self._idle(name, layout)

    def _exchanges(self, name: str, spec: ComponentSpec) -> float:
        """A layer gathers and scatters its input over tensor-parallel ranks twice, or sums it up, which is as much; and
        sends a token to each of its experts and back.

        Source: Korthikanti et al. 2022, section 4.2.2.
        """
        layout, architecture = self.memory.layouts[name], self.memory.shapes.of(spec).architecture
        tokens = self._rows * longest_row(self.config) / (layout.data * layout.context)
        of_tensor = 4 * tokens * (layout.tensor - 1) / layout.tensor
        experts = architecture.experts if layout.expert * layout.expert_tensor > 1 else None
        of_experts = 2 * tokens * (experts.top_k if experts else 0) / layout.tensor
        layers = architecture.num_layers / layout.pipeline
        nbytes = layers * architecture.hidden_size * DTYPES[self.config.model.dtype].nbytes
        far = layout.expert * layout.expert_tensor > GPUS_PER_NODE
        link = self.gpu.network if far else self.gpu.link
        return nbytes * (of_tensor / self.gpu.link + of_experts / link) / LINK_SHARE

    def _idle(self, name: str, layout: Layout) -> float:
        """What pipeline stages make of a pass's time: (p - 1) of (m v + p - 1) slots are empty.

        Source: Narayanan et al. 2021, section 2.2.
        """
        split = self._splits[name]
        slots = split.micro_batches[1] * layout.virtual_pipeline
        return (slots + layout.pipeline - 1) / slots

    def _update(self, name: str, spec: ComponentSpec) -> float:
        """Forward and backward passes, the layers' recomputation, and for each optimizer step the exchange of fp32
        gradients and of weights among data-parallel ranks."""
        assert spec.training is not None
        section, layout, split = spec.training.section, self.memory.layouts[name], self._splits[name]
        passes = TRAINING + (section.recompute == "full")
        compute = passes * section.ppo_epochs * self._pass(name, spec)
        data = layout.data * layout.context
        largest = max(sum(size) for size in self.memory.shapes.of(spec).stages(spec.parallel.value))
        exchanged = (4 + DTYPES[self.config.model.dtype].nbytes) * largest * (data - 1) / data
        return compute + split.optimizer_steps * exchanged / (self._bandwidth(layout) * LINK_SHARE)

    def _bandwidth(self, layout: Layout) -> float:
        """Among the component's data-parallel ranks."""
        ranks = layout.ranks
        return self.gpu.link if ranks[-1] // GPUS_PER_NODE == ranks[0] // GPUS_PER_NODE else self.gpu.network

    def _rollout(self) -> float:
        """Decoding, in turns of as many sequences as an engine holds at a time, each reading weights and cache; and the
        prompts' pass."""
        rollout, policy = self.config.rollout, self.memory.shapes.at(self.config.model.path)
        prompt, response = self.config.data.max_prompt_length, rollout.max_response_length
        engines, ways = self.memory.layouts["rollout"].data, rollout.tensor_parallel
        sequences = self._rows / engines
        context = prompt + response / 2
        room = max(self.memory.cache_tokens() / context, 1.0)
        at_once = min(sequences, rollout.max_running_requests, room)
        nbytes = DTYPES[self.config.model.dtype].nbytes
        cache = at_once * context * cache_bytes_per_token(policy.architecture, self.config.model.dtype, rollout)
        read = policy.size * self._touched(at_once) * nbytes / ways + cache
        work = at_once * policy.flops.forward([(1, 1)]) / ways
        step = max(read / (self.gpu.memory_bandwidth * MEMORY_SHARE), work / (self._peak * MATMUL_SHARE))
        step += policy.architecture.num_layers * LAUNCH_SECONDS
        prompts = policy.flops.forward([(prompt, 1)]) * sequences / ways / (self._peak * MATMUL_SHARE)
        return sequences / at_once * response * step + prompts

    def _touched(self, tokens: float) -> float:
        """Share of the parameters that a step of so many tokens reads: not every expert is chosen."""
        policy = self.memory.shapes.at(self.config.model.path)
        experts = policy.architecture.experts
        return 1 - policy.expert_share * (1 - experts.top_k / experts.count) ** tokens if experts else 1.0

    def _sync(self) -> float:
        policy, ways = self.memory.shapes.at(self.config.model.path), self.config.rollout.tensor_parallel
        size = policy.size * DTYPES[self.config.model.dtype].nbytes
        return size / ways / (self.gpu.link * SYNC_SHARE)

    def _moves(self) -> float:
        """To the host and back, once a phase that needs it, over the rank's own bus; a save's are left out."""
        return max(map(self._moved, self.memory.places)) / (self.gpu.host * LINK_SHARE)

    def _moved(self, place: Place) -> float:
        """Bytes that a rank moves in a step."""
        moved = 0.0
        for name, stage in place.stages:
            uses = [use[name] for phase, use in self.memory.uses.items() if name in use and phase not in BETWEEN_STEPS]
            for kind, size in self.memory.states[name][stage].items():
                if kind in self.memory.specs[name].offload.value and kind != "gradients":
                    moved += size * sum(1 + use[kind] for use in uses if kind in use)
        return moved

    def mfu(self, phase: str) -> float | None:
        """Of a phase that computes: the model's work over what its ranks could do meanwhile."""
        for name, spec in self.memory.specs.items():
            ranks = len(self.memory.layouts[name].ranks)
            if spec.training is not None and phase == f"update_{name}":
                work = TRAINING * spec.training.section.ppo_epochs * self.flops(name, spec)
            elif spec.forward is not None and phase == spec.forward.phase:
                work = self.flops(name, spec)
            else:
                continue
            return work / (self.seconds[phase] * ranks * self._peak)
        return None

"""Forward passes of one Megatron model on this rank, through megatron-core's own schedules."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megappo.batch.balance import micro_batches, partition_groups
from megappo.batch.images import ImageSource
from megappo.batch.packing import PackedBatch, num_held, pack
from megappo.batch.rows import Rows
from megappo.models.gpt import ModelChunks, router_bias_kept
from megappo.models.heads import Head, Outputs, output_weight
from megappo.models.packed_attention import Pack
from megappo.models.vision_tower import towers
from megappo.models.vocab_parallel import LogitFactors
from megappo.placement.groups import ComponentGroups
from megappo.runtime import platform
from megappo.runtime.heartbeat import heartbeat
from megappo.runtime.megatron_patches import expect_shapes

OnOutput = Callable[..., object]
"""Called with (micro-batch, the model's output): on the last stage, for each micro-batch."""


class MegatronEngine:
    """One component's model on a rank of its layout.

    Args:
        chunks: this rank's part of the model, on the device, weights loaded.
        groups: the component's process groups; this rank is a member.
        head: see `Head`.
        max_tokens: tokens packed into one micro-batch at most.
        keeps_prompts: all rows of a prompt are packed into the same micro-batch.
    Attributes:
        image_source: source of the images of the rows' prompts; None = they have none.
    """

    image_source: ImageSource | None = None

    def __init__(
        self,
        chunks: ModelChunks,
        groups: ComponentGroups,
        head: Head,
        max_tokens: int,
        keeps_prompts: bool = False,
    ):
        self.chunks = chunks
        self.transformer_config = chunks[0].config
        self.groups = groups
        self.head = head
        self.max_tokens = max_tokens
        self.keeps_prompts = keeps_prompts
        self.wrapped_chunks = [_wrapped(chunk) for chunk in chunks]
        pipeline = groups.collection.pp
        self._p2p = P2PCommunicator(pipeline, self.transformer_config) if pipeline.size() > 1 else None
        self._is_pinned = "pinned_copies" in self.transformer_config.switches
        num_virtual = self.transformer_config.virtual_pipeline_model_parallel_size
        self._pipeline_schedule = get_forward_backward_func(pipeline.size(), num_virtual)

    @property
    def is_output(self) -> bool:
        """True if this rank reports the results of its data-parallel shard."""
        collection = self.groups.collection
        first = collection.tp.rank() == collection.cp.rank() == 0
        return first and collection.pp.rank() == collection.pp.size() - 1

    @torch.no_grad()
    def forward(self, rows: Rows) -> Outputs:
        """Return the head's outputs for `rows` ([b, R] or [b] each, CPU) on the last stage; {} on other stages."""
        bins = self._bins(rows)
        for chunk in self.wrapped_chunks:
            chunk.eval()
        on_output = partial(self._outputs, self.head)
        parts = self._run(rows, bins, on_output, on_output, forward_only=True)
        if not parts:
            return {}
        order = torch.tensor([row for rows_of_bin in bins for row in rows_of_bin]).argsort()
        return {name: torch.cat([part[name] for part in parts])[order].cpu() for name in parts[0]}

    @torch.no_grad()
    def logit_factors(self, packed: PackedBatch) -> LogitFactors:
        """The factors of a policy's logits for the tokens of a micro-batch that are held here, without a gradient.

        A policy's head may call it on a reference: both then live on the same ranks in the same layout, which also
        packed the micro-batch, so all ranks of this component are in that head together.
        The config refuses pipeline stages with it, which only a schedule can run.
        """
        ((wrapped,), (chunk,)) = self.wrapped_chunks, self.chunks
        wrapped.eval()
        with self.groups.active():
            hidden = self._output(packed, wrapped)[0]
            return LogitFactors(hidden, output_weight(chunk), self.transformer_config.logit_cap)

    def total(self, part: float) -> float:
        """Return the sum of every data-parallel shard's part of a metric, the same on every rank of the component.

        Args:
            part: counts where `is_output`. All ranks of the component call together.
        """
        return self._sum(part if self.is_output else 0.0)

    def anywhere(self, here: bool) -> bool:
        """Return whether something is true on any rank of the component; all of them call together."""
        return self._sum(float(here)) > 0

    def _sum(self, here: float) -> float:
        total = torch.tensor(here, dtype=torch.float64, device=platform.device())
        dist.all_reduce(total, group=self.groups.collection.intra_dist_opt)
        return float(total)

    def _outputs(
        self,
        head: Head,
        packed: PackedBatch,
        output: Tensor,
        non_loss_data: bool = False,
    ) -> Outputs:
        """Return a head's outputs for all tokens of the micro-batch, the same on every context-parallel rank.

        Each has its share of the tokens and 0 elsewhere. All compute the same loss from the sum, so the gradient is
        passed on as it is: a rank's own share of it counts.
        """
        shares = head(output, packed).items()
        context = self.groups.collection.cp
        return {name: reduce_from_tensor_model_parallel_region(share.clone(), context) for name, share in shares}

    def _run(
        self,
        rows: Rows,
        bins: Sequence[Sequence[int]],
        on_output: OnOutput,
        on_idle: OnOutput,
        forward_only: bool,
    ) -> list:
        """Run a pass over the bins and return the results of `on_output`; `on_idle` gets `_num_idle` more."""
        num_idle = self._num_idle(len(bins))
        shortest = [int(rows.lengths.argmin())] if num_idle else []
        parts = [*((part, on_output) for part in bins), *[(shortest, on_idle)] * num_idle]
        if "known_shapes" in self.transformer_config.switches:
            lengths = rows.lengths.tolist()
            expect_shapes(self._p2p, (self._shape([lengths[row] for row in part]) for part, _ in parts))
        with self.groups.active():
            results = self._pipeline_schedule(
                forward_step_func=self._forward_step,
                data_iterator=[self._packs(rows, parts, num_idle) for _ in self.wrapped_chunks],
                model=self.wrapped_chunks,
                num_microbatches=len(parts),
                seq_length=1,  # with variable_seq_lengths the communicator knows the real one
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
                pg_collection=self.groups.collection,
                p2p_communicator=self._p2p,
            )
        for tower in towers(self.chunks):
            tower.rest()
        return results[: len(bins)]

    def _num_idle(self, num_bins: int) -> int:
        """Return the number of micro-batches without effect that this shard must add.

        Shards that share experts must run equally many micro-batches, as the tokens of all go to the experts of all. An
        interleaved schedule runs them in groups.
        """
        most = num_bins
        layout = self.groups.layout
        if layout.expert * layout.expert_tensor > 1:
            largest = torch.tensor(num_bins, device=platform.device())
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.groups.collection.dp)
            most = int(largest)
        return -(-most // layout.micro_batch_group) * layout.micro_batch_group - num_bins

    def _bins(self, rows: Rows) -> list[list[int]]:
        lengths = rows.lengths.tolist()
        filling = self.groups.layout.filling(sum(lengths), self.transformer_config.hidden_size, platform.device().type)
        packed = partial(micro_batches, max_tokens=self.max_tokens, at_least=filling)
        return partition_groups(lengths, rows.prompt_ids.tolist(), packed) if self.keeps_prompts else packed(lengths)

    @property
    def _multiple(self) -> int:
        """The number of a micro-batch's tokens that are held here is a multiple of this."""
        return self.groups.layout.tensor if self.transformer_config.sequence_parallel else 1

    def _shape(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Shape of the hidden states between stages, for a micro-batch of sequences of these lengths."""
        held = num_held(lengths, self._multiple, context=self.groups.layout.context)
        return held // self._multiple, 1, self.transformer_config.hidden_size

    def _packs(
        self,
        rows: Rows,
        parts: Sequence[tuple[Sequence[int], OnOutput]],
        num_idle: int,
    ) -> Iterator[tuple[PackedBatch, OnOutput]]:
        """Yield every micro-batch with the function for its output. Routers count the last `num_idle` as padding."""
        context = self.groups.collection.cp
        share = {"context": context.size(), "context_rank": context.rank(), "is_pinned": self._is_pinned}
        share |= {"vision": self.transformer_config.vision, "source": self.image_source}
        for i, (part, on_output) in enumerate(parts):
            heartbeat.count(i, len(parts), "micro-batches")
            packed = pack(rows.select(part), self._multiple, platform.device(), **share)
            if i >= len(parts) - num_idle:
                packed.token_rows.zero_()
            yield packed, partial(on_output, packed)

    def _forward_step(self, packs: Iterator[tuple[PackedBatch, OnOutput]], model: torch.nn.Module) -> tuple:
        packed, on_output = next(packs)
        return self._output(packed, model), on_output

    def _output(self, packed: PackedBatch, model: torch.nn.Module) -> Tensor:
        routed = [packed.token_rows, packed.expert_choices, packed.image_slots]
        if self.transformer_config.sequence_parallel:  # routers and embeddings have a part of the tokens
            tensor = self.groups.collection.tp
            routed = [None if one is None else one.chunk(tensor.size())[tensor.rank()] for one in routed]
        pack = Pack(packed.cu_seqlens, packed.lengths, packed.position_ids[0], *routed)
        pack.packed = packed
        pack.image_source = self.image_source
        # The heads cast to fp32 what they need.
        keep_dtype = {"fp32_output": False} if self.transformer_config.bf16 else {}
        return model(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            attention_mask=None,
            packed_seq_params=pack,
            **keep_dtype,
        )


def _wrapped(chunk: GPTModel) -> torch.nn.Module:
    """Return the module of a chunk that the schedule runs."""
    with router_bias_kept(chunk):
        return Float16Module(chunk.config, chunk) if chunk.config.bf16 else chunk

"""Forward passes and training steps of one Megatron model, on this rank, through megatron-core's own schedules.

Algorithms are written above this seam (AReaL's `engine.train_batch(batch, loss_fn)`): a `Head` turns the model's output
into values per response token, and a `LossFn` turns those into a loss.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import apply_factories
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.module import Float16Module

from megappo.batch.balance import micro_batches
from megappo.batch.packing import PackedBatch, copied, num_held, pack
from megappo.batch.rows import Rows
from megappo.config.schema import Optim
from megappo.models.build import ModelChunks
from megappo.models.context_parallel import sum_of_shares
from megappo.models.data_parallel import data_parallel
from megappo.models.optimizer import clipped_step, lr_scheduler, make_saveable, optimizer_config
from megappo.models.output_layer import LogitFactors, output_weight
from megappo.models.routing import router_bias_kept
from megappo.models.sharding import sharded_chunks, sharded_optimizer
from megappo.models.stages import KnownShapes
from megappo.observe.metrics import Metric, OnDevice, merge_metrics, on_host
from megappo.placement.groups import ComponentGroups
from megappo.runtime import platform
from megappo.runtime.heartbeat import LIFE

Outputs = dict[str, torch.Tensor]
"""Per response token, each [b, R] float32, 0 where the mask is; or per row, [b] float32."""
Head = Callable[[torch.Tensor, PackedBatch], Outputs]
"""Last stage: the model's output [1, T, ...] -> Outputs, 0 at tokens that other context-parallel ranks hold."""
LossFn = Callable[[Outputs, Rows], tuple[torch.Tensor, Mapping[str, OnDevice]]]
"""Outputs and their rows -> loss and metrics, both parts of the mini-batch's: losses added up, and metrics merged, over
micro-batches and data-parallel shards are what one pass over the whole mini-batch would give."""


@dataclass(frozen=True)
class OptimizerStep:
    """What an optimizer step was like.

    Attributes:
        grad_norm: before clipping. lr: learning rate. Both are the same on every rank of the component.
        metrics: of the loss function, merged over micro-batches: this shard's part; {} but on the last stage, and of a
            step that was skipped.
        skipped: what was not finite, so that no weight was changed: on the ranks that saw it, else that another did; ""
            after a step that was made.
    """

    grad_norm: float
    lr: float
    metrics: dict[str, Metric]
    skipped: str = ""


ELSEWHERE = "the loss of an optimizer step is not finite on another rank"
LOSS = "loss"
"""Stands among a loss function's metrics for the loss itself, which has the parts that they name."""


class MegatronEngine:
    """One component's model on a rank of its layout.

    Args:
        chunks: this rank's part of the model, on the device, weights loaded.
        groups: the component's process groups; this rank is a member.
        head: see `Head`.
        max_tokens: tokens packed into one micro-batch at most.
    """

    def __init__(self, chunks: ModelChunks, groups: ComponentGroups, head: Head, max_tokens: int):
        self.chunks = chunks
        self.config = chunks[0].config
        self.groups = groups
        self.head = head
        self.max_tokens = max_tokens
        self.runners = [_runner(chunk) for chunk in chunks]
        pipeline = groups.collection.pp
        kind = KnownShapes if "known_shapes" in self.config.switches else P2PCommunicator
        self._p2p = kind(pipeline, self.config) if pipeline.size() > 1 else None
        self._is_pinned = "pinned_copies" in self.config.switches
        self._schedule = get_forward_backward_func(pipeline.size(), self.config.virtual_pipeline_model_parallel_size)

    @property
    def is_output(self) -> bool:
        """Whether this rank reports the results of its data-parallel shard."""
        collection = self.groups.collection
        first = collection.tp.rank() == collection.cp.rank() == 0
        return first and collection.pp.rank() == collection.pp.size() - 1

    @torch.no_grad()
    def forward(self, rows: Rows) -> Outputs:
        """The head's outputs for `rows` ([b, R] or [b] each, CPU) on the last stage; {} on other stages."""
        bins = self._bins(rows)
        for runner in self.runners:
            runner.eval()
        parts = self._run(rows, bins, self._collect, self._collect, forward_only=True)
        if not parts:
            return {}
        order = torch.tensor([row for rows_of_bin in bins for row in rows_of_bin]).argsort()
        return {name: torch.cat([part[name] for part in parts])[order].cpu() for name in parts[0]}

    @torch.no_grad()
    def logit_factors(self, packed: PackedBatch) -> LogitFactors:
        """What a policy's logits of the tokens of a micro-batch that are held here are made of, without a gradient.

        A policy's head may call it of a reference: both then live on the same ranks in the same layout, which also
        packed the micro-batch, so all ranks of this component are in that head together.

        Raises:
            ValueError: the model is cut into pipeline stages, which only a schedule can run.
        """
        stages = self.groups.layout.pipeline
        if stages > 1:
            raise ValueError(
                f"the logits of a model in {stages} pipeline stages are not where another model could compare its own "
                "with them: set pipeline to 1, or use a KL estimate such as k3 instead of the full KL"
            )
        ((runner,), (chunk,)) = self.runners, self.chunks
        runner.eval()
        with self.groups.active():
            return self._output(packed, runner)[0], output_weight(chunk)

    def total(self, part: float) -> float:
        """The sum of every data-parallel shard's part of a metric, the same on every rank of the component.

        Args:
            part: counts where `is_output`. All ranks of the component call together.
        """
        total = torch.tensor(part if self.is_output else 0.0, dtype=torch.float64, device=platform.device())
        dist.all_reduce(total, group=self.groups.collection.intra_dist_opt)
        return float(total)

    def anywhere(self, here: bool) -> bool:
        """Whether something is so on any rank of the component; all of them call together."""
        found = torch.tensor(float(here), device=platform.device())
        dist.all_reduce(found, group=self.groups.collection.intra_dist_opt)
        return bool(found)

    def _collect(self, packed: PackedBatch, output: torch.Tensor, non_loss_data: bool) -> Outputs:
        """What the schedule calls, with non_loss_data=True, and collects."""
        return self._read(self.head, output, packed)

    def _read(self, head: Head, output: torch.Tensor, packed: PackedBatch) -> Outputs:
        """A head's outputs for all tokens of the micro-batch, the same on every context-parallel rank."""
        context = self.groups.collection.cp
        return {name: sum_of_shares(share, context) for name, share in head(output, packed).items()}

    def _run(
        self,
        rows: Rows,
        bins: Sequence[Sequence[int]],
        on_last_stage: Callable,
        on_idle: Callable,
        forward_only: bool,
    ) -> list:
        """A pass over the bins, and what `on_last_stage` made of each; `on_idle` is called of `_num_idle` more."""
        num_idle = self._num_idle(len(bins))
        shortest = [int(rows.lengths.argmin())] if num_idle else []
        parts = [*((part, on_last_stage) for part in bins), *[(shortest, on_idle)] * num_idle]
        if isinstance(self._p2p, KnownShapes):
            lengths = rows.lengths.tolist()
            self._p2p.expect(self._shape([lengths[row] for row in part]) for part, _ in parts)
        with self.groups.active():
            found = self._schedule(
                forward_step_func=self._forward_step,
                data_iterator=[self._packs(rows, parts) for _ in self.runners],
                model=self.runners,
                num_microbatches=len(parts),
                seq_length=1,  # with variable_seq_lengths the communicator knows the real one
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
                pg_collection=self.groups.collection,
                p2p_communicator=self._p2p,
            )
        return found[: len(bins)]

    def _num_idle(self, num_bins: int) -> int:
        """Micro-batches without effect that this shard must add.

        Where several shards share experts, each of these must run as many, as the tokens of all go to the experts of
        all. An interleaved schedule runs them in groups.
        """
        most, layout = num_bins, self.groups.layout
        if layout.expert * layout.expert_tensor > 1:
            of_shards = torch.tensor(num_bins, device=platform.device())
            dist.all_reduce(of_shards, op=dist.ReduceOp.MAX, group=self.groups.collection.dp)
            most = int(of_shards)
        return -(-most // layout.micro_batch_group) * layout.micro_batch_group - num_bins

    def _bins(self, rows: Rows) -> list[list[int]]:
        lengths = rows.lengths.tolist()
        filling = self.groups.layout.filling(sum(lengths), self.config.hidden_size, platform.device().type)
        return micro_batches(lengths, self.max_tokens, at_least=filling)

    @property
    def _multiple(self) -> int:
        """What the number of tokens held here of a micro-batch must divide by."""
        return self.groups.layout.tensor if self.config.sequence_parallel else 1

    def _shape(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Of the hidden states that stages hand on, of a micro-batch of sequences of these lengths."""
        held = num_held(lengths, self._multiple, context=self.groups.layout.context)
        return held // self._multiple, 1, self.config.hidden_size

    def _packs(
        self, rows: Rows, parts: Sequence[tuple[Sequence[int], Callable]]
    ) -> Iterator[tuple[PackedBatch, Callable]]:
        """Every micro-batch, and what to call with its output."""
        context = self.groups.collection.cp
        share = {"context": context.size(), "context_rank": context.rank(), "is_pinned": self._is_pinned}
        for part, call in parts:
            LIFE.sign()
            packed = pack(rows.select(part), self._multiple, platform.device(), **share)
            yield packed, partial(call, packed)

    def _forward_step(self, packs: Iterator[tuple[PackedBatch, Callable]], model: torch.nn.Module) -> tuple:
        packed, on_output = next(packs)
        return self._output(packed, model), on_output

    def _output(self, packed: PackedBatch, model: torch.nn.Module) -> torch.Tensor:
        # The heads cast to fp32 what they need.
        keep_dtype = {"fp32_output": False} if self.config.bf16 else {}
        return model(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            attention_mask=None,
            packed_seq_params=PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=packed.cu_seqlens,
                cu_seqlens_kv=packed.cu_seqlens,
                max_seqlen_q=packed.max_seqlen,
                max_seqlen_kv=packed.max_seqlen,
            ),
            **keep_dtype,
        )


class TrainedEngine(MegatronEngine):
    """A `MegatronEngine` with gradients, optimizer and learning-rate schedule.

    Args:
        optim: the optimizer's settings.
        total_optimizer_steps: over the whole run; the learning rate decays over them.
        loss_head: what training steps read, where that is not what forward passes read with `head`.

    Attributes:
        skipped_in_a_row: the last so many optimizer steps were skipped.
    """

    def __init__(
        self,
        chunks: ModelChunks,
        groups: ComponentGroups,
        head: Head,
        max_tokens: int,
        optim: Optim,
        total_optimizer_steps: int,
        loss_head: Head | None = None,
    ):
        super().__init__(chunks, groups, head, max_tokens)
        self.loss_head = loss_head or head
        self.optim = optim
        self.skipped_in_a_row = 0
        with groups.active(), groups.as_world():
            self.runners = [data_parallel(runner, self.config, optim, groups) for runner in self.runners]
            self.optimizer = get_megatron_optimizer(
                optimizer_config(optim, self.config),
                self.runners,
                use_gloo_process_groups=False,
                pg_collection=groups.collection,
            )
        make_saveable(self.optimizer)
        self.scheduler = lr_scheduler(self.optimizer, optim, total_optimizer_steps)
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = _finalize_without_token_count
        if self.runners[0].ddp_config.overlap_grad_reduce:  # nothing before the last micro-batch
            waits = [runner.no_sync for runner in self.runners]
            self.config.no_sync_func = waits if len(waits) > 1 else waits[0]

    def train_batch(self, rows: Rows, loss_fn: LossFn) -> OptimizerStep:
        """One optimizer step on this shard's rows of a mini-batch, or none where loss, metrics or gradients are not
        finite: all ranks of the component agree on it."""
        for runner in self.runners:
            runner.train()
            runner.zero_grad_buffer()
        self.optimizer.zero_grad()
        bins = self._bins(rows)
        on_idle = partial(self._loss, _no_loss)
        parts = self._run(rows, bins, partial(self._loss, loss_fn), on_idle, forward_only=False)
        metrics = merge_metrics(on_host(parts))
        lr = max(group["lr"] for group in self.optimizer.param_groups)
        if broken := self._broken(metrics):
            return OptimizerStep(math.nan, lr, {}, broken)
        with self.groups.active():
            grad_norm = clipped_step(self.optimizer)
        if not math.isfinite(grad_norm):
            return OptimizerStep(grad_norm, lr, {}, f"the gradient norm is {grad_norm}")
        self.scheduler.step(increment=1)
        metrics.pop(LOSS, None)
        return OptimizerStep(grad_norm, lr, metrics)

    def _broken(self, found: Mapping[str, Metric]) -> str:
        """What of the loss is not finite, on all ranks of the component where it is not on any; "" if all is.

        An infinite or undefined loss may well have a finite gradient, so the gradient's norm does not tell; and as only
        the last stage has a loss, and a data-parallel shard only its own, the others would go on into the update.
        """
        sums = {name: metric.value for name, metric in found.items() if metric.reduction == "sum"}
        broken = [f"{name} {value}" for name, value in sums.items() if not math.isfinite(value)]
        anywhere = self.anywhere(bool(broken))
        if broken:
            return f"the loss of an optimizer step is not finite: {', '.join(broken)}"
        return ELSEWHERE if anywhere else ""

    @property
    def num_steps(self) -> set[int]:
        """How many optimizer steps there were, by the learning-rate schedule and by Adam's own counters: one number."""
        parts = [part.optimizer for part in self.optimizer.chained_optimizers if not part.is_stub_optimizer]
        counters = [one for part in parts for one in part.state.values() if "step" in one]
        # Fused Adams count by group; torch's leaves what Megatron has loaded into the groups as it was.
        counters = counters or [group for group in self.optimizer.param_groups if "step" in group]
        return {self.scheduler.num_steps, *(int(one["step"]) for one in counters)}

    def sharded_state_dict(self, is_loading: bool) -> dict[str, Any]:
        """Model, optimizer and schedule as dist_checkpointing takes them; loads into any other layout."""
        model = sharded_chunks(self.chunks, self.groups)
        with self.groups.active():
            optimizer = sharded_optimizer(self.optimizer, model, self.groups, is_loading)
        if is_loading:  # into the weights themselves, where Megatron would merge copies of what factories cut
            apply_factories(model)
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `dist_checkpointing.load` returned for `sharded_state_dict(is_loading=True)`, into which it has
        loaded weights in place.

        The optimizer's settings stay those of this run's config, whatever the checkpoint was trained with.
        """
        with self.groups.active():
            self.optimizer.load_state_dict(state["optimizer"])
            settings = {"betas": self.optim.betas, "eps": self.optim.eps}
            for group in self.optimizer.param_groups:
                group.update(settings, max_lr=self.optim.lr, min_lr=self.optim.min_lr)
            self.scheduler.num_steps = 0  # to which Megatron's loading adds
            self.scheduler.load_state_dict(state["scheduler"])

    def as_world(self) -> AbstractContextManager:
        """Makes the component's group the default one: dist_checkpointing is hard-wired to that."""
        return self.groups.as_world()

    @property
    def replicas(self) -> dist.ProcessGroup:
        """The ranks that hold the same weights, experts aside."""
        return self.groups.collection.dp_cp

    def _loss(
        self, loss_fn: LossFn, packed: PackedBatch, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict]:
        outputs = self._read(self.loss_head, output, packed)
        fields = {name: copied(one, output.device, self._is_pinned) for name, one in packed.rows.fields.items()}
        loss, metrics = loss_fn(outputs, replace(packed.rows, fields=fields))
        # The loss is divided by the mini-batch's global counts already; this count must only exist.
        return loss, torch.ones((), dtype=torch.int, device=loss.device), {**metrics, LOSS: OnDevice.of(loss, "sum")}


def _runner(chunk: GPTModel) -> torch.nn.Module:
    """What the schedule runs of a chunk."""
    with router_bias_kept(chunk):
        return Float16Module(chunk.config, chunk) if chunk.config.bf16 else chunk


def _finalize_without_token_count(model: list, num_tokens: torch.Tensor | None, **kwargs: object) -> None:
    """Megatron's gradient reduction without its division: losses come divided by global counts."""
    finalize_model_grads(model, None, **kwargs)


def _no_loss(outputs: Outputs, rows: Rows) -> tuple[torch.Tensor, dict[str, OnDevice]]:
    """A loss of 0 that runs the backward pass all the same."""
    return 0 * sum(output.sum() for output in outputs.values()), {}

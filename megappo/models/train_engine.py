"""Training steps of one Megatron model on this rank, through megatron-core's own schedules.

Algorithms are written above this seam (AReaL's `engine.train_batch(batch, loss_fn)`): a `Head` turns the model's output
into values per response token, and a `LossFn` turns those into a loss.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import apply_factories
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from megappo.batch.fields import field_of
from megappo.batch.packing import PackedBatch, copied
from megappo.batch.rows import Rows
from megappo.config.model_sections import Optim
from megappo.models.compact_adam import CompactAdam
from megappo.models.gpt import ModelChunks
from megappo.models.megatron_engine import Head, MegatronEngine, Outputs
from megappo.models.optimizer import build_optimizer, clipped_step, data_parallel, lr_scheduler
from megappo.models.routing import ModelRouting
from megappo.models.sharding import sharded_chunks, sharded_optimizer
from megappo.observe.metrics import OnDevice, RankMetrics, merge_metrics, on_host
from megappo.placement.groups import ComponentGroups

LossFn = Callable[[Outputs, Rows], tuple[Tensor, Mapping[str, OnDevice]]]
"""Outputs and their rows -> a part of the mini-batch's loss, and a part of its metrics. The sum of the losses, and the
merged metrics, of all micro-batches and data-parallel shards equal the result of one pass over the whole mini-batch."""
ELSEWHERE = "the loss of an optimizer step is not finite on another rank"
LOSS = "loss"
"""Name of the loss itself among the loss function's metrics; its other sums are the loss's parts."""


@dataclass(frozen=True)
class OptimizerStep:
    """Result of one optimizer step.

    Attributes:
        grad_norm: norm of the gradients before clipping. lr: learning rate. Both are the same on every rank of the
            component.
        metrics: this shard's part of the loss function's metrics, merged over micro-batches, only on the last stage;
            and the metrics of `ModelRouting`. {} after a step that was skipped.
        skipped: the value that was not finite, so that no weight was changed; on ranks that did not see it,
            `ELSEWHERE`; "" after a step that was made.
    """

    grad_norm: float
    lr: float
    metrics: RankMetrics
    skipped: str = ""


class TrainedEngine(MegatronEngine):
    """A `MegatronEngine` with gradients, optimizer and learning-rate schedule.

    Args:
        optim: the optimizer's settings.
        total_optimizer_steps: optimizer steps of the whole run, over which the learning rate decays.
        loss_head: head of training steps, where it differs from `head`, the head of forward passes.
        keeps_prompts: see `MegatronEngine`.

    Attributes:
        skipped_in_a_row: number of optimizer steps that were skipped since the last one that was made.
        routing: routing of a mixture of experts.
    """

    routing: ModelRouting | None = None

    def __init__(
        self,
        chunks: ModelChunks,
        groups: ComponentGroups,
        head: Head,
        max_tokens: int,
        optim: Optim,
        total_optimizer_steps: int,
        loss_head: Head | None = None,
        keeps_prompts: bool = False,
    ):
        super().__init__(chunks, groups, head, max_tokens, keeps_prompts)
        self.loss_head = loss_head or head
        self.optim = optim
        self.skipped_in_a_row = 0
        with groups.active(), groups.as_world():
            config = self.transformer_config
            chunks = self.wrapped_chunks
            self.wrapped_chunks = [data_parallel(chunk, config, optim, groups) for chunk in chunks]
            self.optimizer = build_optimizer(self.wrapped_chunks, self.transformer_config, optim, groups)
        self.scheduler = lr_scheduler(self.optimizer, optim, total_optimizer_steps)
        self.transformer_config.grad_scale_func = self.optimizer.scale_loss
        self.transformer_config.finalize_model_grads_func = _finalize_without_token_count
        if self.wrapped_chunks[0].ddp_config.overlap_grad_reduce:  # nothing before the last micro-batch
            waits = [chunk.no_sync for chunk in self.wrapped_chunks]
            self.transformer_config.no_sync_func = waits if len(waits) > 1 else waits[0]

    def train_batch(self, rows: Rows, loss_fn: LossFn) -> OptimizerStep:
        """Make one optimizer step on this shard's rows of a mini-batch, or none where loss, metrics or gradients are
        not finite: all ranks of the component agree on it."""
        for chunk in self.wrapped_chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self.routing is not None:
            self.routing.begin(self.total(float(rows.lengths.sum())) if self.routing.coef else 0.0)
        on_output = partial(self._loss, loss_fn)
        on_idle = partial(self._loss, _no_loss)
        parts = self._run(rows, self._bins(rows), on_output, on_idle, forward_only=False)
        metrics = merge_metrics(on_host(parts))
        lr = max(group["lr"] for group in self.optimizer.param_groups)
        if not_finite := self._not_finite(metrics):
            return OptimizerStep(math.nan, lr, {}, not_finite)
        with self.groups.active():
            grad_norm = clipped_step(self.optimizer)
        if not math.isfinite(grad_norm):
            return OptimizerStep(grad_norm, lr, {}, f"the gradient norm is {grad_norm}")
        self.scheduler.step(increment=1)
        metrics.pop(LOSS, None)
        if self.routing is not None:
            metrics |= self.routing.finish()
        return OptimizerStep(grad_norm, lr, metrics)

    def _not_finite(self, metrics: RankMetrics) -> str:
        """Return the parts of the loss that are not finite, on all ranks of the component; "" if all are.

        An infinite or undefined loss may have a finite gradient, so the gradient's norm does not show it. Only the last
        stage has a loss, and each data-parallel shard only its own: the others would continue into the update.
        """
        sums = {name: metric.value for name, metric in metrics.items() if metric.reduction == "sum"}
        broken = [f"{name} {value}" for name, value in sums.items() if not math.isfinite(value)]
        is_anywhere = self.anywhere(bool(broken))
        if broken:
            return f"the loss of an optimizer step is not finite: {', '.join(broken)}"
        return ELSEWHERE if is_anywhere else ""

    @property
    def num_steps(self) -> set[int]:
        """The number of optimizer steps by the learning-rate schedule and by Adam's own counters: one number."""
        counters = []
        for part in self.optimizer.chained_optimizers:
            if not part.is_stub_optimizer:
                counters += [state for state in part.optimizer.state.values() if "step" in state]
        if not counters:
            # Fused Adams count by group; torch's leaves the counters that Megatron has loaded into the groups alone.
            counters = [group for group in self.optimizer.param_groups if "step" in group]
        nums_steps = {int(counter["step"]) for counter in counters}
        return nums_steps | {self.scheduler.num_steps}

    @property
    def host_bytes(self) -> int:
        """Bytes of optimizer states that are in host memory."""
        parts = [part.optimizer for part in self.optimizer.chained_optimizers]
        return sum(part.host_bytes for part in parts if isinstance(part, CompactAdam))

    def sharded_state_dict(self, is_loading: bool) -> dict[str, Any]:
        """Return model, optimizer and schedule as dist_checkpointing takes them; loads into any other layout."""
        model = sharded_chunks(self.chunks, self.groups)
        with self.groups.active():
            optimizer = sharded_optimizer(self.optimizer, model, self.groups, is_loading)
        if is_loading:  # into the weights themselves, where Megatron would merge copies of what factories cut
            apply_factories(model)
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the result of `dist_checkpointing.load` for `sharded_state_dict(is_loading=True)`; the weights were
        loaded in place.

        The optimizer keeps the settings of this run's config, whichever the checkpoint was trained with.
        """
        with self.groups.active():
            self.optimizer.load_state_dict(state["optimizer"])
            settings = {"betas": self.optim.betas, "eps": self.optim.eps}
            for group in self.optimizer.param_groups:
                group.update(settings, max_lr=self.optim.lr, min_lr=self.optim.min_lr)
            self.scheduler.num_steps = 0  # to which Megatron's loading adds
            self.scheduler.load_state_dict(state["scheduler"])

    def as_world(self) -> AbstractContextManager:
        """Make the component's group the default one: dist_checkpointing is hard-wired to that."""
        return self.groups.as_world()

    @property
    def replicas(self) -> dist.ProcessGroup:
        """The ranks that hold the same weights, experts aside."""
        return self.groups.collection.dp_cp

    def _loss(
        self,
        loss_fn: LossFn,
        packed: PackedBatch,
        output: Tensor,
    ) -> tuple[Tensor, Tensor, dict]:
        outputs = self._outputs(self.loss_head, packed, output)
        fields = {}
        for name, field in packed.rows.fields.items():
            if not field_of(name).has_bytes:
                fields[name] = copied(field, output.device, self._is_pinned)
        loss, metrics = loss_fn(outputs, replace(packed.rows, fields=fields))
        # The loss is divided by the mini-batch's global counts already; this count must only exist.
        return loss, torch.ones((), dtype=torch.int, device=loss.device), {**metrics, LOSS: OnDevice.of(loss, "sum")}


def _finalize_without_token_count(model: list, num_tokens: Tensor | None, **kwargs: object) -> None:
    """Run Megatron's gradient reduction without its division: losses come divided by global counts."""
    finalize_model_grads(model, None, **kwargs)


def _no_loss(outputs: Outputs, rows: Rows) -> tuple[Tensor, dict[str, OnDevice]]:
    """Return a loss of 0, which runs the backward pass."""
    return 0 * sum(output.sum() for output in outputs.values()), {}

"""Train tiny models with megatron-core's own parts, and with Hugging Face and torch in the same steps."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from layouts import parallel_of
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from tiny_models import LENGTHS, VOCAB_SIZE, build, hf_model, outputs, run, sequences

from megappo.architecture.parameters import padded_vocab_size
from megappo.config.sections import Parallel
from megappo.models.heads import output_weight
from megappo.models.vocab_parallel import vocab_parallel_outputs
from megappo.placement.groups import ComponentGroups
from megappo.placement.layout import Layout

LR, EPS, CLIP = 1e-2, 1e-3, 0.5
VALUE_WEIGHT = torch.linspace(-0.3, 0.3, 32)[None]
Tokens = list[torch.Tensor]


@dataclass(frozen=True)
class Trainee:
    """One component of the training test, and how it is trained."""

    value_head: bool
    layout: Layout
    sequence: bool = False
    distributed: bool = False
    recompute: str = "none"
    dtype: str = "fp32"

    @property
    def parallel(self) -> Parallel:
        return parallel_of(self.layout, sequence=self.sequence)


class Trained:
    """A component under training with megatron-core's DDP, optimizer and schedules."""

    def __init__(self, trainee: Trainee, groups: ComponentGroups, folder: Path):
        self.trainee, self.groups = trainee, groups
        self.chunks = build(
            folder,
            trainee.parallel,
            groups,
            head="value" if trainee.value_head else "policy",
            recompute=trainee.recompute,
            dtype=trainee.dtype,
        )
        if trainee.value_head and self.chunks[-1].post_process:
            self.chunks[-1].output_layer.weight.data.copy_(VALUE_WEIGHT)
        config = self.chunks[0].config
        with groups.active(), groups.as_world():
            self.ddp = [
                DistributedDataParallel(
                    config,
                    DistributedDataParallelConfig(
                        use_distributed_optimizer=trainee.distributed, grad_reduce_in_fp32=True
                    ),
                    Float16Module(config, chunk) if config.bf16 else chunk,
                    pg_collection=groups.collection,
                )
                for chunk in self.chunks
            ]
            self.optimizer = get_megatron_optimizer(
                OptimizerConfig(
                    lr=LR,
                    weight_decay=0.0,
                    adam_beta1=0.9,
                    adam_beta2=0.95,
                    adam_eps=EPS,
                    clip_grad=CLIP,
                    params_dtype=config.params_dtype,
                    bf16=config.bf16,
                    use_distributed_optimizer=trainee.distributed,
                ),
                self.ddp,
                use_gloo_process_groups=False,
                pg_collection=groups.collection,
            )
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = lambda model, num_tokens, **kwargs: finalize_model_grads(model, **kwargs)

    def step(self) -> float:
        """Run one optimizer step on this shard's part of sequences(), one sequence per micro-batch; return the norm."""
        layout = self.trainee.layout
        shard = sequences()[layout.shard_of(dist.get_rank()) :: layout.data]
        multiple = layout.tensor if self.trainee.sequence else 1
        packs = [_padded([tokens], multiple) for tokens in shard]
        for ddp in self.ddp:
            ddp.train()
            ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        run(self.ddp, self.groups, packs, self._loss, forward_only=False)
        with self.groups.active():
            updated, grad_norm, _ = self.optimizer.step()
        assert updated
        return grad_norm

    def _loss(self, output: torch.Tensor, pack: Tokens) -> tuple[torch.Tensor, torch.Tensor, dict]:
        tokens, output = pack[0], output[0]
        if self.trainee.value_head:
            loss = _value_loss(output[: len(tokens), 0], tokens)
        else:
            weight = output_weight(self.chunks[-1])
            hidden = output[: len(tokens) - 1].to(weight.dtype)  # Megatron's wrapper for bf16 returns fp32
            outputs = vocab_parallel_outputs(
                hidden, weight, tokens[1:], self.groups.collection.tp, vocab_size=VOCAB_SIZE
            )
            loss = -outputs["log_probs"].sum()
        return loss / sum(LENGTHS), torch.ones((), dtype=torch.int), {}


def _padded(pack: Tokens, multiple: int) -> Tokens:
    padding = -sum(len(tokens) for tokens in pack) % multiple
    return [*pack, torch.zeros(padding, dtype=torch.int64)] if padding else pack


def _value_loss(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return (values - tokens / VOCAB_SIZE).square().sum()


def reference(folder: Path, value_head: bool, num_steps: int) -> tuple[list[float], torch.Tensor]:
    """Train with Hugging Face and torch; return the gradient norms and the trained model's outputs [T, ...]."""
    model = hf_model(folder)
    head = torch.nn.Parameter(VALUE_WEIGHT.clone()) if value_head else None
    parameters = [*(model.model if head is not None else model).parameters(), *([head] if head is not None else [])]

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        if head is None:
            return model(tokens[None]).logits[0]
        return model.model(tokens[None]).last_hidden_state[0] @ head.T

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        if head is not None:
            return _value_loss(forward(tokens)[:, 0], tokens)
        return F.cross_entropy(forward(tokens)[:-1], tokens[1:], reduction="sum")

    optimizer = torch.optim.AdamW(parameters, lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)
    norms = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        (sum(loss(tokens) for tokens in sequences()) / sum(LENGTHS)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, CLIP).item())
        optimizer.step()
    with torch.no_grad():
        return norms, torch.cat([forward(tokens) for tokens in sequences()])


def check_outputs(component: Trained, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Check the trained model's outputs for sequences() against `expected`, [T, ...]."""
    found = outputs(component.chunks, component.groups)
    if found is None:
        return
    if not component.trainee.value_head:
        tensor = component.trainee.layout.tensor
        shard = padded_vocab_size(VOCAB_SIZE, tensor) // tensor
        expected = expected.split(shard, dim=1)[component.groups.collection.tp.rank()]
    torch.testing.assert_close(found[0, :, : expected.shape[1]].float(), expected, rtol=tolerance, atol=tolerance)

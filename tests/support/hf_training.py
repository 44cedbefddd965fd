"""Training as Hugging Face's model does it: in one process, one row at a time, without packing or layouts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import value_oracles
from ppo_engines import (
    ACTOR,
    CRITIC,
    HEADS,
    KL_LOSS,
    OPTIM,
    VALUE_COEF,
    adapter_matrix,
    hf_bootstrap_values,
    hf_full_kl,
    hf_outputs,
    hf_value_head,
    make_config,
    make_rows,
    masked,
)
from tiny_models import hf_model
from torch.nn.utils import parametrize

from megappo.batch.balance import balanced_partitions
from megappo.batch.rows import Rows
from megappo.config.methods import ValueSupport
from megappo.config.model_sections import Lora
from megappo.config.value_support import value_support
from megappo.models.train_engine import TrainedEngine
from megappo.placement.layout import Layout

Lengths = Sequence[tuple[int, int]]
ByRow = dict[str, list[torch.Tensor]]
"""Outputs by name, a tensor for each row."""


@dataclass
class Oracle:
    """Hugging Face's model, the value head of a critic or shared backbone, the reference of a full KL.

    Attributes:
        value_loss: the loss of a value head of several outputs; "" for one output.
        support: meaning of these outputs.
    """

    model: torch.nn.Module
    head: torch.nn.Linear | None
    reference: torch.nn.Module | None
    is_policy: bool
    value_loss: str = ""
    support: ValueSupport | None = None

    def outputs(self, rows: Rows) -> ByRow:
        found: ByRow = {}
        if self.is_policy:
            found["log_probs"], found["entropy"] = zip(*hf_outputs(self.model, None, rows), strict=True)
        if self.head is not None:
            (found["values"],) = zip(*hf_outputs(self.model, self.head, rows, support=self.support), strict=True)
            found["bootstrap_values"] = hf_bootstrap_values(self.model, self.head, rows, self.support)
        if self.reference is not None:
            found["full_kl"] = hf_full_kl(self.model, self.reference, rows)
        return found

    def loss(self, rows: Rows) -> torch.Tensor:
        outputs, total = self.outputs(rows), torch.zeros(())
        if self.is_policy:
            total = total + policy_loss(outputs, rows)
        if self.head is not None:
            own = self.support_loss(rows) if self.support else value_loss(outputs, rows)
            total = total + (VALUE_COEF if self.is_policy else 1.0) * own
        if self.reference is not None:
            total = total + KL_LOSS["kl_loss_coef"] * torch.cat(outputs["full_kl"]).sum() / rows.response_mask.sum()
        return total

    def support_loss(self, rows: Rows) -> torch.Tensor:
        """Return a number with the gradient of the mean of the loss of several outputs over tokens of mask 1."""
        parts = []
        for row, (tokens, prompt, mask) in enumerate(masked(rows)):
            outputs = self.head(self.model.model(tokens[None]).last_hidden_state[0, prompt - 1 : -1])
            for t in mask.nonzero().flatten().tolist():
                target, numbers = float(rows.fields["returns"][row, t]), outputs[t].detach().double().tolist()
                if self.value_loss == "quantile":
                    _, gradient = value_oracles.quantile(numbers, target, 1.0)
                else:
                    _, gradient = value_oracles.hl_gauss(numbers, target, self.support.centers, 0.75)
                parts.append(weight_of(rows, row) * (outputs[t] @ torch.tensor(gradient)))
        return torch.stack(parts).mean()

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        if not self.is_policy:
            named = dict(self.model.model.named_parameters(prefix="model"))
        else:
            named = dict(self.model.named_parameters())
        return named | ({"score.weight": self.head.weight} if self.head is not None else {})

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return router biases and factors of layers, which training must not change."""
        endings = "e_score_correction_bias", "layer_scalar"
        return {name: buffer for name, buffer in self.model.named_buffers() if name.endswith(endings)}


MIXTRAL = {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}
"""Parts of names in transformers -> in the files of the hub."""


class Adapted(torch.nn.Module):
    """W + alpha / rank B A in place of W, as a parametrization of torch.

    Args:
        parts: parts of its name in the files of the hub, where they differ, see `MIXTRAL`.
    """

    def __init__(self, weight: torch.Tensor, name: str, lora: Lora, parts: dict[str, str]):
        super().__init__()
        self.scale = lora.alpha / lora.rank
        names = [with_parts_replaced(f"{name}.lora_{kind}.weight", parts) for kind in "AB"]
        self.a = torch.nn.Parameter(adapter_matrix(names[0], (lora.rank, weight.shape[1])))
        self.b = torch.nn.Parameter(adapter_matrix(names[1], (weight.shape[0], lora.rank)))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.scale * self.b @ self.a


class AdaptedExperts(torch.nn.Module):
    """The same for all experts' matrices, [experts, out, in], of which each has one below the other."""

    def __init__(self, weight: torch.Tensor, name: str, modules: Sequence[str], lora: Lora, files: dict[str, str]):
        super().__init__()
        self.experts = torch.nn.ModuleList()
        for expert, matrices in enumerate(weight):
            parts = zip(modules, matrices.chunk(len(modules)), strict=True)
            adapted = {
                part: Adapted(rows, f"{name}.{expert}.{part}", lora, files)
                for part, rows in parts
                if part in lora.modules
            }
            self.experts.append(torch.nn.ModuleDict(adapted))
        self.modules_of_each = modules

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        found = []
        for adapted, matrices in zip(self.experts, weight, strict=True):
            parts = zip(self.modules_of_each, matrices.chunk(len(self.modules_of_each)), strict=True)
            found.append(torch.cat([adapted[part](rows) if part in adapted else rows for part, rows in parts]))
        return torch.stack(found)

    def named(self, name: str) -> dict[str, torch.nn.Parameter]:
        """Return the adapters by PEFT's names without the prefix."""
        found = {}
        for expert, adapted in enumerate(self.experts):
            for part, one in adapted.items():
                found |= {f"{name}.{expert}.{part}.lora_{kind}.weight": getattr(one, kind.lower()) for kind in "AB"}
        return found


EXPERT_MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def adapt(model: torch.nn.Module, lora: Lora) -> dict[str, torch.nn.Parameter]:
    """Add adapters to Hugging Face's model and freeze its weights; return them by PEFT's names without the prefix."""
    model.requires_grad_(False)
    found, files = {}, MIXTRAL if model.config.model_type == "mixtral" else {}
    for name, module in [*model.named_modules()]:
        if name.endswith(".experts"):
            for parameter, modules in EXPERT_MATRICES.items():
                experts = AdaptedExperts(getattr(module, parameter), name, modules, lora, files)
                parametrize.register_parametrization(module, parameter, experts)
                found |= experts.named(name)
        if name.split(".")[-1] in lora.modules:
            adapted = Adapted(module.weight, name, lora, files)
            parametrize.register_parametrization(module, "weight", adapted)
            found |= {f"{name}.lora_A.weight": adapted.a, f"{name}.lora_B.weight": adapted.b}
    return found


def policy_loss(outputs: ByRow, rows: Rows) -> torch.Tensor:
    """Return the mean of PPO's clipped loss with dual clip and entropy bonus over tokens of mask 1, token by token."""
    losses = []
    for row, log_probs in enumerate(outputs["log_probs"]):
        for t in rows.response_mask[row].nonzero().flatten().tolist():
            advantage = rows.fields["advantages"][row, t]
            ratio = (log_probs[t] - rows.fields["old_log_probs"][row, t]).exp()
            loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - ACTOR.clip_ratio, 1 + ACTOR.clip_ratio))
            if advantage < 0:
                loss = torch.min(loss, -ACTOR.clip_ratio_c * advantage)
            losses.append(weight_of(rows, row) * (loss - ACTOR.entropy_coeff * outputs["entropy"][row][t]))
    return torch.stack(losses).mean()


def value_loss(outputs: ByRow, rows: Rows) -> torch.Tensor:
    """Return the mean of the clipped squared error over tokens of mask 1, token by token."""
    losses = []
    for row, values in enumerate(outputs["values"]):
        for t in rows.response_mask[row].nonzero().flatten().tolist():
            old, target = rows.fields["values"][row, t], rows.fields["returns"][row, t]
            clipped = old + (values[t] - old).clamp(-CRITIC.value_clip, CRITIC.value_clip)
            error = torch.max((values[t] - target) ** 2, (clipped - target) ** 2)
            losses.append(weight_of(rows, row) * 0.5 * error)
    return torch.stack(losses).mean()


def shard_of(rows: Rows, layout: Layout) -> list[int]:
    """Return this rank's rows of a mini-batch."""
    return balanced_partitions([len(tokens) for tokens in rows.sequences], layout.data)[
        layout.shard_of(dist.get_rank())
    ]


def assert_outputs(engine: TrainedEngine, rows: Rows, mine: list[int], expected: ByRow) -> None:
    """Check an engine's outputs for this rank's rows."""
    outputs = engine.forward(rows.select(mine))
    if not outputs:
        assert not engine.is_output
        return
    assert outputs.keys() == expected.keys()
    for name, references in expected.items():
        for row, position in enumerate(mine):
            found, reference = outputs[name][row].view(-1), references[position]
            torch.testing.assert_close(found[: len(reference)], reference, rtol=1e-5, atol=1e-5)
            assert not found[len(reference) :].any(), "padding must be 0"


def weight_of(rows: Rows, row: int) -> float:
    return float(rows.fields["loss_weights"][row]) if "loss_weights" in rows.fields else 1.0


def hf_train(
    folder: Path,
    kind: str,
    reference: Path | None,
    num_steps: int,
    lengths: Lengths,
    *,
    weighted: bool = False,
    lora: Lora | None = None,
    frozen: Sequence[str] = (),
    model: torch.nn.Module | None = None,
    rows: Rows | None = None,
    choose: Callable[[torch.nn.Module, Rows], Callable[[], torch.Tensor] | None] = lambda model, rows: None,
) -> dict:
    """Return the outputs before some Adam steps, and the gradient norms and parameters after them: with adapters the
    trained parameters; else all, of which parameters with a part of `frozen` in their names are not trained. `choose`
    changes the model first, and may return a loss that is added after each pass. `model` and `rows` take the place of
    the folder's model and of rows of `lengths`."""
    oracle = Oracle(
        model or hf_model(folder),
        hf_value_head(folder) if HEADS[kind] != "policy" else None,
        hf_model(reference) if reference else None,
        is_policy=HEADS[kind] != "value",
        value_loss=kind.removeprefix("shared "),
        support=value_support(make_config(kind)),
    )
    if kind == "shared detached":
        oracle.head.register_forward_pre_hook(lambda head, inputs: (inputs[0].detach(),))
    rows = rows or make_rows(oracle.model.config.vocab_size, lengths, weighted=weighted)
    added_loss = choose(oracle.model, rows)
    named = oracle.parameters()
    if lora is not None:
        named = adapt(oracle.model, lora) | {name: one for name, one in named.items() if name == "score.weight"}
    for name, parameter in named.items():
        if any(part in name for part in frozen):
            parameter.requires_grad_(False)
    is_decayed = {name: one.dim() > 1 and not name.endswith("bias") for name, one in named.items()}  # also if stacked
    decayed = [parameter for name, parameter in named.items() if is_decayed[name]]
    others = [parameter for name, parameter in named.items() if not is_decayed[name]]
    groups = [{"params": decayed, "weight_decay": OPTIM.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=OPTIM.lr, betas=OPTIM.betas, eps=OPTIM.eps)
    with torch.no_grad():
        before = oracle.outputs(rows)
    norms = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = oracle.loss(rows)
        (loss if added_loss is None else loss + added_loss()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(named.values(), OPTIM.clip_grad)))
        optimizer.step()
    parameters = per_expert(named)
    parameters |= oracle.buffers() if lora is None else {}
    if oracle.model.config.model_type in ("mixtral", "minimax_m2"):
        parameters = {with_parts_replaced(name, MIXTRAL): parameter for name, parameter in parameters.items()}
    return {"outputs": before, "grad_norms": norms, "parameters": parameters}


def with_parts_replaced(name: str, parts: dict[str, str]) -> str:
    for part, replacement in parts.items():
        name = name.replace(part, replacement)
    return name


def per_expert(named: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return the parameters by name, with each expert of a mixture separate, as adapters are already. GPT-OSS has them
    in stacks, with biases."""
    if any(name.endswith(".experts.down_proj_bias") for name in named):
        return {name: parameter.detach() for name, parameter in named.items()}
    found = {}
    for name, parameter in named.items():
        block, is_expert, kind = name.partition(".experts.")
        if not is_expert or ".lora_" in kind:
            found[name] = parameter.detach()
            continue
        for expert, matrix in enumerate(parameter.detach()):
            names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            parts = zip(names, matrix.chunk(len(names)), strict=True)
            found |= {f"{block}.experts.{expert}.{part}.weight": rows for part, rows in parts}
    return found

"""Trained engines of tiny models and a batch to train them on, for tests of what stands above the models."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megappo.config.schema import Actor, Critic, Model, Optim, Parallel
from megappo.data.batch import Rows
from megappo.models.build import build_model
from megappo.models.engine import TrainedEngine
from megappo.models.heads import policy_head, value_head
from megappo.placement.exchange import Exchange, homes
from megappo.placement.groups import ComponentGroups
from megappo.placement.layout import Layout
from megappo.trainer.component import Batch
from megappo.weights.export import iter_hf_buckets
from megappo.weights.load import load_hf

TEMPERATURE = 0.7
OPTIM = Optim(lr=1e-2, eps=1e-4, weight_decay=0.1, clip_grad=0.05)
ACTOR = Actor(entropy_coeff=0.01, clip_ratio_c=1.5)
CRITIC = Critic(value_clip=0.5)
LENGTHS = ((3, 4), (1, 6), (5, 1), (2, 2), (4, 5), (2, 3))  # (prompt, response)


@dataclass(frozen=True)
class Case:
    """A layout and a cut of the batch."""

    layout: Layout
    sequence: bool = False
    max_tokens: int = 64
    optim: Optim = OPTIM
    recompute: str = "none"
    temperature: float = TEMPERATURE

    @property
    def parallel(self) -> Parallel:
        return Parallel(tensor=self.layout.tensor, pipeline=self.layout.pipeline, sequence=self.sequence)


def make_rows(vocab_size: int, lengths: Sequence[tuple[int, int]] = LENGTHS) -> Rows:
    """The same random rows on every rank, with every field the losses read."""
    generator = torch.Generator().manual_seed(1)
    prompts, responses = torch.tensor(lengths).T
    width = int(responses.max())
    mask = (torch.arange(width) < responses[:, None]).float()
    random = {
        name: torch.randn(len(lengths), width, generator=generator) * mask
        for name in ("noise", "advantages", "values", "returns")
    }
    tokens = [torch.randint(vocab_size, (p + r,), generator=generator) for p, r in lengths]
    # Old log-probs on both sides of the clipping range around those of an untrained model.
    old = (-torch.log(torch.tensor(float(vocab_size))) + 0.3 * random.pop("noise")) * mask
    fields = {"response_mask": mask, "old_log_probs": old, **random}
    return Rows(torch.arange(len(lengths)), prompts, responses, tokens, fields)


def at_home(exchange: Exchange, rows: Rows, rows_per_prompt: int) -> Batch:
    """A step's batch of rows that every rank knows: each keeps those whose home it is."""
    home_of = homes(len(rows), exchange.world_size, rows_per_prompt)
    mine = rows.select(home_of[exchange.rank])
    table, holders = exchange.table(mine)
    assert holders == home_of
    return Batch(mine, table, home_of)


def with_score(folder: Path) -> Path:
    """Give a Hugging Face folder a value head, so that everybody starts from the same one."""
    weights = load_file(folder / "model.safetensors")
    hidden = read_config(folder)["hidden_size"]
    weights["score.weight"] = torch.randn(1, hidden, generator=torch.Generator().manual_seed(2)) * 0.1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def read_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def make_engine(folder: Path, case: Case, groups: ComponentGroups, kind: str) -> TrainedEngine:
    """This rank's part of an actor or critic (`kind`) with the folder's weights."""
    hf_config = read_config(folder)
    is_critic = kind == "critic"
    model = build_model(
        hf_config,
        Model(path=str(folder), dtype="fp32"),
        case.parallel,
        groups,
        value_head=is_critic,
        recompute=case.recompute,
        trained=True,
    )
    load_hf(model, folder, hf_config, groups, value_head=is_critic)
    head = value_head if is_critic else policy_head(groups.collection.tp, hf_config["vocab_size"], case.temperature)
    return TrainedEngine(model, groups, head, case.max_tokens, case.optim, total_optimizer_steps=10)


def exported(engine: TrainedEngine, hf_config: dict, kind: str) -> dict[str, torch.Tensor]:
    """The engine's weights under their Hugging Face names."""
    buckets = iter_hf_buckets(engine.model, hf_config, engine.groups, 1 << 16, value_head=kind == "critic")
    return {name: tensor for bucket in buckets for name, tensor in bucket}


def hf_outputs(
    model: torch.nn.Module, head: torch.nn.Module | None, rows: Rows, temperature: float = TEMPERATURE
) -> list[tuple[torch.Tensor, ...]]:
    """By Hugging Face, one row at a time: (log_probs, entropy), or (values,) with a value head."""
    found = []
    for tokens, prompt in zip(rows.input_ids, rows.prompt_lengths.tolist(), strict=True):
        predicting = slice(prompt - 1, len(tokens) - 1)
        if head is not None:
            found.append((head(model.model(tokens[None]).last_hidden_state[0, predicting])[:, 0],))
            continue
        log_p = torch.log_softmax(model(tokens[None]).logits[0, predicting] / temperature, -1)
        found.append((log_p.gather(1, tokens[prompt:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)))
    return found


def hf_value_head(folder: Path) -> torch.nn.Linear:
    """The value head that `with_score` wrote."""
    weight = load_file(folder / "model.safetensors")["score.weight"]
    head = torch.nn.Linear(weight.shape[1], 1, bias=False)
    head.weight.data.copy_(weight)
    return head

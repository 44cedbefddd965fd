"""Train engines of tiny models, and a batch to train them on, for tests of the layers above the models."""

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from layouts import parallel_of
from safetensors.torch import load_file, save_file

from megappo.architecture.architecture import Architecture
from megappo.architecture.families import HeadKind
from megappo.architecture.parameters import is_adapter
from megappo.architecture.parsing import read_architecture
from megappo.batch.exchange import Batch, Exchange
from megappo.batch.rows import Rows
from megappo.config.methods import VALUE_LOSSES, ValueSupport
from megappo.config.model_sections import Lora, Optim
from megappo.config.schema import Actor, Config, Critic
from megappo.config.sections import Model, Parallel
from megappo.config.value_support import value_support
from megappo.config.values import ParameterGroup
from megappo.models.gpt import ModelChunks, build_model
from megappo.models.heads import output_weight, policy_head, policy_value_head, value_head
from megappo.models.megatron_engine import Head, MegatronEngine
from megappo.models.train_engine import LossFn, TrainedEngine
from megappo.placement.components import ComponentSpec, Setting
from megappo.placement.groups import ComponentGroups
from megappo.placement.layout import Layout
from megappo.trainer.objectives import ActorLoss, critic_loss, value_readers
from megappo.weights.export import Export
from megappo.weights.hf_folder import fuse_bucket
from megappo.weights.load import load_hf
from megappo.weights.shards import decompose, global_parameters, shard_group, table_of

TEMPERATURE = 0.7
OPTIM = Optim(lr=1e-2, eps=1e-4, weight_decay=0.1, clip_grad=0.05)
ACTOR = Actor(entropy_coeff=0.01, clip_ratio_c=1.5)
CRITIC = Critic(value_clip=0.5)
VALUE_COEF = 0.3
UNSET = Setting("", None)
SPEC = ComponentSpec(ranks=UNSET, parallel=UNSET, folder=UNSET, max_tokens=UNSET, head="policy", forward=None)
"""Spec of a component whose engine a test builds by itself."""
KL_LOSS = {"use_kl_loss": True, "kl_loss_type": "full", "kl_loss_coef": 0.2}
HEADS: dict[str, HeadKind] = {"actor": "policy", "full_kl": "policy", "critic": "value", "shared": "policy_value"}
HEADS |= {
    "hl_gauss": "value",
    "quantile": "value",
    "shared hl_gauss": "policy_value",
    "shared detached": "policy_value",
}
"""Kinds of engine: "full_kl" is an actor with a reference and a KL loss, "shared" an actor with a value head. A value
loss names a head of several outputs."""
VALUE_BINS = 7
LENGTHS = ((3, 4), (1, 6), (5, 1), (2, 2), (4, 5), (2, 3))  # (prompt, response)


@dataclass(frozen=True)
class Case:
    """A layout and a cut of the batch; `switches` are on besides the switches that the table has on."""

    layout: Layout
    sequence: bool = False
    max_tokens: int = 64
    optim: Optim = OPTIM
    recompute: str = "none"
    temperature: float = TEMPERATURE
    split: tuple[int, ...] | None = None
    dtype: str = "fp32"
    switches: frozenset[str] = frozenset()
    lora: Lora | None = None
    frozen: tuple[ParameterGroup, ...] = ()

    @property
    def parallel(self) -> Parallel:
        return parallel_of(self.layout, pipeline_split=self.split, sequence=self.sequence)


def make_config(kind: str, ppo_epochs: int = 1) -> Config:
    """Return a config for one kind of engine, with ACTOR's and CRITIC's losses."""
    epochs = {"ppo_epochs": ppo_epochs}
    value_loss = kind.removeprefix("shared ")
    critic: Critic | dict = CRITIC.model_copy(update=epochs)
    if value_loss in VALUE_LOSSES:
        critic = epochs | {"value_loss": value_loss, "value_bins": VALUE_BINS}
        critic |= {"value_range": (-1.0, 2.0)} if value_loss == "hl_gauss" else {"huber_delta": 1.0}
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train_files": ["f"]},
            "trainer": {"output_dir": "o"},
            "actor": ACTOR.model_copy(update=epochs | (KL_LOSS if kind == "full_kl" else {})),
            "critic": critic,
            "algorithm": {"shared_backbone": HEADS[kind] == "policy_value", "value_coef": VALUE_COEF}
            | ({"detach_values": True} if kind == "shared detached" else {}),
        }
    )


def make_loss(kind: str, rows: Rows) -> LossFn:
    """Return the loss of one kind of engine on a mini-batch; `rows` are the rows of all shards."""
    make = critic_loss if HEADS[kind] == "value" else ActorLoss
    return make(make_config(kind), int(rows.response_mask.sum()), int(rows.response_mask.any(dim=1).sum()))


def make_rows(
    vocab_size: int,
    lengths: Sequence[tuple[int, int]] = LENGTHS,
    rows_per_prompt: int = 1,
    *,
    weighted: bool = False,
) -> Rows:
    """The same random rows on every rank, with every field the losses read; in longer ones an environment wrote a part.

    Args:
        lengths: (prompt, response) of each row.
        rows_per_prompt: as many in a row answer the same prompt.
        weighted: each with a weight of its losses, 0 for the second.
    """
    generator = torch.Generator().manual_seed(1)
    prompts, responses = torch.tensor(lengths).T
    width = int(responses.max())
    place, ids = torch.arange(width), torch.arange(len(lengths))
    is_response = (place < responses[:, None]).float()
    environment = (responses[:, None] > 3) & ((place % 5 == 1) | (place % 5 == 2))
    mask = is_response * ~environment
    random = {
        name: torch.randn(len(lengths), width, generator=generator) * is_response
        for name in ("noise", "advantages", "values", "returns")
    }
    tokens = torch.randint(vocab_size, (int((prompts + responses).sum()),), generator=generator)
    # Old log-probs on both sides of the clipping range around the log-probs of an untrained model.
    old = (-torch.log(torch.tensor(float(vocab_size))) + 0.3 * random.pop("noise")) * is_response
    fields = {"response_mask": mask, "old_log_probs": old, **random}
    fields |= {"loss_weights": torch.rand(len(lengths), generator=generator) * 2 * (ids != 1)} if weighted else {}
    return Rows(ids, ids // rows_per_prompt, prompts, responses, tokens, fields)


def at_owners(exchange: Exchange, rows: Rows) -> Batch:
    """Return this rank's part of a step's batch that every rank knows: the rows that it owns."""
    batch = exchange.number(rows if exchange.rank == 0 else rows.select([]))
    return exchange.move(batch, batch.table.split(exchange.world_size), list(rows.fields))


def with_score(folder: Path, kind: str = "critic") -> Path:
    """Give a Hugging Face folder a value head, so that all engines of the kind start from the same one."""
    support = value_support(make_config(kind))
    if support is not None:
        config = json.loads((folder / "config.json").read_text()) | {"value_support": asdict(support)}
        (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    hidden = read_architecture(folder).hidden_size
    weights["score.weight"] = torch.randn(
        support.size if support else 1, hidden, generator=torch.Generator().manual_seed(2)
    ) * (0.5 if support else 0.1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_engine(
    folder: Path, case: Case, groups: ComponentGroups, kind: str, reference: MegatronEngine | None = None
) -> TrainedEngine:
    """This rank's part of one kind of engine with the folder's weights.

    Forward passes also report values at the end of the rows, and only a "full_kl" engine's the KL to the reference;
    every engine's training steps do.
    """
    config = make_config(kind)
    support = value_support(config)
    architecture = read_architecture(folder, HEADS[kind]).with_lora(case.lora).with_frozen(case.frozen)
    architecture = replace(architecture, support=support)
    chunks = build_model(
        architecture,
        Model(path=str(folder), dtype=case.dtype),
        case.parallel,
        groups,
        recompute=case.recompute,
        trained=True,
    )
    chunks[0].config.switches |= case.switches
    load_hf(chunks, folder, architecture, groups)
    if case.lora is not None:
        fill_adapters(chunks, architecture, groups)

    def head(trains: bool) -> Head:
        value = value_head(bootstrap=not trains, **value_readers(config, support, trains=trains))
        if HEADS[kind] == "value":
            return value
        weight = partial(output_weight, chunks[-1])
        factors = reference.logit_factors if reference and (trains or kind == "full_kl") else None
        sizes = groups.collection.tp, architecture.vocab_size
        policy = policy_head(weight, *sizes, case.temperature, factors, architecture.logit_cap)
        if HEADS[kind] == "policy":
            return policy
        return policy_value_head(policy, value, chunks[-1], detached=config.algorithm.detach_values)

    return TrainedEngine(
        chunks, groups, head(False), case.max_tokens, case.optim, total_optimizer_steps=10, loss_head=head(True)
    )


def make_reference(folder: Path, case: Case, groups: ComponentGroups) -> MegatronEngine:
    """Return this rank's part of a frozen model with the folder's weights."""
    architecture = read_architecture(folder)
    chunks = build_model(
        architecture,
        Model(path=str(folder), dtype=case.dtype),
        case.parallel,
        groups,
        recompute="none",
        trained=False,
    )
    load_hf(chunks, folder, architecture, groups)
    weight = partial(output_weight, chunks[-1])
    head = policy_head(weight, groups.collection.tp, architecture.vocab_size, case.temperature)
    return MegatronEngine(chunks, groups, head, case.max_tokens)


def adapter_matrix(name: str, shape: Sequence[int]) -> torch.Tensor:
    """Return values for a matrix of an adapter such that the product of its two matrices is not 0 as at the start."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return 0.1 * torch.randn(*shape, generator=generator)


def fill_adapters(chunks: ModelChunks, architecture: Architecture, groups: ComponentGroups) -> None:
    """Set the adapters to `adapter_matrix`."""
    table = table_of(architecture, groups)
    for name, parameter in global_parameters(chunks).items():
        if is_adapter(name):
            [hf] = table[name].hf_tensors
            matrix = adapter_matrix(hf.name, hf.shape)
            if hf.shard_dim is not None:
                cut = shard_group(hf, groups)
                matrix = matrix.chunk(cut.size(), hf.shard_dim)[cut.rank()]
            part = decompose(parameter, table[name])[hf.name]
            part.copy_(matrix.view_as(part))


def exported_adapters(engine: TrainedEngine, architecture: Architecture) -> dict[str, torch.Tensor]:
    """Return the engine's adapters, under PEFT's names without the prefix."""
    buckets = Export(engine.chunks, architecture, engine.groups, adapters=True).buckets(1 << 16)
    return {name: tensor for bucket in buckets for name, tensor in bucket}


def exported(engine: TrainedEngine, architecture: Architecture, kind: str) -> dict[str, torch.Tensor]:
    """Return the engine's weights as a Hugging Face folder has them."""
    exported = replace(architecture, head=HEADS[kind], support=value_support(make_config(kind)))
    buckets = Export(engine.chunks, exported, engine.groups).buckets(1 << 16)
    return {name: tensor for bucket in buckets for name, tensor in fuse_bucket(architecture, bucket)}


def hf_outputs(
    model: torch.nn.Module,
    head: torch.nn.Module | None,
    rows: Rows,
    temperature: float = TEMPERATURE,
    support: ValueSupport | None = None,
) -> list[tuple[torch.Tensor, ...]]:
    """Return Hugging Face's (log_probs, entropy) of each row, or (values,) with a value head; 0 where the mask is 0."""
    found = []
    for tokens, prompt, mask in masked(rows):
        predicting = slice(prompt - 1, len(tokens) - 1)
        if head is not None:
            values = value_of(head(model.model(tokens[None]).last_hidden_state[0, predicting]), support)
            found.append((values * mask,))
            continue
        log_p = torch.log_softmax(model(tokens[None]).logits[0, predicting] / temperature, -1)
        log_probs, entropy = log_p.gather(1, tokens[prompt:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
        found.append((log_probs * mask, entropy * mask))
    return found


def masked(rows: Rows) -> Iterator[tuple[torch.Tensor, int, torch.Tensor]]:
    """Yield each row's tokens, the length of its prompt, and the mask of its response."""
    for i, (tokens, prompt) in enumerate(zip(rows.sequences, rows.prompt_lengths.tolist(), strict=True)):
        yield tokens, prompt, rows.response_mask[i, : len(tokens) - prompt]


def hf_value_head(folder: Path) -> torch.nn.Linear:
    """Return the value head that `with_score` wrote."""
    weight = load_file(folder / "model.safetensors")["score.weight"]
    head = torch.nn.Linear(*weight.shape[::-1], bias=False)
    head.weight.data.copy_(weight)
    return head


def value_of(outputs: torch.Tensor, support: ValueSupport | None) -> torch.Tensor:
    """Return the values [n] that a head's outputs [n, K] stand for."""
    if support is None or not support.centers:
        return outputs.sum(-1) / outputs.shape[-1]
    return outputs.softmax(-1) @ torch.tensor(support.centers)


def hf_bootstrap_values(
    model: torch.nn.Module, head: torch.nn.Module, rows: Rows, support: ValueSupport | None = None
) -> list[torch.Tensor]:
    """Return Hugging Face's value [1] at the last token of each row."""
    return [value_of(head(model.model(tokens[None]).last_hidden_state[0, -1:]), support) for tokens in rows.sequences]


def hf_full_kl(
    model: torch.nn.Module, reference: torch.nn.Module, rows: Rows, temperature: float = TEMPERATURE
) -> list[torch.Tensor]:
    """Return Hugging Face's KL(model || reference) at each response token of each row, 0 where the mask is 0."""
    found = []
    for tokens, prompt, mask in masked(rows):
        log_p, log_q = (
            torch.log_softmax(either(tokens[None]).logits[0, prompt - 1 : -1] / temperature, -1)
            for either in (model, reference)
        )
        found.append((log_p.exp() * (log_p - log_q.detach())).sum(-1) * mask)
    return found

"""Cutting a mini-batch, into micro-batches and over 1, 2 and 4 data-parallel ranks, changes neither loss nor gradient
nor metrics: for every policy loss, aggregation and preset, the value losses, the entropy bonus and the KL losses."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from policy_oracles import policy_loss
from ragged import Case
from spawn import run_ranks

from megappo.config.methods import POLICY_LOSSES
from megappo.config.schema import Actor, Critic
from megappo.ppo.conventions import DEFAULT, KL_KINDS, PRESETS
from megappo.ppo.losses import entropy_loss, kl_loss, value_loss
from megappo.ppo.reductions import AGGREGATIONS, Normaliser

NUM_CASES = 6
MAX_LENGTH = 17

Loss = Callable[[list[torch.Tensor], Normaliser, torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""(x, y, z, weights, mask), normaliser, tokens selected by covariance -> loss and metrics."""


def actor(name: str, mode: str | None) -> Actor:
    return Actor(
        policy_loss=name,
        loss_agg_mode=mode,
        entropy_coeff=0.3,
        kl_loss_coef=0.2,
        clip_cov_ratio=0.2,
        clip_cov_lb=-0.2,
        kl_cov_ratio=0.2,
    )


def policy(name: str, mode: str | None) -> Loss:
    def loss(tensors, normaliser, selected):
        *inputs, weights, mask = tensors
        chosen = selected if POLICY_LOSSES[name].select else None
        keywords = {"rollout_is_weights": weights, "normaliser": normaliser, "selected": chosen}
        return policy_loss(*inputs, mask, actor(name, mode), **keywords)

    return loss


def value(mode: str | None, clip: float | None, delta: float | None) -> Loss:
    config = Critic(loss_agg_mode=mode, value_clip=clip, huber_delta=delta)
    return lambda tensors, normaliser, _: value_loss(*tensors[:3], tensors[4], config, normaliser=normaliser)


def entropy(mode: str | None) -> Loss:
    return lambda tensors, normaliser, _: entropy_loss(
        tensors[0], tensors[4], actor("clip", mode), normaliser=normaliser
    )


def kl(mode: str | None, kind: str) -> Loss:
    config = actor("clip", mode).model_copy(update={"kl_loss_type": kind})

    def loss(tensors, normaliser, _):
        given = {"kl": tensors[0].square()} if kind == "full" else {}
        return kl_loss(tensors[0], tensors[1], tensors[4], config, normaliser=normaliser, **given)

    return loss


def preset(name: str) -> Loss:
    def loss(tensors, normaliser, _):
        *inputs, _, mask = tensors
        return policy_loss(*inputs, mask, actor("clip", None), normaliser=normaliser, conventions=PRESETS[name])

    return loss


def every_loss() -> Iterator[tuple[str, Loss]]:
    """Name and function."""
    for mode in (None, *AGGREGATIONS):
        for name in POLICY_LOSSES:
            yield f"{name} {mode}", policy(name, mode)
        for clip, delta in ((None, None), (0.5, None), (None, 0.7), (0.5, 0.7)):
            yield f"value {mode} clip {clip} huber {delta}", value(mode, clip, delta)
        yield f"entropy {mode}", entropy(mode)
        for kind in (*KL_KINDS, "full"):
            yield f"kl {mode} {kind}", kl(mode, kind)
    for name in PRESETS:
        yield f"preset {name}", preset(name)


def tensors_of(case: Case) -> list[torch.Tensor]:
    return [*(case.numbers(0.5) for _ in range(3)), case.numbers().abs() + 0.1, case.mask]


def numbers_of(loss: Loss, tensors: list[torch.Tensor], normaliser: Normaliser, selected: torch.Tensor):
    """[1 + metrics] loss and metrics that are sums, and the gradient in the first tensor."""
    leaf = tensors[0].clone().requires_grad_()
    total, metrics = loss([leaf, *tensors[1:]], normaliser, selected)
    total.backward()
    sums = [part for part in metrics.values() if not isinstance(part, tuple)]
    return torch.stack([total.detach(), *sums]).double(), leaf.grad


def in_parts(loss: Loss, tensors, normaliser, selected, parts: list[torch.Tensor]):
    """As `numbers_of`, of the parts' sum, and the sum of the parts' absolute numbers."""
    results = [(rows, *numbers_of(loss, [x[rows] for x in tensors], normaliser, selected[rows])) for rows in parts]
    numbers = torch.stack([found for _, found, _ in results])
    gradient = torch.zeros_like(tensors[0])
    for rows, _, part in results:
        gradient[rows] = part
    return numbers.sum(dim=0), numbers.abs().sum(dim=0), gradient


def select(tensors: list[torch.Tensor], name: str, group: dist.ProcessGroup | None) -> torch.Tensor:
    return POLICY_LOSSES[name].select(tensors[0], tensors[2], tensors[4], actor(name, None), group=group)


def random_parts(rows: torch.Tensor, generator: torch.Generator) -> list[torch.Tensor]:
    """The rows in random order, cut at random places; a part may be empty."""
    rows = rows[torch.randperm(len(rows), generator=generator)]
    cuts = torch.randint(0, len(rows) + 1, (3,), generator=generator).sort().values
    return list(torch.tensor_split(rows, cuts))


def check_sharded(rank: int, world_size: int) -> None:
    group = dist.group.WORLD if dist.is_initialized() else None
    for seed in range(NUM_CASES):
        case = Case(batch=1 + 3 * seed % 8, width=2 + 5 * seed % 13, seed=seed)
        tensors = tensors_of(case)
        homes = torch.randint(0, world_size, (len(case.mask),), generator=case.generator)
        mine = (homes == rank).nonzero().flatten()
        own = random_parts(mine, torch.Generator().manual_seed(97 * seed + rank))
        check_case(tensors, mine, own, group)


def check_case(tensors, mine: torch.Tensor, parts: list[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Compare this rank's parts, summed over the ranks, with all rows in one call. `mine`: this rank's rows."""
    mask = tensors[4]
    normaliser = Normaliser(int(mask.sum()), int(mask.any(dim=1).sum()), MAX_LENGTH)
    selecting = [name for name, method in POLICY_LOSSES.items() if method.select]
    choices = {name: select(tensors, name, None) for name in selecting}
    for name, choice in choices.items():
        assert torch.equal(select([x[mine] for x in tensors], name, group), choice[mine])
    for name, loss in every_loss():
        selected = choices.get(name.split()[0], torch.zeros_like(mask))
        numbers, gradient = numbers_of(loss, tensors, normaliser, selected)
        sums, sizes, found = (summed(x, group) for x in in_parts(loss, tensors, normaliser, selected, parts))
        # Relative to the terms of the sum, which may cancel.
        assert ((sums - numbers).abs() <= 1e-6 * torch.maximum(sizes, numbers.abs())).all(), (name, sums, numbers)
        assert (found - gradient).abs().max() <= 1e-6 * gradient.abs().max(), (name, found, gradient)


def summed(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is not None:
        dist.all_reduce(x, group=group)
    return x


def test_micro_batches_change_nothing():
    check_sharded(rank=0, world_size=1)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_data_parallel_ranks_change_nothing(world_size: int):
    run_ranks(world_size, check_sharded)


def test_a_normaliser_left_out_is_the_calls_own():
    case = Case(4, 6, seed=5)
    x, y, z, weights, mask = tensors_of(case)
    given = Normaliser(int(mask.sum()), int(mask.any(dim=1).sum()), mask.shape[1])
    for mode in AGGREGATIONS:
        own, _ = policy_loss(x, y, z, mask, actor("clip", mode), conventions=DEFAULT)
        assert torch.equal(own, policy_loss(x, y, z, mask, actor("clip", mode), normaliser=given)[0])

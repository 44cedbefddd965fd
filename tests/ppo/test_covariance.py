"""Selection of tokens by Clip-Cov and KL-Cov, against a sort in Python floats, with ties, over ranks and cuts."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from policy_oracles import Inputs, covariance_choice
from ragged import CASES, Case, cases
from spawn import run_ranks

from megappo.config.schema import Actor


def select_by_covariance(
    log_probs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, config: Actor, **group
) -> torch.Tensor:
    return config.method.select(log_probs, advantages, mask, config, **group)


SHARES = st.sampled_from([0.0, 0.0002, 0.1, 0.5, 1.0])


def tied(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and advantages of few distinct values, an advantage per row: many equal covariances."""
    advantages = torch.randint(-1, 2, (case.shape[0], 1), generator=case.generator).expand(case.shape)
    return -torch.randint(0, 3, case.shape, generator=case.generator).float(), advantages.float()


@CASES
@given(cases(), SHARES, st.booleans(), st.sampled_from([(-1.0, 0.5), (0.0, 5.0), (1.0, 5.0)]), st.booleans())
def test_the_choice_equals_a_sort(case: Case, share: float, kl: bool, band: tuple[float, float], ties: bool):
    log_probs, advantages = tied(case) if ties else (case.numbers(), case.numbers())
    name = "kl_cov" if kl else "clip_cov"
    config = Actor(policy_loss=name, kl_cov_ratio=share, clip_cov_ratio=share, clip_cov_lb=band[0], clip_cov_ub=band[1])
    chosen = select_by_covariance(log_probs, advantages, case.mask, config)
    assert chosen.dtype == torch.bool and not chosen[case.mask == 0].any()
    expected = covariance_choice(
        Inputs(case, log_probs, log_probs, advantages, None), share, (-math.inf, math.inf) if kl else band
    )
    found = [[bool(flag) for flag in row[mask.bool()]] for row, mask in zip(chosen, case.mask, strict=True)]
    if ties:  # equal rows may trade places
        assert sum(map(sum, found)) == sum(map(sum, expected))
    else:
        assert found == expected


def test_hand_computed():
    # Means 0 and -2; covariances: 1 x 2, 1 x -1 / -1 x 0, -1 x -1.
    log_probs = torch.tensor([[0.0, -3.0, 9.0], [-2.0, -3.0, 9.0]])
    advantages = torch.tensor([[1.0, 1.0, 9.0], [-1.0, -1.0, 9.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]])

    def chosen(**keys) -> list[list[int]]:
        return select_by_covariance(log_probs, advantages, mask, Actor(**keys)).nonzero().tolist()

    assert chosen(policy_loss="kl_cov", kl_cov_ratio=0.0002) == [[0, 0]]  # one at least
    assert chosen(policy_loss="kl_cov", kl_cov_ratio=0.5) == [[0, 0], [1, 1]]
    assert chosen(policy_loss="clip_cov", clip_cov_ratio=0.5) == [[0, 0]]  # 1 is not inside (1, 5)
    assert chosen(policy_loss="clip_cov", clip_cov_ratio=0.25, clip_cov_lb=0.5, clip_cov_ub=1.5) == [[1, 1]]
    assert chosen(policy_loss="clip_cov", clip_cov_ratio=0.5, clip_cov_lb=2.0) == []


def test_no_more_are_chosen_where_sure_tokens_tie():
    """log_prob 0 throughout and one advantage per row, as GRPO gives."""
    advantages = torch.tensor([[1.0], [-1.0]]).expand(2, 100)
    chosen = select_by_covariance(torch.zeros(2, 100), advantages, torch.ones(2, 100), config("kl_cov", 0.05))
    assert int(chosen.sum()) == 10


def test_ties_go_to_the_row_of_the_larger_sum_then_to_the_earlier_position():
    log_probs, one = torch.tensor([[0.0, 0.0, -3.0], [0.0, 0.0, -1.0]]), torch.ones(2, 3)
    chosen = select_by_covariance(log_probs, one, one, config("kl_cov", 0.2))
    assert chosen.nonzero().tolist() == [[1, 0]]
    chosen = select_by_covariance(log_probs, one, one, config("kl_cov", 0.5))
    assert chosen.nonzero().tolist() == [[1, 0], [1, 1], [1, 2]]


def test_nothing_is_chosen_without_tokens_and_junk_behind_the_mask_does_not_count():
    junk = torch.full((2, 3), math.nan)
    assert not select_by_covariance(junk, junk, torch.zeros(2, 3), config("kl_cov", 0.5)).any()
    mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    values = torch.where(mask.bool(), torch.tensor([[0.0, -1.0, 0.0], [0.0, 0.0, 0.0]]), math.nan)
    assert select_by_covariance(values, values, mask, config("kl_cov", 0.5)).nonzero().tolist() == [[0, 0]]


def test_values_that_are_not_finite_are_refused():
    one = torch.ones(1, 2)
    with pytest.raises(FloatingPointError, match="not finite"):
        select_by_covariance(one * math.nan, one, one, config("kl_cov", 0.5))


def config(name: str, share: float) -> Actor:
    return Actor(policy_loss=name, kl_cov_ratio=share, clip_cov_ratio=share, clip_cov_lb=-0.5, clip_cov_ub=0.9)


def check_ranks_choose_together(rank: int, world_size: int) -> None:
    for seed in range(30):
        case = Case(6, 8, seed)
        log_probs, advantages = tied(case) if seed % 2 else (case.numbers(), case.numbers())
        homes = torch.randint(0, world_size, (6,), generator=case.generator)
        for name in ("clip_cov", "kl_cov"):
            for share in (0.001, 0.2, 1.0):
                section = config(name, share)
                whole = select_by_covariance(log_probs, advantages, case.mask, section)
                mine = homes == rank
                local = (log_probs[mine], advantages[mine], case.mask[mine])
                chosen = select_by_covariance(*local, section, group=dist.group.WORLD)
                if seed % 2 == 0:
                    assert torch.equal(chosen, whole[mine])
                # Tied tokens of rows with the same sum may trade places; what is chosen is the same.
                row_sums = (log_probs * case.mask).sum(dim=1, keepdim=True).expand_as(log_probs)
                positions = torch.arange(8.0).expand_as(log_probs)
                table = torch.stack([log_probs, advantages, row_sums, positions], dim=-1)
                together = [None] * world_size
                dist.all_gather_object(together, table[mine][chosen].tolist())
                assert sorted(sum(together, [])) == sorted(table[whole].tolist())
    with pytest.raises(FloatingPointError, match="not finite"):
        bad = torch.full((1, 2), math.nan if rank == 0 else 1.0)
        select_by_covariance(bad, bad, torch.ones(1, 2), config("kl_cov", 0.5), group=dist.group.WORLD)


def test_ranks_choose_what_one_rank_would():
    run_ranks(3, check_ranks_choose_together)

"""GAE over tokens and turns against its definition and against plain loops in Python floats."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged import CASES, Case, cases

from megappo.ppo.advantages import gae, gae_over_turns, length_adaptive_lam


def defined_gae(rewards, values, mask, gamma, lams, bootstrap_values):
    """Eq. 16 by its sum over later tokens, on each row's policy tokens alone."""
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    for i, lam in enumerate(lams):
        positions = [t for t in range(values.shape[1]) if mask[i, t] == 1]
        row_values = [float(values[i, t]) for t in positions] + [float(bootstrap_values[i])]
        for start, t in enumerate(positions):
            total = 0.0
            for k, s in enumerate(positions[start:]):
                delta = float(rewards[i, s]) + gamma * row_values[start + k + 1] - row_values[start + k]
                total += (gamma * lam) ** k * delta
            advantages[i, t] = total
            returns[i, t] = total + float(values[i, t])
    return advantages, returns


def loop_gae(rewards, values, mask, gamma, lam):
    """The backward recursion, in float64."""
    advantages = torch.zeros(values.shape, dtype=torch.float64)
    running, next_value = (torch.zeros(len(values), dtype=torch.float64) for _ in range(2))
    for t in reversed(range(values.shape[1])):
        valid = mask[:, t] == 1
        delta = rewards[:, t].double() + gamma * next_value - values[:, t].double()
        running = torch.where(valid, delta + gamma * lam * running, running)
        next_value = torch.where(valid, values[:, t].double(), next_value)
        advantages[:, t] = torch.where(valid, running, 0.0)
    return advantages


@CASES
@given(cases(), st.booleans(), st.booleans())
def test_gae_equals_its_definition_on_ragged_masks(case: Case, lam_per_row: bool, bootstrap: bool):
    rewards, values, bootstrap_values = case.numbers(), case.numbers(), case.numbers()[:, 0]
    gamma, lam = case.uniform(0.8, 1.0), case.uniform(0.0, 1.0)
    lams = (
        torch.rand(len(values), generator=case.generator) if lam_per_row else torch.full((len(values),), lam).double()
    )
    found = gae(
        rewards,
        values,
        case.mask,
        gamma,
        lams if lam_per_row else lam,
        bootstrap_values=bootstrap_values if bootstrap else None,
    )
    expected = defined_gae(rewards, values, case.mask, gamma, lams.tolist(), bootstrap_values * bootstrap)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("holes", [0.0, 0.3])
@pytest.mark.parametrize("width", [31, 32, 33, 64, 1024, 1025, 3000])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.5, 0.0), (1.0, 0.999)])
def test_gae_equals_the_loop_over_many_blocks(width: int, holes: float, gamma: float, lam: float):
    case = Case(7, width, seed=width)
    lengths = torch.randint(1, width + 1, (7, 1), generator=case.generator)
    kept = torch.rand(case.shape, generator=case.generator) >= holes
    case.mask = ((torch.arange(width) < lengths) & kept).float()
    rewards, values = case.numbers(), case.numbers()
    expected = loop_gae(rewards, values, case.mask, gamma, lam)
    for chosen in (lam, torch.full((7,), lam, dtype=torch.float64)):
        found, returns = gae(rewards, values, case.mask, gamma, chosen)
        # Of the largest: a sum near 0 has passed through large ones, and is as far off as they are.
        for x, definition in ((found, expected), (returns, expected + values * case.mask)):
            assert (x - definition).abs().max() <= 1e-6 * definition.abs().max()


@pytest.mark.parametrize("width", [1, 15, 16, 17, 31, 32, 33, 100, 1025])
@pytest.mark.parametrize("kept", [0.02, 0.5, 0.95])
def test_gae_of_sparse_masks_equals_its_definition(width: int, kept: float):
    case = Case(6, width, seed=width)
    case.mask = (torch.rand(case.shape, generator=case.generator) < kept).float()
    case.mask[0] = 0.0
    case.mask[:, 40:90] = 0.0  # columns that no row has a token in
    rewards, values, bootstrap_values = case.numbers(), case.numbers(), case.numbers()[:, 0]
    lams = torch.linspace(0.0, 1.0, 6)
    found = gae(rewards, values, case.mask, 0.99, lams, bootstrap_values=bootstrap_values)
    expected = defined_gae(rewards, values, case.mask, 0.99, lams.tolist(), bootstrap_values)
    for x, definition in zip(found, expected, strict=True):
        assert (x - definition).abs().max() <= 1e-6 * definition.abs().max()


def test_gae_ignores_masked_tokens_between_others_and_names_what_is_not_finite():
    mask = (torch.arange(120) % 3 > 0).expand(4, 120)
    rewards, values = torch.where(mask, 1.0, math.nan), torch.where(mask, 0.5, -math.inf)
    bootstrap_values = torch.tensor([0.0, 0.0, 0.0, 0.0])
    found = gae(rewards, values, mask, 0.9, 0.9, bootstrap_values=bootstrap_values)
    expected = gae(torch.where(mask, rewards, 0), torch.where(mask, values, 0), mask, 0.9, 0.9)
    assert all(torch.equal(x, y) and not x[~mask].any() for x, y in zip(found, expected, strict=True))
    bootstrap_values[2] = math.nan
    with pytest.raises(FloatingPointError, match=r"bootstrap_values of responses \[2\]"):
        gae(rewards, values, mask, 0.9, 0.9, bootstrap_values=bootstrap_values)
    values[1, 70] = math.inf
    with pytest.raises(FloatingPointError, match=r"responses \[1\] are not finite"):
        gae(rewards, values, mask, 0.9, 0.9)


def test_gae_textbook_numbers():
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    values = torch.tensor([[0.5, 0.25, 0.5]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3), gamma=0.5, lam=0.5)
    # deltas: 0 + 0.5*0.25 - 0.5 = -0.375; 0 + 0.5*0.5 - 0.25 = 0; 1 - 0.5 = 0.5; gamma*lam = 0.25
    assert advantages.tolist() == [[-0.375 + 0.25 * 0.125, 0.125, 0.5]]
    assert returns.tolist() == [[0.15625, 0.375, 1.0]]


def test_gae_with_gamma_and_lambda_1_returns_the_sum_of_rewards():
    rewards = torch.tensor([[1.0, 2.0, 3.0]])
    _, returns = gae(rewards, torch.tensor([[9.0, -4.0, 2.0]]), torch.ones(1, 3), gamma=1.0, lam=1.0)
    assert returns.tolist() == [[6.0, 5.0, 3.0]]


def test_gae_with_lambda_0_is_the_one_step_error():
    rewards, values = torch.tensor([[1.0, 2.0]]), torch.tensor([[4.0, 8.0]])
    advantages, _ = gae(rewards, values, torch.ones(1, 2), gamma=0.5, lam=0.0, bootstrap_values=torch.tensor([2.0]))
    assert advantages.tolist() == [[1.0 + 0.5 * 8.0 - 4.0, 2.0 + 0.5 * 2.0 - 8.0]]


def test_gae_bootstraps_after_the_last_policy_token_of_each_row():
    mask = torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    zeros, bootstrap_values = torch.zeros(3, 4), torch.tensor([4.0, 8.0, math.nan])
    _, returns = gae(zeros, zeros, mask, gamma=0.5, lam=1.0, bootstrap_values=bootstrap_values)
    assert returns.tolist() == [[1.0, 2.0, 0.0, 0.0], [2.0, 0.0, 4.0, 0.0], [0.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("mask", [[1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]])
def test_gae_ignores_whatever_stands_at_masked_tokens(mask: list[float]):
    kept = [t for t, one in enumerate(mask) if one]
    rewards, values = torch.tensor([[math.nan, -math.inf, math.nan, math.inf]]).repeat(2, 1, 1).unbind()
    rewards[0, kept], values[0, kept] = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.25])
    found = gae(rewards, values, torch.tensor([mask]), gamma=0.9, lam=0.8)
    dense = gae(rewards[:, kept], values[:, kept], torch.ones(1, 2), gamma=0.9, lam=0.8)
    for x, expected in zip(found, dense, strict=True):
        assert torch.equal(x[:, kept], expected)
        assert x.count_nonzero() == expected.count_nonzero()


@pytest.mark.parametrize("mask", [torch.ones(3, 40), (torch.arange(40) % 2 == 0).expand(3, 40)])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("argument", [0, 1])
@pytest.mark.parametrize("token", [0, 36])
@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_gae_names_the_rows_whose_inputs_are_not_finite(mask, broken: float, argument: int, token: int, lam: float):
    inputs = [torch.zeros(3, 40), torch.zeros(3, 40)]
    inputs[argument][1, token] = broken
    with pytest.raises(FloatingPointError, match=r"responses \[1\] are not finite"):
        gae(*inputs, mask, 1.0, lam)


def test_gae_refuses_a_bootstrap_value_that_is_not_finite():
    zeros = torch.zeros(2, 3)
    with pytest.raises(FloatingPointError, match=r"bootstrap_values of responses \[1\]"):
        gae(zeros, zeros, torch.ones(2, 3), 1.0, 1.0, bootstrap_values=torch.tensor([0.0, math.nan]))


def test_gae_takes_other_dtypes_and_masks_and_leaves_its_inputs_alone():
    case = Case(3, 40, 5)
    rewards, values = (case.numbers().bfloat16() for _ in range(2))
    expected = gae(rewards.float(), values.float(), case.mask, 0.9, 0.9)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for mask in (case.mask, case.mask.bool(), case.mask.long()):
            inputs = [rewards.to(dtype), values.to(dtype), mask]
            copies = [x.clone() for x in inputs]
            found = gae(*inputs, 0.9, 0.9)
            assert all(x.dtype == torch.float32 and torch.equal(x, y) for x, y in zip(found, expected, strict=True))
            assert all(torch.equal(x, y) for x, y in zip(inputs, copies, strict=True))


def test_gae_accepts_numbers_whose_sum_overflows():
    values = torch.full((1, 40), -3e37)
    advantages, returns = gae(torch.zeros(1, 40), values, torch.ones(1, 40), 1.0, 1.0)
    assert torch.equal(advantages, -values) and returns.count_nonzero() == 0


def test_gae_of_no_rows_or_no_tokens_is_empty():
    for empty in (torch.zeros(0, 4), torch.zeros(3, 0)):
        assert [x.shape for x in gae(empty, empty, empty, 1.0, 1.0)] == [empty.shape, empty.shape]


def test_gae_is_exact_where_matrix_products_are_not():
    """bfloat16 matmuls, by a setting or autocast, would leave three digits."""
    case = Case(4, 300, 7)
    inputs = case.numbers(), case.numbers(), torch.ones(4, 300)
    expected = gae(*inputs, 1.0, 0.99)
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = gae(*inputs, 1.0, 0.99)
    finally:
        torch.set_float32_matmul_precision(precision)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.gpu
def test_gae_on_a_gpu_equals_the_cpu():
    case = Case(50, 3000, 8)
    inputs = case.numbers(), case.numbers(), case.mask
    for lam in (0.95, torch.rand(50)):
        on_gpu = gae(*(x.cuda() for x in inputs), 0.99, lam)
        on_cpu = gae(*inputs, 0.99, lam)
        for found, expected in zip(on_gpu, on_cpu, strict=True):
            assert (found.cpu() - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_length_adaptive_lam_hand_computed():
    mask = (torch.arange(400) < torch.tensor([[400], [40], [10], [0]])).float()
    mask[1, 300:340], mask[1, :40] = 1.0, 0.0  # holes do not count
    lam = length_adaptive_lam(mask, 0.05)
    torch.testing.assert_close(lam, torch.tensor([0.95, 0.5, 0.0, 0.0]), rtol=0, atol=1e-7)


@CASES
@given(cases())
def test_length_adaptive_lam_equals_a_loop(case: Case):
    alpha = case.uniform(0.05, 2.0)
    lengths = [sum(row) for row in case.mask.tolist()]
    expected = [max(0.0, 1 - 1 / (alpha * n)) if n else 0.0 for n in lengths]
    torch.testing.assert_close(length_adaptive_lam(case.mask, alpha), torch.tensor(expected), rtol=1e-6, atol=1e-7)


TURN_GAMMA, TURN_LAM = 0.9, 0.7


def episode(generator: torch.Generator, width: int = 30) -> tuple[torch.Tensor, ...]:
    """Turns of one to four tokens with an environment's tokens between them, and padding; NaN where the mask is 0."""
    turns, turn = [], 0
    while len(turns) < width - 8:
        turn += 1
        gap, written = torch.randint(1, 5, (2,), generator=generator).tolist()
        turns += [float(turn)] * written + [0.0] * gap
    turns = torch.tensor(turns[:width] + [0.0] * (width - len(turns)))
    mask = (turns > 0).float()
    rewards, values = torch.randn(2, width, generator=generator)
    return torch.where(turns > 0, rewards, torch.nan), torch.where(turns > 0, values, torch.nan), mask, turns


def loop_over_turns(rewards, values, mask, turns, bootstrap):
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    following, running = bootstrap, 0.0
    for turn in reversed(range(1, int(turns.max()) + 1)):
        tokens = (turns == turn).nonzero().flatten()
        value = float(values[tokens[0]])
        delta = float(rewards[tokens].sum()) + TURN_GAMMA * following - value
        running = delta + TURN_GAMMA * TURN_LAM * running
        following = value
        advantages[tokens], returns[tokens] = running, running + value
    return advantages, returns


def test_a_turn_is_one_action():
    generator = torch.Generator().manual_seed(0)
    rows = [episode(generator) for _ in range(5)]
    rewards, values, mask, turns = (torch.stack(part) for part in zip(*rows, strict=True))
    bootstraps = torch.randn(5, generator=generator)
    found = gae_over_turns(rewards, values, mask, turns, TURN_GAMMA, TURN_LAM, bootstrap_values=bootstraps)
    for row, parts in enumerate(rows):
        for one, expected in zip(found, loop_over_turns(*parts, float(bootstraps[row])), strict=True):
            torch.testing.assert_close(one[row], expected, atol=1e-5, rtol=1e-5)


def test_turns_of_one_token_are_tokens():
    generator = torch.Generator().manual_seed(1)
    mask = (torch.rand(6, 20, generator=generator) < 0.6).float()
    mask[:, 0] = 1
    rewards, values = torch.randn(2, 6, 20, generator=generator)
    expected = gae(rewards, values, mask, TURN_GAMMA, TURN_LAM)
    found = gae_over_turns(rewards, values, mask, mask.cumsum(dim=1) * mask, TURN_GAMMA, TURN_LAM)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def test_a_number_that_is_none_is_refused():
    rewards = torch.tensor([[0.0, torch.inf]])
    with pytest.raises(FloatingPointError):
        gae_over_turns(rewards, torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([[1.0, 2.0]]), TURN_GAMMA, TURN_LAM)

"""GAE over turns: by a plain loop, and as GAE over tokens where each turn is one token."""

import pytest
import torch

from megappo.ppo.gae import gae
from megappo.ppo.turn_gae import gae_over_turns

GAMMA, LAM = 0.9, 0.7


def episode(generator: torch.Generator, width: int = 30) -> tuple[torch.Tensor, ...]:
    """Turns of one to four tokens with an environment's between them, and padding; anything where the mask is 0."""
    turns, turn = [], 0
    while len(turns) < width - 8:
        turn += 1
        said, written = torch.randint(1, 5, (2,), generator=generator).tolist()
        turns += [float(turn)] * written + [0.0] * said
    turns = torch.tensor(turns[:width] + [0.0] * (width - len(turns)))
    mask = (turns > 0).float()
    rewards, values = torch.randn(2, width, generator=generator)
    return torch.where(turns > 0, rewards, torch.nan), torch.where(turns > 0, values, torch.nan), mask, turns


def by_a_loop(rewards, values, mask, turns, bootstrap):
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    following, running = bootstrap, 0.0
    for turn in reversed(range(1, int(turns.max()) + 1)):
        tokens = (turns == turn).nonzero().flatten()
        value = float(values[tokens[0]])
        delta = float(rewards[tokens].sum()) + GAMMA * following - value
        running = delta + GAMMA * LAM * running
        following = value
        advantages[tokens], returns[tokens] = running, running + value
    return advantages, returns


def test_a_turn_is_one_action():
    generator = torch.Generator().manual_seed(0)
    rows = [episode(generator) for _ in range(5)]
    rewards, values, mask, turns = (torch.stack(part) for part in zip(*rows, strict=True))
    bootstraps = torch.randn(5, generator=generator)
    found = gae_over_turns(rewards, values, mask, turns, GAMMA, LAM, bootstrap_values=bootstraps)
    for row, parts in enumerate(rows):
        for one, expected in zip(found, by_a_loop(*parts, float(bootstraps[row])), strict=True):
            torch.testing.assert_close(one[row], expected, atol=1e-5, rtol=1e-5)


def test_turns_of_one_token_are_tokens():
    generator = torch.Generator().manual_seed(1)
    mask = (torch.rand(6, 20, generator=generator) < 0.6).float()
    mask[:, 0] = 1
    rewards, values = torch.randn(2, 6, 20, generator=generator)
    expected = gae(rewards, values, mask, GAMMA, LAM)
    found = gae_over_turns(rewards, values, mask, mask.cumsum(dim=1) * mask, GAMMA, LAM)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def test_a_number_that_is_none_is_refused():
    rewards = torch.tensor([[0.0, torch.inf]])
    with pytest.raises(FloatingPointError):
        gae_over_turns(rewards, torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([[1.0, 2.0]]), GAMMA, LAM)

"""Generalised advantage estimation over the turns of episodes: a turn is one action, whatever its tokens."""

import torch

from megappo.ppo.gae import gae


@torch.no_grad()
def gae_over_turns(
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    turns: torch.Tensor,
    gamma: float,
    lam: float | torch.Tensor,
    *,
    bootstrap_values: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gae` with a turn in place of a token: each turn has one reward, one value and one advantage.

    Its reward is the sum of its tokens', its value the one before its first token; its advantage, and its return, stand
    on each of its tokens with mask 1.

    Args:
        token_level_rewards, values, response_mask, bootstrap_values: as of `gae`.
        turns: [B, R], the turn of each token with mask 1, from 1, ascending.
        gamma: discount per turn. lam: lambda per turn; [B] for one of each response's own.

    Returns, Raises: as `gae`.
    Source: Li et al. 2025 (Turn-PPO, arXiv 2512.17008). RAGEN's and VAGEN's bi-level GAE gives tokens of a turn
        advantages of their own below those of the turns.
    """
    valid = response_mask.bool()
    numbers = torch.where(valid, turns.long(), 0)
    place = (numbers - 1).clamp(min=0)
    shape = len(values), int(numbers.max()) if numbers.numel() else 0
    zeros = torch.zeros(shape, dtype=torch.float32, device=values.device)
    rewards = zeros.scatter_add(1, place, torch.where(valid, token_level_rewards.float(), 0.0))
    mask = zeros.scatter_add(1, place, valid.float()).clamp(max=1)
    before = torch.nn.functional.pad(numbers.cummax(dim=1).values[:, :-1], (1, 0))
    is_first = valid & (numbers > before)
    of_turns = zeros.scatter_add(1, place, torch.where(is_first, values.float(), 0.0))
    estimates = gae(rewards, of_turns, mask, gamma, lam, bootstrap_values=bootstrap_values)
    advantages, returns = (torch.where(valid, of_turn.gather(1, place), 0.0) for of_turn in estimates)
    return advantages, returns

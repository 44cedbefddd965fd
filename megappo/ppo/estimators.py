"""Advantages without a critic, from the scores of whole responses. All [B, R] float32 over padded responses.

Each estimator takes the rewards per token (score on the last token, minus a KL penalty on each where there is one;
`gdpo` takes several scores per response instead) and returns (advantages, returns), [B, R] float32, 0 where
response_mask is 0; never whitened, so that whitening, where the method has it, can be done over all ranks. The two are
the same numbers where an estimator does not document its returns. Sums are taken in float64. `groups` [B] int64 has the
same number for responses that answer the same prompt, in any order; all of a prompt's responses must be in one call.

Every estimator raises ValueError for a response without any token with mask 1, and FloatingPointError for a reward on a
token with mask 1 that is not finite. Estimators that compare the responses to a prompt also raise ValueError for a
prompt with one response only.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megappo.ppo.advantages import Estimates, gae
from megappo.ppo.reductions import (
    PromptGroups,
    check_finite,
    check_has_tokens,
    sum_over_ranks,
)


def grpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    groups: Tensor,
    norm_adv_by_std_in_grpo: bool = True,
) -> Estimates:
    """(score - group's mean) / (group's standard deviation + 1e-6) on each token; exactly 0 in a group of equal scores.

    Args:
        token_level_rewards, response_mask, groups: see the module.
        norm_adv_by_std_in_grpo: False leaves out the division (Dr. GRPO).

    Source: Shao et al. 2024 (DeepSeekMath), section 4.1.2; Liu et al. 2025 (Dr. GRPO); ddof 1 and 1e-6 are verl's.
    """
    scores = _scores(token_level_rewards, response_mask)
    return _on_tokens(_compared(scores, groups, norm_adv_by_std_in_grpo), response_mask)


def rloo(token_level_rewards: Tensor, response_mask: Tensor, groups: Tensor) -> Estimates:
    """Score minus the mean score of the other responses to the prompt, on each token.

    Source: Ahmadian et al. 2024 (Back to basics: revisiting REINFORCE), RLOO.
    """
    scores = _scores(token_level_rewards, response_mask)
    prompts = PromptGroups(groups)
    factors = prompts.counts / (prompts.counts - 1)
    return _on_tokens(prompts.centered(scores) * factors[prompts.rows], response_mask)


def reinforce_plus_plus(token_level_rewards: Tensor, response_mask: Tensor, gamma: float) -> Estimates:
    """Discounted sum of the rewards from each token on. The method whitens it over the batch.

    The sum is carried through tokens with mask 0, without discount, so rewards after them count before them, too.

    Source: Hu et al. 2025 (REINFORCE++); its KL is part of the rewards.
    """
    check_has_tokens(response_mask)
    check_finite("rewards", token_level_rewards, response_mask.bool())
    returns, _ = gae(token_level_rewards, torch.zeros_like(token_level_rewards), response_mask, gamma, 1.0)
    return returns, returns


def reinforce_plus_plus_baseline(token_level_rewards: Tensor, response_mask: Tensor, groups: Tensor) -> Estimates:
    """Score minus the mean score of all responses to the prompt, on each token. The method whitens it over the batch.

    Source: Hu et al. 2025 (REINFORCE++-baseline). verl's returns are the whitened advantages.
    """
    return grpo(token_level_rewards, response_mask, groups, norm_adv_by_std_in_grpo=False)


def remax(token_level_rewards: Tensor, response_mask: Tensor, baselines: Tensor) -> Estimates:
    """Sum of the rewards from each token on minus the score of the prompt's greedy response.

    Args:
        token_level_rewards, response_mask: see the module.
        baselines: [B], the score of the greedy response to each row's prompt.

    Returns:
        (advantages, returns): returns without the baseline.

    Raises:
        ValueError, FloatingPointError: see the module; the second also for a baseline.
    Source: Li et al. 2023 (ReMax), algorithm 1; verl's compute_remax_outcome_advantage, 0 where the mask is 0.
    """
    check_finite("baselines", baselines)
    returns, _ = reinforce_plus_plus(token_level_rewards, response_mask, gamma=1.0)
    return torch.where(response_mask.bool(), returns - baselines.float()[:, None], 0.0), returns


def opo(token_level_rewards: Tensor, response_mask: Tensor, groups: Tensor) -> Estimates:
    """Score minus the mean of the prompt's scores weighted by length, on each token; a length counts mask 1.

    Source: Hao et al. 2025 (On-policy RL with optimal reward baseline), the baseline under which a gradient's squared
        norm is proportional to the length.
    """
    scores = _scores(token_level_rewards, response_mask)
    prompts = PromptGroups(groups)
    lengths = response_mask.bool().sum(dim=1).double()
    baselines = prompts.sums(scores * lengths) / prompts.sums(lengths)
    return _on_tokens(scores - baselines[prompts.rows], response_mask)


def gpg(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    groups: Tensor,
    group: ProcessGroup | None = None,
) -> Estimates:
    """(responses / responses whose score is not 0) * (score - group's mean), on each token; 0 if all scores are 0.

    Args:
        token_level_rewards, response_mask, groups: see the module.
        group: ranks over which both numbers of responses are counted; each must call, with its own rows (possibly
            none). None = the rows given here alone.

    Source: Chu et al. 2025 (GPG); verl's compute_gpg_outcome_advantage with its f_norm = 1, which counts scores that
        are not 0 where the paper counts groups whose gradient is not.
    """
    scores = _scores(token_level_rewards, response_mask)
    counts = torch.stack([scores.new_tensor(len(scores)), scores.count_nonzero().double()])
    counts = sum_over_ranks(counts, group)
    return _on_tokens(PromptGroups(groups).centered(scores) * counts[0] / counts[1].clamp(min=1), response_mask)


def grpo_passk(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    groups: Tensor,
    norm_adv_by_std_in_grpo: bool = True,
) -> Estimates:
    """(best score - second best) / (group's standard deviation + 1e-6) on each token of a prompt's best response.

    Other responses have 0, and so does the best one if another has the same score.

    Args:
        token_level_rewards, response_mask, groups: see the module.
        norm_adv_by_std_in_grpo: False leaves out the division.

    Source: Tang et al. 2025 (Optimizing LMs for inference time objectives, arXiv 2503.19595); verl's
        compute_grpo_passk_outcome_advantage.
    """
    scores = _scores(token_level_rewards, response_mask)
    prompts = PromptGroups(groups)
    order = scores.argsort(descending=True, stable=True)
    order = order[prompts.rows[order].argsort(stable=True)]  # by group, the best of each first
    firsts = prompts.counts.cumsum(0) - prompts.counts
    best = order[firsts]
    gaps = scores[best] - scores[order[firsts + 1]]
    if norm_adv_by_std_in_grpo:
        gaps = gaps / prompts.stds(scores)
    return _on_tokens(torch.zeros_like(scores).index_copy(0, best, gaps), response_mask)


def gdpo(
    score_components: Tensor,
    response_mask: Tensor,
    groups: Tensor,
    norm_adv_by_std_in_grpo: bool = True,
) -> Estimates:
    """Sum of GRPO's advantages for several scores, each compared on its own. The method whitens it over the batch.

    Args:
        score_components: [B, K], K scores of each response.
        response_mask, groups, norm_adv_by_std_in_grpo: as in `grpo`.

    Raises:
        ValueError, FloatingPointError: see the module; the second for a component.
    Source: Liu et al. 2026 (GDPO: Group reward-Decoupled Normalization Policy Optimization, arXiv 2601.05242); verl's
        compute_gdpo_outcome_advantage with all gdpo_reward_weights 1.
    """
    check_has_tokens(response_mask)
    total = torch.zeros_like(score_components[:, 0], dtype=torch.float64)
    for scores in score_components.unbind(1):
        check_finite("rewards", scores)
        total += _compared(scores.float().double(), groups, norm_adv_by_std_in_grpo).float()
    return _on_tokens(total, response_mask)


def optimal_token_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    groups: Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
) -> Estimates:
    """Sum of the rewards from each token on, minus its weighted mean over the prompt's responses at that position.

    The weight of a response at position t is the sum up to t of 1 - 2 p + sum_pi_squared, the squared norm of the
    gradient of the token's log-prob in the logits, times rollout_is_weights^2: the baseline has the least variance.
    Where one response alone reaches a position, the baseline is 0, so that the advantage is the return.

    Args:
        token_level_rewards, response_mask, groups: see the module.
        old_log_probs: [B, R], log p of each token.
        sum_pi_squared: [B, R], the sum of the squared probabilities of all tokens at each position. None = p itself,
            whose expectation it is.
        rollout_is_weights: [B, R], see `corrections`; None = 1.

    Returns:
        (advantages, returns): returns without the baseline.
    Source: Li et al. 2026 (The Optimal Token Baseline, arXiv 2602.07078); verl's
        compute_optimal_token_baseline_advantage with handle_zero_tail.
    """
    returns, _ = reinforce_plus_plus(token_level_rewards, response_mask, gamma=1.0)
    prompts = PromptGroups(groups)
    valid = response_mask.bool()
    p = old_log_probs.double().exp()
    energy = 1 - 2 * p + (p if sum_pi_squared is None else sum_pi_squared.double())
    if rollout_is_weights is not None:
        energy = energy * rollout_is_weights.double().square()
    weights = torch.where(valid, torch.where(valid, energy, 0.0).cumsum(dim=1), 0.0)
    means = prompts.sums(weights * returns) / (prompts.sums(weights) + 1e-8)
    baselines = torch.where(prompts.sums(valid.double()) > 1, means, 0.0)
    return torch.where(valid, returns - baselines[prompts.rows], 0.0).float(), returns


def _scores(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Sum each row over the tokens with mask 1: [B] float64.

    Rounded to float32, which the mean of equal scores in float64 reproduces exactly: they have advantage 0.
    """
    check_has_tokens(response_mask)
    valid = response_mask.bool()
    check_finite("rewards", token_level_rewards, valid)
    return torch.where(valid, token_level_rewards.double(), 0.0).sum(dim=1).float().double()


def _compared(scores: Tensor, groups: Tensor, norm_adv_by_std_in_grpo: bool) -> Tensor:
    """Compare scores, [B], with the others of their group."""
    prompts = PromptGroups(groups)
    return prompts.normalized(scores) if norm_adv_by_std_in_grpo else prompts.centered(scores)


def _on_tokens(scores: Tensor, response_mask: Tensor) -> Estimates:
    """Spread [B] over the tokens with mask 1, as advantages and as returns."""
    advantages = torch.where(response_mask.bool(), scores.float()[:, None], 0.0)
    return advantages, advantages

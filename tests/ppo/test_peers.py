"""Differences from other systems' formulas in docs/methods.md, each against a plain formula."""

import math

import pytest
import torch

from megappo.config.schema import Actor
from megappo.config.sections import RolloutCorrection
from megappo.ppo.advantages import whiten
from megappo.ppo.conventions import PRESETS
from megappo.ppo.corrections import rollout_is_weights
from megappo.ppo.estimators import gdpo, grpo, grpo_passk, optimal_token_baseline, reinforce_plus_plus, rloo
from megappo.ppo.losses import kl_loss, policy_loss


def row(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers])


def unbiased_kl(log_prob: float, old: float, ref: float, preset: str) -> tuple[float, float]:
    """Ours, with its gradient."""
    config = Actor(kl_loss_type="k3", kl_loss_coef=1.0, kl_loss_unbiased=True)
    new = row(log_prob).requires_grad_()
    loss, _ = kl_loss(new, row(ref), torch.ones(1, 1), config, old_log_probs=row(old), conventions=PRESETS[preset])
    loss.backward()
    return float(loss.detach()), float(new.grad)


def product_clamped(log_prob: float, old: float, ref: float) -> tuple[float, float]:
    """As in slime, miles and NeMo-RL: the estimate x the ratio, both differentiated, within 10."""
    q, ratio = ref - log_prob, math.exp(log_prob - old)
    product = (math.exp(q) - 1 - q) * ratio
    gradient = (1 - math.exp(q)) * ratio + product
    return (product, gradient) if product < 10 else (10.0, 0.0)


@pytest.mark.parametrize("preset", ["verl", "slime", "miles"])
def test_the_unbiased_kl_is_clamped_before_the_ratio_and_keeps_its_gradient(preset: str):
    near = (-1.0, -1.3, -2.0)
    assert unbiased_kl(*near, preset) == pytest.approx(product_clamped(*near), rel=1e-5)
    far = (-1.0, -4.0, -3.0)  # the estimate is 1.1, the ratio 20
    value, gradient = unbiased_kl(*far, preset)
    estimate, ratio = math.exp(-2) - 1 + 2, math.exp(3)
    assert value == pytest.approx(estimate * ratio, rel=1e-5) and value > 10
    assert gradient == pytest.approx((1 - math.exp(-2) + estimate) * ratio, rel=1e-5)
    assert product_clamped(*far) == (10.0, 0.0)


def test_the_kl_behind_a_baseline_is_a_tokens_own_or_that_from_it_on():
    kl, mask = row(1.0, 9.0, 2.0, 4.0, math.nan), row(1.0, 0.0, 1.0, 1.0, 0.0)
    found = {name: preset.token_kl_gamma for name, preset in PRESETS.items() if preset.token_kl_gamma is not None}
    for name, gamma in found.items():
        expected = [[7.0, 0.0, 6.0, 4.0, 0.0]] if name == "openrlhf" else [[1.0, 0.0, 2.0, 4.0, 0.0]]
        assert reinforce_plus_plus(kl, mask, gamma)[0].tolist() == expected
    assert found.keys() == PRESETS.keys() - {"verl"}


@pytest.mark.parametrize(("log_prob", "ratio"), [(-math.inf, math.exp(-20)), (math.nan, math.nan)])
def test_an_infinite_log_ratio_is_clamped_where_miles_reads_it_as_0(log_prob: float, ratio: float):
    """So that miles' ratio is 1, of NaN as well."""
    inputs = (row(log_prob), row(-1.0), row(1.0), row(1.0))
    loss, _ = policy_loss(*inputs, Actor(), conventions=PRESETS["miles"])
    assert float(loss) == pytest.approx(-ratio, rel=1e-5, nan_ok=True)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_new_log_prob_of_minus_infinity_makes_gspos_loss_nan(preset: str):
    """So that the run skips the step. slime's ratio is exp(-inf) = 0 there, and the step is made."""
    log_probs = row(-1.0, -math.inf)
    arguments = (log_probs, row(-1.0, -1.0), row(1.0, 1.0), torch.ones(1, 2), Actor(policy_loss="gspo"))
    assert math.isnan(policy_loss(*arguments, conventions=PRESETS[preset])[0])
    assert float((log_probs - row(-1.0, -1.0)).mean().exp()) == 0.0


def test_openrlhf_clamps_nothing_in_gspo():
    """A mean log-ratio of 25 at A < 0: exp(25) there, exp of the clamp here."""
    one = torch.ones(1, 1)
    arguments = (25 * one, 0 * one, -one, one, Actor(policy_loss="gspo"))
    assert float(policy_loss(*arguments, conventions=PRESETS["openrlhf"])[0]) == pytest.approx(math.exp(20), rel=1e-5)
    assert float(policy_loss(*arguments, conventions=PRESETS["slime"])[0]) == pytest.approx(math.exp(25), rel=1e-5)


@pytest.mark.parametrize("by", ["rejection", "opsm"])
def test_one_token_of_100_without_weight_leaves_gmpo_four_fifths(by: str):
    """The geometric mean has its weight as 1e-10; with it out of the mask, as in verl, all of the loss is left."""
    mask, old = torch.ones(1, 100), torch.full((1, 100), -1.0)
    advantages = torch.full((1, 100), 2.0)
    weights, config = torch.ones(1, 100), Actor(policy_loss="gmpo")
    if by == "rejection":
        engine = old.clone()
        engine[0, 7] = -5.0
        weights, _ = rollout_is_weights(old, engine, mask, RolloutCorrection(reject={"token_k2": 0.5}))
        assert int((weights == 0).sum()) == 1
    else:
        advantages[0, 7] = -2.0
        config = config.model_copy(update={"opsm_delta": 1e-4})
    new = old - 0.01
    expected = -float(advantages.mean()) * math.exp(-0.01) * 1e-10 ** (1 / 100)
    loss = policy_loss(new, old, advantages, mask, config, rollout_is_weights=weights)[0]
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    assert pytest.approx(0.794, abs=1e-3) == 1e-10 ** (1 / 100)
    if by == "rejection":
        left = policy_loss(new, old, advantages, (weights > 0).float(), config)[0]
        assert float(loss / left) == pytest.approx(0.794, abs=1e-3)


def test_a_position_that_one_response_alone_reaches_has_no_baseline():
    """verl's default there is the response's own return: advantage 0 in the place of 3 here."""
    rewards, mask = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 3.0]]), torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    advantages, returns = optimal_token_baseline(rewards, mask, torch.zeros(2).long(), torch.full((2, 3), -0.7))
    assert float(advantages[1, 2]) == float(returns[1, 2]) == 3.0
    assert float(advantages[0, 1]) == pytest.approx(1.0 - (1.0 + 3.0) / 2, abs=1e-5), "equal weights: a mean"


def test_nemo_rl_whitens_gdpo_over_responses():
    """Whitening over tokens, as here, weighs long responses more."""
    components, groups = torch.tensor([[1.0, 0.0], [0.0, 0.0], [3.0, 2.0]]), torch.zeros(3).long()
    mask = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    total, _ = gdpo(components, mask, groups)
    by_token = [float(x) for x in whiten(total, mask)[mask.bool()]]
    tokens = [float(x) for x in total[mask.bool()]]
    mean = sum(tokens) / 6
    scale = math.sqrt(sum((x - mean) ** 2 for x in tokens) / 5)
    assert by_token == pytest.approx([(x - mean) / scale for x in tokens], rel=1e-5)
    responses = [float(x) for x in total[:, 0]]
    middle = sum(responses) / 3
    spread = math.sqrt(sum((x - middle) ** 2 for x in responses) / 2)
    nemo_rl = [(x - middle) / spread for x in responses]
    assert max(abs(a - b) for a, b in zip(nemo_rl, [by_token[0], by_token[1], by_token[4]], strict=True)) > 0.1


@pytest.mark.parametrize("estimator", [grpo, rloo, grpo_passk])
def test_a_group_of_one_response_is_refused_where_nemo_rl_gives_0(estimator):
    with pytest.raises(ValueError, match="groups \\[0\\] have one response only"):
        estimator(row(0.0, 1.0), torch.ones(1, 2), torch.zeros(1).long())

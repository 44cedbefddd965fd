"""Policy losses against loops in Python floats, values and gradients; textbook numbers; bad input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_oracles import (
    SEQUENCE_METHODS,
    Inputs,
    all_conventions,
    configs,
    expected,
    gspo_row,
    numbers_of,
    policy_loss,
)
from ragged import CASES, Case, cases

from megappo.config.methods import POLICY_LOSSES
from megappo.config.schema import Actor
from megappo.ppo.conventions import DEFAULT, PRESETS, Conventions
from megappo.ppo.losses import policy_kl
from megappo.ppo.policy_losses import PolicyInputs
from megappo.ppo.reductions import AGGREGATIONS, Normaliser

EVERY = pytest.mark.parametrize("name", POLICY_LOSSES)


@EVERY
@CASES
@given(cases(), configs(), all_conventions(), st.sampled_from([0.1, 1.0, 8.0]), st.booleans())
def test_loss_metrics_and_gradient_equal_a_loop(
    name: str, case: Case, config: Actor, conventions: Conventions, scale: float, weighted: bool
):
    inputs = Inputs.of(case, scale, weighted)
    config = config.model_copy(update={"policy_loss": name})
    log_probs = inputs.log_probs.clone().requires_grad_()
    arguments = (log_probs, inputs.old_log_probs, inputs.advantages, case.mask, config)
    loss, metrics = policy_loss(*arguments, rollout_is_weights=inputs.weights, conventions=conventions)
    loss.backward()
    value, size, expected_metrics, gradient = expected(name, inputs, config, conventions)
    # float32 holds the mean log-ratio x of a sequence to 6e-8 |x|, which exp makes a relative error
    tolerance = 1e-6 * max(1.0, scale)
    assert abs(float(loss.detach()) - value) <= tolerance * max(size, 1.0)
    assert numbers_of(metrics) == pytest.approx(expected_metrics, rel=tolerance, abs=1e-6)
    # sapo: autograd takes 1 - sigmoid, whose digits float32 loses where the gate saturates
    slack = 1e-5 * max(1.0, scale) if name == "sapo" else tolerance
    torch.testing.assert_close(log_probs.grad.double(), gradient, rtol=10 * tolerance, atol=slack)


def one(value: float) -> torch.Tensor:
    return torch.tensor([[value]])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipfrac", "lower"),
    [
        (1.0, 2.0, -2.0, -2.0, 0, 0),
        (1.5, 2.0, -2.4, 0.0, 1, 0),  # clipped at 1.2
        (0.5, 2.0, -1.0, -1.0, 0, 0),  # the lower bound does not hold back a positive advantage
        (0.5, -2.0, 1.6, 0.0, 1, 0),  # clipped at 0.8
        (1.5, -2.0, 3.0, 3.0, 0, 0),
        (5.0, -2.0, 6.0, 0.0, 0, 1),  # dual clip at c = 3
    ],
)
def test_policy_loss_hand_computed(ratio, advantage, loss, gradient, clipfrac, lower):
    log_probs = one(math.log(ratio)).requires_grad_()
    result, metrics = policy_loss(log_probs, one(0.0), one(advantage), one(1.0), Actor())
    result.backward()
    assert float(result.detach()) == pytest.approx(loss)
    assert float(log_probs.grad) == pytest.approx(gradient, abs=1e-6)
    assert (float(metrics["pg_clipfrac"]), float(metrics["pg_clipfrac_lower"])) == (clipfrac, lower)
    assert float(metrics["ppo_kl"]) == pytest.approx(-math.log(ratio))
    assert float(metrics["ratio"]) == pytest.approx(ratio)


def test_clip_higher_hand_computed():
    config = Actor(clip_ratio=0.2, clip_ratio_high=0.28)
    assert float(policy_loss(one(math.log(1.5)), one(0.0), one(1.0), one(1.0), config)[0]) == pytest.approx(-1.28)
    assert float(policy_loss(one(math.log(0.5)), one(0.0), one(-1.0), one(1.0), config)[0]) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("name", "advantage", "loss", "gradients"),
    [
        # Log-ratios log 4 and 0: the sequence's ratio is 2, clipped at 1.2 for A > 0.
        ("gspo", 1.0, -1.2, (0.0, 0.0)),
        ("gspo", -1.0, 2.0, (1.0, 1.0)),
        # The token's log-ratio log 4 is clipped to 0.2: exp(0.1); for A < 0 it is not: 4^(1/2).
        ("gmpo", 1.0, -math.exp(0.1), (0.0, -math.exp(0.1) / 2)),
        ("gmpo", -1.0, 2.0, (1.0, 1.0)),
        # Ratios 4, 1 -> 1.2, 1; log-probs -1, -2.
        ("cispo", 1.0, (1.2 + 2.0) / 2, (-0.6, -0.5)),
        ("gpg", 2.0, 3.0, (-1.0, -1.0)),
        # 4 / tau x sigmoid(tau (r - 1)): at r = 1 the value is 2 / tau and the slope 1.
        ("sapo", 1.0, -(4 / (1 + math.exp(-3)) + 2) / 2, (-8 * math.exp(-3) / (1 + math.exp(-3)) ** 2, -0.5)),
        ("sapo", -1.0, (4 / 1.05 / (1 + math.exp(-3.15)) + 2 / 1.05) / 2, None),
        # Covariances 0 (one advantage): the tie goes to the first token.
        ("kl_cov", 1.0, (-4 + math.log(4) - 1) / 2, (-1.5, -0.5)),
        # No covariance between 1 and 5: PPO's clip.
        ("clip_cov", 1.0, -1.1, (0.0, -0.5)),
    ],
)
def test_other_losses_hand_computed(name, advantage, loss, gradients):
    log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    old_log_probs = torch.tensor([[-1.0 - math.log(4), -2.0]])
    mask = torch.ones(1, 2)
    advantages = torch.full((1, 2), advantage)
    result, _ = policy_loss(log_probs, old_log_probs, advantages, mask, Actor(policy_loss=name))
    result.backward()
    assert float(result.detach()) == pytest.approx(loss, rel=1e-6)
    if gradients is not None:
        torch.testing.assert_close(log_probs.grad, torch.tensor([gradients]), rtol=1e-6, atol=1e-6)


TURNS = ([1, 1, 0, 2, 2, 2, 0, 3], [0, 7, 7, 7, 7, 0, 9, 9])
"""Turns of two rows, 0 where an environment wrote; the second row is a later segment of its episode."""


@pytest.mark.parametrize("seed", range(5))
def test_clip_turn_clips_the_geometric_mean_of_each_turns_ratios(seed: int):
    generator = torch.Generator().manual_seed(seed)
    turns = torch.tensor(TURNS).float()
    mask = (turns > 0).float()
    old, change, advantages = torch.randn(3, 2, 8, generator=generator)
    log_probs = (old + 0.5 * change).masked_fill(mask == 0, math.nan).requires_grad_()
    config = Actor(policy_loss="clip_turn", clip_ratio=0.1)
    loss, metrics = policy_loss(log_probs, old, advantages, mask, config, turns=turns)
    loss.backward()
    total, clipped, gradient = 0.0, 0, torch.zeros(2, 8)
    for row, numbers in enumerate(TURNS):
        for turn in set(numbers) - {0}:
            places = [place for place, number in enumerate(numbers) if number == turn]
            log_ratios = [float(log_probs[row, t].detach() - old[row, t]) for t in places]
            tokens = [(0.0, x, float(advantages[row, t]), 1.0) for x, t in zip(log_ratios, places, strict=True)]
            for t, token in zip(places, gspo_row(tokens, config, math.inf, None), strict=True):
                total, clipped = total + token.loss / 12, clipped + token.clipped
                gradient[row, t] = token.slope / 12
    assert float(loss.detach()) == pytest.approx(total, rel=1e-5)
    assert float(metrics["pg_clipfrac"]) == pytest.approx(clipped / 12)
    torch.testing.assert_close(log_probs.grad, gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize(("low", "high"), [(0.3, 5.0), (0.8, 3.0)])
def test_dis_weights_within_the_papers_bounds_and_leaves_out_what_lies_outside(advantage, low, high):
    """Its bounds for mathematics with tools, and for coding. The gradient is the gradient of ratio x A, by autograd."""
    ratios = [1 - 1.01 * low, 1 - 0.99 * low, 1.0, 1 + 0.99 * high, 1 + 1.01 * high, 100.0]
    kept = [0.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    old = torch.tensor([[-1.0, -0.5, -3.0, -4.0, -5.0, -6.0]])
    log_probs = (old + torch.tensor([ratios]).log()).requires_grad_()
    config = Actor(policy_loss="dis", clip_ratio_low=low, clip_ratio_high=high)
    loss, metrics = policy_loss(log_probs, old, torch.full((1, 6), advantage), torch.ones(1, 6), config)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    surrogate = -((log_probs - old).exp() * advantage * torch.tensor([kept])).sum() / 6
    (expected,) = torch.autograd.grad(surrogate, log_probs)
    torch.testing.assert_close(gradient, expected)
    terms = [-r * advantage * float(x) * k for r, x, k in zip(ratios, log_probs[0].detach(), kept, strict=True)]
    assert float(loss.detach()) == pytest.approx(sum(terms) / 6, rel=1e-5)
    assert float(metrics["pg_clipfrac"]) == pytest.approx(3 / 6)


def test_a_ratio_on_a_bound_of_dis_is_left_out():
    """The interval of equation 3 is open. exp(0) is 1 exactly."""
    config = Actor(policy_loss="dis", clip_ratio_low=0.5, clip_ratio_high=1.0)
    for ratio, clipped in ((0.5, 1.0), (2.0, 1.0), (1.0, 0.0)):
        old = torch.zeros(1, 1, dtype=torch.float64)
        log_probs = torch.full((1, 1), math.log(ratio), dtype=torch.float64)
        _, metrics = policy_loss(log_probs, old, torch.ones(1, 1), torch.ones(1, 1), config)
        assert float(log_probs.exp()) == ratio and float(metrics["pg_clipfrac"]) == clipped


@EVERY
@pytest.mark.parametrize("mode", [None, *AGGREGATIONS])
def test_a_rows_weight_scales_its_gradient_and_no_metric_but_the_loss(name: str, mode: str | None):
    """Weights of 1 change nothing to the bit, and one of 0 leaves nothing of its row."""
    case = Case(4, 12, 5)
    inputs = Inputs.of(case, 0.1, True)
    config = Actor(policy_loss=name, loss_agg_mode=mode)

    def found(loss_weights: torch.Tensor | None) -> tuple[float, dict, torch.Tensor]:
        log_probs = inputs.log_probs.clone().requires_grad_()
        arguments = (log_probs, inputs.old_log_probs, inputs.advantages, case.mask, config)
        loss, metrics = policy_loss(*arguments, rollout_is_weights=inputs.weights, loss_weights=loss_weights)
        loss.backward()
        return float(loss.detach()), numbers_of(metrics), log_probs.grad

    loss, metrics, gradient = found(None)
    same = found(torch.ones(4))
    assert same[:2] == (loss, metrics) and same[2].equal(gradient)
    of_rows = [found(torch.eye(4)[row])[0] for row in range(4)]
    weights = torch.tensor([2.0, 0.0, 0.3, 1.0])
    weighted = found(weights)
    assert weighted[0] == pytest.approx(sum(w * x for w, x in zip(weights.tolist(), of_rows, strict=True)), rel=1e-5)
    assert weighted[1] == metrics and gradient.any(dim=1).all()
    torch.testing.assert_close(weighted[2], gradient * weights[:, None], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["clip", "gspo", "kl_cov", "dppo_tv", "dppo_kl", "dro"])
def test_at_the_old_policy_the_gradient_is_reinforce(name: str):
    """Ratio 1: -A per token, whatever the method."""
    old_log_probs = torch.tensor([[-1.0, -0.5, -3.0]])
    log_probs = old_log_probs.clone().requires_grad_()
    advantages = torch.tensor([[1.0, -2.0, 0.5]])
    config = Actor(policy_loss=name, ppo_kl_coef=0.0)
    policy_loss(log_probs, old_log_probs, advantages, torch.ones(1, 3), config)[0].backward()
    torch.testing.assert_close(log_probs.grad, -advantages / 3)


def test_log_ratio_is_clamped_before_exp():
    loss, metrics = policy_loss(one(100.0), one(-100.0), one(-1.0), one(1.0), Actor(clip_ratio_c=None))
    assert float(loss) == pytest.approx(math.exp(20), rel=1e-5)
    assert float(metrics["ppo_kl"]) == -20.0


@EVERY
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("log_ratio", [-1e4, 89.0, 1e4])
@pytest.mark.parametrize("preset", PRESETS)
def test_extreme_log_ratios_stay_finite(name: str, advantage: float, log_ratio: float, preset: str):
    log_probs = torch.tensor([[log_ratio, 0.0]], requires_grad=True)
    zeros = torch.zeros(1, 2)
    inputs = (log_probs, zeros, zeros + advantage, zeros + 1.0, Actor(policy_loss=name))
    loss, metrics = policy_loss(*inputs, conventions=PRESETS[preset])
    loss.backward()
    assert loss.isfinite() and log_probs.grad.isfinite().all()
    assert all(math.isfinite(value) for value in numbers_of(metrics).values())


@EVERY
def test_only_log_probs_get_a_gradient_and_weights_scale_it(name: str):
    def gradients(weight: float):
        tensors = [torch.tensor([[-1.0, -2.0]], requires_grad=True) for _ in range(3)]
        weights = torch.full((1, 2), weight, requires_grad=True)
        config = Actor(policy_loss=name, clip_ratio_c=None)
        loss, _ = policy_loss(*tensors, torch.ones(1, 2), config, rollout_is_weights=weights)
        loss.backward()
        return loss.detach(), [tensor.grad for tensor in (*tensors, weights)]

    (loss, (gradient, *rest)), (doubled, (doubled_gradient, *_)) = gradients(1.0), gradients(2.0)
    assert rest == [None, None, None]
    torch.testing.assert_close(doubled, 2 * loss)
    torch.testing.assert_close(doubled_gradient, 2 * gradient)


@EVERY
@settings(max_examples=50, deadline=None)
@given(cases())
def test_what_stands_at_masked_tokens_reaches_nothing(name: str, case: Case):
    inputs = Inputs.of(case, 1.0, weighted=True)
    junk = torch.tensor([math.nan, math.inf, -math.inf, 1e30])

    def outcome(fill: bool):
        tensors = [inputs.log_probs, inputs.old_log_probs, inputs.advantages, inputs.weights]
        if fill:
            noise = junk[torch.randint(0, 4, (4, *case.shape), generator=case.generator)]
            tensors = [torch.where(case.mask.bool(), x, noise[k]) for k, x in enumerate(tensors)]
        log_probs, old_log_probs, advantages, weights = tensors
        log_probs = log_probs.clone().requires_grad_()
        arguments = (log_probs, old_log_probs, advantages, case.mask, Actor(policy_loss=name))
        loss, metrics = policy_loss(*arguments, rollout_is_weights=weights)
        loss.backward()
        return [loss.detach(), log_probs.grad, numbers_of(metrics)]

    torch.testing.assert_close(outcome(fill=True), outcome(fill=False), rtol=0, atol=0)


@EVERY
@pytest.mark.parametrize("rows", [0, 2])
def test_a_batch_without_tokens_gives_zero_and_a_gradient_of_zero(name: str, rows: int):
    log_probs = torch.full((rows, 3), math.nan, requires_grad=True)
    junk = log_probs.detach()
    loss, metrics = policy_loss(log_probs, junk, junk, torch.zeros(rows, 3), Actor(policy_loss=name))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert torch.equal(log_probs.grad, torch.zeros(rows, 3))
    assert {name: value for name, value in numbers_of(metrics).items() if value} == {"ratio_max": -math.inf}


@EVERY
def test_the_aggregation_left_open_is_the_methods_own_or_the_preset_s(name: str):
    case = Case(4, 6, seed=3)
    inputs = Inputs.of(case, 0.3, weighted=False)
    arguments = (inputs.log_probs, inputs.old_log_probs, inputs.advantages, case.mask)

    def loss(mode: str | None, conventions: Conventions) -> torch.Tensor:
        config = Actor(policy_loss=name, loss_agg_mode=mode)
        return policy_loss(*arguments, config, conventions=conventions)[0]

    own = "seq-mean-token-mean" if name in SEQUENCE_METHODS else "token-mean"
    assert torch.equal(loss(None, DEFAULT), loss(own, DEFAULT))
    assert torch.equal(loss(None, PRESETS["slime"]), loss("seq-mean-token-mean", PRESETS["slime"]))
    assert not torch.equal(loss("token-mean", DEFAULT), loss("seq-mean-token-mean", DEFAULT))


@EVERY
def test_off_policy_sequences_of_negative_advantage_are_masked(name: str):
    """Rows with a mean of old - new log-probs of 0.3, 0.3 and 0.1; the second's advantage is positive."""
    log_probs = torch.tensor([[-1.5, -1.1, -2.0], [-1.5, -1.1, -2.0], [-1.2, -1.0, -2.0]], requires_grad=True)
    old_log_probs = torch.tensor([[-1.0, -1.0, 7.0]]).expand(3, 3)
    advantages = torch.tensor([[-1.0], [1.0], [-1.0]]).expand(3, 3)
    mask = torch.tensor([[1.0, 1.0, 0.0]]).expand(3, 3)
    config = Actor(
        policy_loss=name, opsm_delta=0.2, loss_agg_mode="token-mean", clip_ratio_low=0.9, clip_ratio_high=2.0
    )
    weights = torch.full((3, 3), 0.5)
    loss, metrics = policy_loss(log_probs, old_log_probs, advantages, mask, config, rollout_is_weights=weights)
    [masked] = torch.autograd.grad(loss, log_probs)
    assert masked[0].abs().max() < 1e-9 and metrics["opsm_frac"] == pytest.approx(1 / 3)
    off = config.model_copy(update={"opsm_delta": None})
    loss, metrics = policy_loss(log_probs, old_log_probs, advantages, mask, off, rollout_is_weights=weights)
    [plain] = torch.autograd.grad(loss, log_probs)
    assert torch.equal(masked[1:], plain[1:]) and plain[0].any() and "opsm_frac" not in metrics


@EVERY
def test_a_given_normaliser_counts_in_the_masks_place(name: str):
    case = Case(3, 5, seed=1)
    inputs = Inputs.of(case, 0.3, weighted=False)
    arguments = (inputs.log_probs, inputs.old_log_probs, inputs.advantages, case.mask)
    config = Actor(policy_loss=name, loss_agg_mode="token-mean")
    num_tokens = int(case.mask.sum())
    loss, metrics = policy_loss(*arguments, config)
    halved, halved_metrics = policy_loss(*arguments, config, normaliser=Normaliser(2 * num_tokens, 99, 99))
    torch.testing.assert_close(halved, loss / 2)
    wanted = {key: value if key == "ratio_max" else value / 2 for key, value in numbers_of(metrics).items()}
    assert numbers_of(halved_metrics) == pytest.approx(wanted)


def test_a_loss_that_is_not_in_the_table_is_refused():
    with pytest.raises(ValueError, match="policy_loss"):
        Actor(policy_loss="absent")


@EVERY
def test_a_loss_reads_the_keys_that_it_declares_and_no_others(name: str):
    read = set()

    class Reading:
        def __getattr__(self, key: str):
            read.add(key)
            return getattr(Actor(policy_loss=name), key)

    ones = torch.ones(2, 3)
    policy_loss(-ones, -ones, ones, ones, Reading())
    assert read - {"method", "loss_agg_mode", "opsm_delta"} == set(POLICY_LOSSES[name].reads)


@EVERY
def test_a_loss_that_treats_tokens_apart_has_a_selection(name: str):
    def loss(selected: float) -> float:
        config = Actor(policy_loss=name, ppo_kl_coef=0.5)
        tokens = torch.full((1, 2), selected).bool()
        half = torch.full((1, 2), 0.1)
        return float(policy_loss(half, 0 * half, half, torch.ones(1, 2), config, selected=tokens)[0])

    assert (loss(0.0) != loss(1.0)) == (POLICY_LOSSES[name].select is not None)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_without_a_selection_the_door_selects_among_the_calls_own_tokens_and_the_loss_none(name: str):
    config = Actor(policy_loss=name, clip_cov_ratio=0.5, clip_cov_lb=-9.0, kl_cov_ratio=0.5)
    case = Case(4, 6, seed=3)
    inputs = Inputs.of(case, 0.3, weighted=False)
    tensors = (inputs.log_probs, inputs.old_log_probs, inputs.advantages, case.mask)
    chosen = config.method.select(inputs.log_probs, inputs.advantages, case.mask, config)
    assert 0 < chosen.sum() < case.mask.sum()
    assert torch.equal(policy_loss(*tensors, config)[0], policy_loss(*tensors, config, selected=chosen)[0])
    none = torch.zeros_like(chosen)
    alone = config.method.function(PolicyInputs(*tensors), config)[0]
    assert torch.equal(alone, policy_loss(*tensors, config, selected=none)[0])
    assert not torch.equal(alone, policy_loss(*tensors, config)[0])


def test_the_policy_kl_is_the_metric_of_every_loss():
    case = Case(4, 6, seed=3)
    inputs = Inputs.of(case, 20.0, weighted=False)
    junk = torch.where(case.mask.bool(), 0.0, math.nan)
    found = policy_kl(inputs.log_probs + junk, inputs.old_log_probs, case.mask)
    _, metrics = policy_loss(inputs.log_probs, inputs.old_log_probs, inputs.advantages, case.mask, Actor())
    assert torch.equal(found, metrics["ppo_kl"])

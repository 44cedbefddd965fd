"""Corrections of the mismatch between engine and trainer against loops in Python floats, and over real ranks."""

import math
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from policy_oracles import numbers_of
from ragged import CASES, Case, cases
from spawn import run_ranks

from megappo.batch.exchange import Exchange
from megappo.config.sections import RolloutCorrection
from megappo.config.values import Rejection
from megappo.observe.metrics import Metric, reduce_ranks
from megappo.ppo.corrections import rollout_is_weights

RATIOS = st.floats(0.2, 3.0)


@st.composite
def corrections(draw) -> RolloutCorrection:
    """Every combination of level, mode and rejections, with bounds in order."""
    lower, upper = sorted([draw(RATIOS), draw(RATIOS)])
    return RolloutCorrection(
        level=draw(st.sampled_from(["none", "token", "sequence", "geometric"])),
        mode=draw(st.sampled_from(["truncate", "mask"])),
        threshold=draw(st.floats(1.05, 3.0)),
        threshold_lower=draw(st.none() | st.floats(0.2, 1.0)),
        normalize=draw(st.booleans()),
        reject=draw(st.dictionaries(st.sampled_from(get_args(Rejection)), st.floats(1.01, 2.0), max_size=2)),
        reject_geometric=draw(st.none() | st.just((lower, upper))),
        veto_threshold=draw(st.none() | st.floats(1e-4, 0.5)),
    )


def bounded_exp(x):
    return math.exp(min(max(x, -20.0), 20.0))


def divergence(name: str, logs: list[float]) -> list[float]:
    """At each token of a response."""
    bounded = [min(max(x, -20.0), 20.0) for x in logs]
    of_tokens = {
        "k1": [-x for x in bounded],
        "k2": [x * x / 2 for x in bounded],
        "k3": [math.exp(x) - 1 - x for x in bounded],
    }[name[-2:]]
    level = name[:-3]
    if level == "token":
        return of_tokens
    of_response = {"seq_sum": math.fsum(of_tokens), "seq_mean": math.fsum(of_tokens) / len(logs)}
    return [of_response.get(level, max(of_tokens))] * len(logs)


def diverges(name: str, value: float, bound: float | tuple[float, float]) -> bool:
    low, high = bound if isinstance(bound, tuple) else (1 / bound, bound)
    return not math.log(low) <= value <= math.log(high) if name.endswith("k1") else value > high


def loop_weights(old, rollout, mask, config):
    """Weights and metrics by their definition, row by row and token by token."""
    weights = torch.zeros(mask.shape, dtype=torch.float64)
    raw, finals, log_ratios, norms, outside = [], [], [], [], dict.fromkeys(config.reject, 0)
    num_clipped = num_responses = num_rejected = num_vetoed = 0
    for i in range(len(mask)):
        positions = [t for t in range(mask.shape[1]) if mask[i, t] == 1]
        if not positions:
            continue
        logs = [float(old[i, t]) - float(rollout[i, t]) for t in positions]
        mean = math.fsum(logs) / len(logs)
        at_level = {"none": logs, "token": logs, "sequence": [math.fsum(logs)] * len(logs)}
        ratios = [bounded_exp(x) for x in at_level.get(config.level, [mean] * len(logs))]
        vetoed = config.veto_threshold is not None and any(math.exp(x) < config.veto_threshold for x in logs)
        bounds = config.reject_geometric
        rejected = vetoed or (bounds is not None and not bounds[0] <= bounded_exp(mean) <= bounds[1])
        row = []
        for ratio in ratios:
            lower = 1 / config.threshold if config.threshold_lower is None else config.threshold_lower
            if config.level == "none":
                weight = 1.0
            elif config.mode == "truncate":
                weight = min(max(ratio, config.threshold_lower or 0.0), config.threshold)
                num_clipped += weight != ratio
            else:
                inside = lower <= ratio <= config.threshold
                weight, num_clipped = ratio if inside else 0.0, num_clipped + (not inside)
            row.append(weight)
        norms += row if config.level == "token" else [math.fsum(row) / len(row)]
        diverging = [False] * len(row)
        for name, bound in config.reject.items():
            flags = [diverges(name, value, bound) for value in divergence(name, logs)]
            outside[name] += sum(flags)
            diverging = [a or b for a, b in zip(diverging, flags, strict=True)]
        row = [0.0 if rejected or out else weight for weight, out in zip(row, diverging, strict=True)]
        weights[i, positions] = torch.tensor(row, dtype=torch.float64)
        raw, finals, log_ratios = raw + ratios, finals + row, log_ratios + logs
        num_responses += 1
        num_vetoed += vetoed
        num_rejected += all(weight == 0 for weight in row)
    norm = math.fsum(norms) / len(norms) if config.normalize else 1.0
    norm = norm if norm > 1e-8 else 1.0
    weights, finals = weights / norm, [weight / norm for weight in finals]
    n = len(raw)
    squares = math.fsum(w * w for w in finals)
    metrics = {
        "mean": math.fsum(raw) / n,
        "max": max(raw),
        "min": min(raw),
        "clipped_frac": num_clipped / n,
        **{f"{name}_frac": count / n for name, count in outside.items()},
        "rejected_frac": num_rejected / num_responses,
        "veto_frac": num_vetoed / num_responses,
        "ess": math.fsum(finals) ** 2 / (n * squares) if squares else 0.0,
        "kl": -math.fsum(log_ratios) / n,
        "kl_reverse": math.fsum(bounded_exp(x) * min(max(x, -20.0), 20.0) for x in log_ratios) / n,
        "k3": math.fsum(bounded_exp(x) - 1.0 - min(max(x, -20.0), 20.0) for x in log_ratios) / n,
    }
    return weights.float(), {f"rollout_is/{name}": value for name, value in metrics.items()}


@CASES
@given(cases(), corrections(), st.sampled_from([0.01, 0.5, 12.0]))
def test_weights_and_metrics_equal_the_loop_on_ragged_masks(case: Case, config, spread):
    old = case.numbers()
    rollout = old - case.numbers(spread)
    expected, expected_metrics = loop_weights(old, rollout, case.mask, config)
    junk = torch.where(case.mask == 1, 0.0, math.nan)
    weights, metrics = weights_and_metrics(old + junk, rollout, case.mask, config)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-7)
    assert metrics == pytest.approx(expected_metrics, rel=1e-6, abs=1e-9)
    assert all(math.isfinite(value) for value in metrics.values())


def weights_and_metrics(*inputs):
    weights, metrics = rollout_is_weights(*inputs)
    return weights, numbers_of(metrics)


def of_ratios(*rows, **config):
    """Weights and metrics of rows of trainer / engine ratios, all of one length."""
    rollout = torch.full((len(rows), len(rows[0])), -1.0)
    old = rollout + torch.tensor(rows, dtype=torch.float64).log()
    weights, metrics = weights_and_metrics(old, rollout, torch.ones_like(rollout), RolloutCorrection(**config))
    return weights, {name.removeprefix("rollout_is/"): value for name, value in metrics.items()}


def test_token_weights_are_capped_or_masked():
    weights, metrics = of_ratios([1.0, 3.0, 0.25, 2.0 - 1e-6], level="token")
    torch.testing.assert_close(weights, torch.tensor([[1.0, 2.0, 0.25, 2.0]]), rtol=1e-6, atol=0)
    assert metrics["clipped_frac"] == 0.25
    assert metrics["mean"] == pytest.approx(6.25 / 4)
    assert metrics["max"] == pytest.approx(3.0)
    assert metrics["ess"] == pytest.approx(5.25**2 / (4 * 9.0625))
    weights, metrics = of_ratios([1.0, 3.0, 0.25, 2.0 - 1e-6], level="token", mode="mask")
    torch.testing.assert_close(weights, torch.tensor([[1.0, 0.0, 0.0, 2.0]]), rtol=1e-6, atol=0)
    assert metrics["clipped_frac"] == 0.5
    weights, _ = of_ratios([1.0, 3.0, 0.25], level="token", mode="mask", threshold=5.0, threshold_lower=0.5)
    torch.testing.assert_close(weights, torch.tensor([[1.0, 3.0, 0.0]]))


def test_truncated_weights_may_have_a_lower_bound():
    weights, metrics = of_ratios([1.0, 3.0, 0.25], level="token", threshold_lower=0.5)
    torch.testing.assert_close(weights, torch.tensor([[1.0, 2.0, 0.5]]))
    assert metrics["clipped_frac"] == pytest.approx(2 / 3)


def test_normalised_weights_have_the_mean_1_over_tokens_or_over_responses():
    weights, _ = of_ratios([1.0, 3.0, 0.5, 0.5], level="token", normalize=True)
    torch.testing.assert_close(weights, torch.tensor([[1.0, 2.0, 0.5, 0.5]]))
    weights, _ = of_ratios([0.5, 0.5], [1.5, 1.0], [1.0, 1.0], level="sequence", threshold=9.0, normalize=True)
    torch.testing.assert_close(weights[:, 0], torch.tensor([0.25, 1.5, 1.0]) / (2.75 / 3))


@pytest.mark.parametrize(
    ("reject", "kept"),
    [
        ({"token_k1": 2.1}, [1, 1, 1, 0, 1]),
        ({"token_k1": (0.6, 3.0)}, [1, 0, 1, 1, 1]),  # of pi_engine / pi_trainer: 1/2 is too low
        ({"token_k2": 0.3}, [1, 1, 1, 0, 1]),  # log(2.5)^2 / 2 = 0.42
        ({"token_k3": 0.31}, [1, 1, 1, 0, 1]),  # 0.4 - 1 + log(2.5) = 0.316; 2 - 1 - log 2 = 0.307
        ({"seq_sum_k1": 2.1}, [1, 1, 0, 0, 0]),
        ({"seq_mean_k1": (0.4, 1.2)}, [1, 1, 0, 0, 0]),  # 2.5^(1/3) = 1.36; 0.5^(1/2) = 0.71
        ({"seq_sum_k2": 0.3}, [1, 1, 0, 0, 0]),
        ({"seq_mean_k2": 0.15}, [1, 1, 1, 1, 1]),
        ({"seq_mean_k3": 0.12}, [0, 0, 1, 1, 1]),  # 0.307 / 2 = 0.153; 0.316 / 3 = 0.105
        ({"seq_sum_k3": 0.31}, [1, 1, 0, 0, 0]),
        ({"seq_max_k2": 0.3}, [1, 1, 0, 0, 0]),
        ({"seq_max_k3": 0.31, "token_k1": (0.6, 3.0)}, [1, 0, 0, 0, 0]),
    ],
    ids=str,
)
def test_tokens_and_responses_that_diverge_are_rejected(reject, kept):
    """Ratios 1, 2 | 1, 1/2.5, 1."""
    rollout, mask = torch.zeros(2, 3), torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    old = torch.tensor([[1.0, 2.0, 9.0], [1.0, 0.4, 1.0]]).log()
    weights, metrics = weights_and_metrics(old, rollout, mask, RolloutCorrection(reject=reject))
    assert weights[mask.bool()].tolist() == kept
    total = sum(metrics[f"rollout_is/{name}_frac"] for name in reject)
    assert total >= (5 - sum(kept)) / 5 - 1e-9 and RolloutCorrection(reject=reject).is_on


def test_a_response_shares_the_product_or_the_geometric_mean():
    weights, _ = of_ratios([2.0, 0.5, 1.5], [2.0, 2.0, 1.0], level="sequence", threshold=3.0)
    torch.testing.assert_close(weights, torch.tensor([[1.5] * 3, [3.0] * 3]))
    weights, _ = of_ratios([2.0, 0.5, 8.0], level="geometric", threshold=3.0)
    torch.testing.assert_close(weights, torch.tensor([[2.0] * 3]))


def test_responses_are_rejected_by_geometric_mean_and_by_a_catastrophic_token():
    rows = [1.0, 1.0005], [1.01, 1.0], [2e4, 5e-5]
    weights, metrics = of_ratios(*rows, reject_geometric=(0.999, 1.001))
    torch.testing.assert_close(weights, torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]))
    assert metrics["rejected_frac"] == pytest.approx(1 / 3)
    assert metrics["veto_frac"] == 0.0
    assert metrics["ess"] == pytest.approx(4 / 6)
    weights, metrics = of_ratios(*rows, reject_geometric=(0.999, 1.001), veto_threshold=1e-4)
    torch.testing.assert_close(weights, torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]))
    assert metrics["rejected_frac"] == pytest.approx(2 / 3)
    assert metrics["veto_frac"] == pytest.approx(1 / 3)


def test_without_a_correction_weights_are_1_and_metrics_show_the_mismatch():
    weights, metrics = of_ratios([1.0, 2.0])
    assert weights.tolist() == [[1.0, 1.0]]
    assert (metrics["mean"], metrics["max"], metrics["min"]) == pytest.approx((1.5, 2.0, 1.0))
    assert metrics["kl"] == pytest.approx(-math.log(2) / 2)
    assert metrics["kl_reverse"] == pytest.approx(math.log(2))
    assert metrics["k3"] == pytest.approx((1 - math.log(2)) / 2)
    assert metrics["ess"] == 1.0


def test_kl_estimates_converge_to_both_kl_divergences():
    torch.manual_seed(0)
    trainer, engine = torch.tensor([0.6, 0.3, 0.1]).log(), torch.tensor([0.3, 0.3, 0.4]).log()
    tokens = torch.multinomial(engine.exp(), 200_000, replacement=True)[None]
    mask = torch.ones(tokens.shape)
    _, metrics = weights_and_metrics(trainer[tokens], engine[tokens], mask, RolloutCorrection())
    forward, backward = (engine.exp() * (engine - trainer)).sum(), (trainer.exp() * (trainer - engine)).sum()
    assert metrics["rollout_is/kl"] == pytest.approx(float(forward), rel=0.02)
    assert metrics["rollout_is/k3"] == pytest.approx(float(forward), rel=0.02)
    assert metrics["rollout_is/kl_reverse"] == pytest.approx(float(backward), rel=0.02)


def test_log_ratios_are_clamped_before_exp():
    config = RolloutCorrection(level="sequence", threshold=1e12)
    old, rollout, mask = torch.tensor([[-1.0, -1.0], [-15.0, -15.0]]), torch.tensor([[-15.0], [-1.0]]), torch.ones(2, 2)
    weights, _ = rollout_is_weights(old, rollout.expand(2, 2), mask, config)
    torch.testing.assert_close(weights[:, 0], torch.tensor([math.exp(20), math.exp(-20)]))


def test_weights_are_constants_of_the_loss():
    old = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    rollout = torch.tensor([[-1.5, -2.0, -1.0]])
    weights, _ = rollout_is_weights(old, rollout, torch.ones(1, 3), RolloutCorrection(level="token", threshold=1.5))
    assert not weights.requires_grad
    (weights * old).sum().backward()
    torch.testing.assert_close(old.grad, torch.tensor([[1.5, 1.0, math.exp(-2.0)]]))


def test_everything_rejected_leaves_finite_metrics():
    weights, metrics = of_ratios([1.0, 1.0], [1.0, 1.0], level="token", reject_geometric=(1.5, 2.0))
    assert not weights.any()
    assert metrics["ess"] == 0.0
    assert metrics["rejected_frac"] == 1.0
    assert all(math.isfinite(value) for value in metrics.values())


def test_bad_input_is_named():
    zeros, ones = torch.zeros(3, 2), torch.ones(3, 2)
    bad = torch.tensor([[0.0, 0.0], [0.0, math.nan], [-math.inf, 0.0]])
    with pytest.raises(FloatingPointError, match=r"rollout_log_probs of responses \[1, 2\] are not finite"):
        rollout_is_weights(zeros, bad, ones, RolloutCorrection())
    with pytest.raises(FloatingPointError, match=r"old_log_probs of responses \[1, 2\] are not finite"):
        rollout_is_weights(bad, zeros, ones, RolloutCorrection())


def check_ranks(rank, world_size):
    exchange = Exchange(dist.group.WORLD)
    everything = Case(5, 9, seed=7)
    old = everything.numbers()
    rollout = old - everything.numbers(0.5)
    mask = everything.mask
    mask[3] = 0.0
    for cut in (0, 2, 5):
        for level in ("none", "token", "sequence", "geometric"):
            rejections = {"reject_geometric": (0.8, 1.2), "veto_threshold": 0.3, "reject": {"token_k3": 0.2}}
            config = RolloutCorrection(level=level, mode="mask", normalize=True, **rejections)
            weights, metrics = rollout_is_weights(old, rollout, mask, config)
            mine = slice(0, cut) if rank == 0 else slice(cut, 5)
            of_rank, found = rollout_is_weights(old[mine], rollout[mine], mask[mine], config, group=dist.group.WORLD)
            torch.testing.assert_close(of_rank, weights[mine], rtol=1e-6, atol=0)
            of_all = reduce_ranks(exchange.all_gather({name: Metric.of(*part) for name, part in found.items()}))
            assert of_all == pytest.approx(numbers_of(metrics), rel=1e-12, abs=1e-15)
    _, found = rollout_is_weights(old, rollout, torch.zeros(5, 9), config, group=dist.group.WORLD)
    nothing = reduce_ranks(exchange.all_gather({name: Metric.of(*part) for name, part in found.items()}))
    assert math.isnan(nothing["rollout_is/mean"]) and nothing["rollout_is/ess"] == 0


def test_metrics_are_taken_over_all_ranks_however_rows_are_spread():
    run_ranks(2, check_ranks)

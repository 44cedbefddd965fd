"""Losses on examples: fine-tuning's is torch's cross-entropy, the loss on preferences a plain loop's."""

import math

import pytest
import torch
import torch.nn.functional as F

from megappo.observe.metrics import Metric, reduce_ranks
from megappo.ppo.reductions import Normaliser
from megappo.ppo.supervised import nll_loss, preference_loss, preference_metrics


def test_the_loss_is_the_mean_cross_entropy_however_the_batch_is_cut():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, 10, generator=generator, requires_grad=True)
    targets = torch.randint(10, (4, 6), generator=generator)
    mask = (torch.rand(4, 6, generator=generator) < 0.6).float()
    log_probs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    expected = F.cross_entropy(logits[mask.bool()], targets[mask.bool()])
    [gradient] = torch.autograd.grad(expected, logits, retain_graph=True)
    whole, metrics = nll_loss(log_probs, mask)
    normaliser = Normaliser.of(mask)
    parts = sum(nll_loss(log_probs[rows], mask[rows], normaliser)[0] for rows in ([0], [1, 2], [3]))
    [of_parts] = torch.autograd.grad(parts, logits)
    assert torch.allclose(whole, expected) and torch.equal(metrics["nll_loss"], whole.detach())
    assert torch.allclose(parts, expected) and torch.allclose(of_parts, gradient, atol=1e-7)


def test_the_preference_loss_is_a_plain_loop_however_the_batch_is_cut():
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(2, 5, generator=generator, requires_grad=True)
    margins = torch.tensor([0.0, 0.5, 1.0, 0.0, 2.0])
    expected, center, right = 0.0, 0.0, 0
    for chosen, rejected, margin in zip(*scores, margins.tolist(), strict=True):
        expected -= torch.log(1 / (1 + torch.exp(-(chosen - rejected - margin)))) / 5
        center += (chosen + rejected) ** 2 / 5
        right += int(chosen > rejected)
    [gradient] = torch.autograd.grad(expected + 0.1 * center, scores, retain_graph=True)
    parts = [preference_loss(*scores[:, rows], margins[rows], 5, 0.1) for rows in ([0, 3], [4], [1, 2])]
    loss = sum(part for part, _ in parts)
    [of_parts] = torch.autograd.grad(loss, scores)
    assert torch.allclose(loss, expected + 0.1 * center) and torch.allclose(of_parts, gradient, atol=1e-7)
    metrics = {name: sum(part[name].item() for _, part in parts) for name in parts[0][1]}
    assert metrics["bt_loss"] == pytest.approx(expected.item()) and 0 < right < 5
    assert metrics["center_loss"] == pytest.approx(center.item()) and metrics["accuracy"] == pytest.approx(right / 5)
    assert metrics["margin"] == pytest.approx((scores[0] - scores[1]).mean().item())
    assert metrics["score"] == pytest.approx(scores.mean().item())


def test_held_out_metrics_are_those_of_all_pairs_together():
    differences = torch.randn(200, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 2
    probabilities = [1 / (1 + math.exp(-abs(x))) for x in differences.tolist()]
    bins = [[] for _ in range(10)]
    for confidence, x in zip(probabilities, differences.tolist(), strict=True):
        bins[min(int((confidence - 0.5) * 20), 9)].append((confidence, x > 0))
    errors = [abs(sum(right - confidence for confidence, right in part)) for part in bins]
    parts = []
    for part in differences.split([0, 70, 130]):
        parts.append({name: Metric.of(*values) for name, values in preference_metrics(part).items()})
    found = reduce_ranks(parts)
    assert found["calibration_error"] == pytest.approx(sum(errors) / 200) and found["calibration_error"] > 0.1
    assert found["accuracy"] == (differences > 0).double().mean().item()
    assert found["loss"] == pytest.approx(F.softplus(-differences).mean().item())
    assert found["margin"] == pytest.approx(differences.mean().item())

"""The loss of fine-tuning, compared with torch's cross-entropy."""

import torch
import torch.nn.functional as F

from megappo.ppo.reductions import Normaliser
from megappo.ppo.supervised import nll_loss


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

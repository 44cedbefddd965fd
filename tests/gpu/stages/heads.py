"""Log-probs, entropy and full KL over a vocabulary against log_softmax of logits: values, gradients, time and memory.

Log-probs and entropy are computed by the Triton kernels, and for comparison by torch.

python tests/gpu/stages/heads.py
"""

from unittest.mock import patch

import torch
import torch.distributed as dist
from common import CUDA, DEVICE, GIB, measured, one_rank, report, sized

from megappo.architecture.parameters import LOGITS_AT_A_TIME
from megappo.models import head_kernels
from megappo.models.vocab_parallel import LogitFactors, vocab_parallel_outputs

VOCABULARY = sized(151_936, 91)
TOKENS = sized((1024, 8192, 16_384), (5, 33))
CHECKED = 64
HIDDEN = sized(4096, 8)
TEMPERATURE = 0.7
GENERATOR = torch.Generator(DEVICE).manual_seed(0)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR, device=DEVICE, dtype=torch.bfloat16)


def expected(logits: torch.Tensor, ref_logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    log_p, log_q = (torch.log_softmax(x.double() / TEMPERATURE, -1) for x in (logits, ref_logits))
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1), kl


def measure() -> dict:
    figures = {}
    with one_rank():
        for num_tokens in TOKENS:
            hidden, ref_hidden = draw(num_tokens, HIDDEN), draw(num_tokens, HIDDEN)
            weight, ref_weight = draw(VOCABULARY, HIDDEN), draw(VOCABULARY, HIDDEN)
            for scaled in (weight, ref_weight):
                scaled.mul_(3 * HIDDEN**-0.5)
            targets = torch.randint(VOCABULARY, (num_tokens,), generator=GENERATOR, device=DEVICE)
            hidden.requires_grad_()
            settings = dict(vocab_size=VOCABULARY, temperature=TEMPERATURE)

            def log_probs_and_entropy(hidden=hidden, weight=weight, targets=targets, settings=settings) -> tuple:
                hidden.grad = None
                outputs = vocab_parallel_outputs(hidden, weight, targets, dist.group.WORLD, **settings)
                (outputs["log_probs"] - 0.1 * outputs["entropy"]).sum().backward()
                return outputs["log_probs"], outputs["entropy"]

            def by_torch(compute=log_probs_and_entropy) -> tuple:
                with patch.object(head_kernels, "has_kernels", lambda tensor: False):
                    return compute()

            reference = LogitFactors(ref_hidden, ref_weight)

            def full_kl(hidden=hidden, weight=weight, targets=targets, reference=reference, settings=settings) -> tuple:
                hidden.grad = None
                outputs = vocab_parallel_outputs(
                    hidden, weight, targets, dist.group.WORLD, reference=reference, **settings
                )
                outputs["full_kl"].sum().backward()
                return (outputs["full_kl"],)

            rows = slice(max(num_tokens - CHECKED, 0), num_tokens)
            own = hidden[rows].detach().clone().requires_grad_()
            wanted = expected(own @ weight.T, ref_hidden[rows] @ ref_weight.T, targets[rows])
            for name, compute, kept, loss in (
                ("log_probs_and_entropy", log_probs_and_entropy, wanted[:2], wanted[0] - 0.1 * wanted[1]),
                ("log_probs_and_entropy_by_torch", by_torch, wanted[:2], wanted[0] - 0.1 * wanted[1]),
                ("full_kl", full_kl, wanted[2:], wanted[2]),
            ):
                found, figure = measured(compute)
                for one, other in zip(found, kept, strict=True):
                    torch.testing.assert_close(
                        one[rows].double(), other, rtol=2e-2, atol=2e-2
                    )  # logits are rounded to bf16
                (gradient,) = torch.autograd.grad(loss.sum(), own, retain_graph=True)
                if not CUDA:
                    torch.testing.assert_close(hidden.grad[rows], gradient, rtol=2e-2, atol=1e-4)
                else:  # of so many numbers some are rounded otherwise; were each block of words, it would be 2.8e-3
                    error = (hidden.grad[rows].double() - gradient).norm() / gradient.double().norm()
                    assert error < 2e-3, (name, error)
                    # the gradient of hidden states, and some blocks of logits, in fp32
                    room = 4 * (4 * hidden.numel() + 8 * LOGITS_AT_A_TIME["cuda"]) / GIB
                    assert figure["peak_gib"] < room, (name, figure, room)
                figures |= {f"{name}_{num_tokens}_tokens_{key}": value for key, value in figure.items()}
    return {"stage": "heads", **figures}


if __name__ == "__main__":
    report(measure)

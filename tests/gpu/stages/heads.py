"""Log-probs, entropy and full KL over a whole vocabulary against log_softmax: values, gradients, time and memory.

python tests/gpu/stages/heads.py
"""

import torch
import torch.distributed as dist
from common import CUDA, DEVICE, GIB, measured, one_rank, report, sized

from megappo.models.vocab_parallel import vocab_parallel_kl, vocab_parallel_log_probs_and_entropy

VOCABULARY = sized(151_936, 91)
TOKENS = sized((1024, 8192, 16_384), (5, 33))
CHECKED = 64
CHUNK = 1024
TEMPERATURE = 0.7


def expected(logits: torch.Tensor, ref_logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    log_p, log_q = (torch.log_softmax(x.double() / TEMPERATURE, -1) for x in (logits, ref_logits))
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1), kl


def measure() -> dict:
    generator = torch.Generator(DEVICE).manual_seed(0)
    figures = {}
    with one_rank():
        for num_tokens in TOKENS:
            shape = (num_tokens, VOCABULARY)
            logits, ref_logits = (
                torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16).mul_(3) for _ in range(2)
            )
            targets = torch.randint(VOCABULARY, shape[:1], generator=generator, device=DEVICE)
            logits.requires_grad_()
            settings = dict(vocab_size=VOCABULARY, temperature=TEMPERATURE, chunk=CHUNK)

            def log_probs_and_entropy(logits=logits, targets=targets, settings=settings) -> tuple:
                logits.grad = None
                outputs = vocab_parallel_log_probs_and_entropy(logits, targets, dist.group.WORLD, **settings)
                (outputs[0] - 0.1 * outputs[1]).sum().backward()
                return outputs

            def full_kl(logits=logits, ref_logits=ref_logits, settings=settings) -> tuple:
                logits.grad = None
                outputs = (vocab_parallel_kl(logits, ref_logits, dist.group.WORLD, **settings),)
                outputs[0].sum().backward()
                return outputs

            rows = slice(max(num_tokens - CHECKED, 0), num_tokens)
            own = logits[rows].detach().clone().requires_grad_()
            wanted = expected(own, ref_logits[rows], targets[rows])
            for name, compute, kept, loss in (
                ("log_probs_and_entropy", log_probs_and_entropy, wanted[:2], wanted[0] - 0.1 * wanted[1]),
                ("full_kl", full_kl, wanted[2:], wanted[2]),
            ):
                found, figure = measured(compute)
                for one, other in zip(found, kept, strict=True):
                    torch.testing.assert_close(one[rows].double(), other, rtol=1e-4, atol=1e-4)
                (gradient,) = torch.autograd.grad(loss.sum(), own, retain_graph=True)
                torch.testing.assert_close(logits.grad[rows], gradient, rtol=2e-2, atol=1e-4)
                if CUDA:  # the gradient, and some chunks in fp32
                    room = (logits.nbytes + 12 * CHUNK * VOCABULARY * 4) / GIB
                    assert figure["peak_gib"] < room, (name, figure, room)
                figures |= {f"{name}_{num_tokens}_tokens_{key}": value for key, value in figure.items()}
    return {"stage": "heads", **figures}


if __name__ == "__main__":
    report(measure)

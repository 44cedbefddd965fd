"""Time megappo's GAE against the loop over tokens it replaces, in one run.

    python tools/bench/gae.py --rows 1024 --tokens 8192 --repeats 9

Both get the same float32 numbers and are called in turn; the figures are medians of the wall-clock time. On a machine
that has other work too, set OMP_WAIT_POLICY=passive: threads that wait in a loop for one that has lost its core make
every figure noise.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from megappo.ppo.gae import gae

GAMMA, LAM = 0.999, 0.95
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Estimator = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, float], tuple[torch.Tensor, torch.Tensor]]


@torch.no_grad()
def loop_gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE token by token from the last to the first, each step for all rows at once, as public trainers have it.

    Source: the arithmetic of verl's compute_gae_advantage_return, without its whitening.
    """
    next_value, running = values.new_zeros(len(values)), values.new_zeros(len(values))
    backwards = []
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        new = delta + gamma * lam * running
        next_value = values[:, t] * mask[:, t] + (1 - mask[:, t]) * next_value
        running = new * mask[:, t] + (1 - mask[:, t]) * running
        backwards.append(running)
    advantages = torch.stack(backwards[::-1], dim=1)
    return advantages, advantages + values


def masks(rows: int, tokens: int) -> dict[str, torch.Tensor]:
    """Response masks [rows, tokens]: of lengths drawn evenly, and the same with a fifth of the tokens masked out."""
    prefix = torch.arange(tokens) < torch.randint(1, tokens + 1, (rows, 1))
    return {"prefix": prefix.float(), "holes": (prefix & (torch.rand(rows, tokens) < 0.8)).float()}


def seconds(estimator: Estimator, inputs: Inputs) -> float:
    start = time.perf_counter()
    estimator(*inputs, GAMMA, LAM)
    return time.perf_counter() - start


def compare(inputs: Inputs, repeats: int) -> tuple[float, float, float]:
    """Median seconds of the loop and of the scan, and the largest difference relative to the largest advantage."""
    times = [(seconds(loop_gae, inputs), seconds(gae, inputs)) for _ in range(repeats)]
    expected, found = loop_gae(*inputs, GAMMA, LAM)[0], gae(*inputs, GAMMA, LAM)[0]
    valid = inputs[2].bool()  # elsewhere the loop carries its sum along
    difference = float((found - expected)[valid].abs().max() / expected[valid].abs().max())
    loop, scan = (statistics.median(column) for column in zip(*times, strict=True))
    return loop, scan, difference


def parse_arguments() -> argparse.Namespace:
    summary, details = __doc__.split("\n", 1)
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1024, help="responses in the batch (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=8192, help="width of the batch (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=9, help="runs of each, for the median (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(0)
    shape = (arguments.rows, arguments.tokens)
    print(f"GAE of [{arguments.rows}, {arguments.tokens}] float32, {torch.get_num_threads()} threads")
    print(f"{'mask':<8}{'loop ms':>10}{'scan ms':>10}{'ratio':>8}{'difference':>12}")
    for name, mask in masks(*shape).items():
        loop, scan, difference = compare((torch.randn(shape), torch.randn(shape), mask), arguments.repeats)
        print(f"{name:<8}{1e3 * loop:>10.1f}{1e3 * scan:>10.1f}{loop / scan:>7.1f}x{difference:>12.1e}")


if __name__ == "__main__":
    main()

"""Time megappo's GAE against the loop over tokens that it replaces, in one run.

    .venv/bin/python -m megappo.torchrun tools/bench/gae.py --rows 1024 --tokens 8192 --repeats 5

Run it under megappo.torchrun, as the ranks of a run: they reuse freed memory. A plain process has the kernel clear new
pages for each result, which takes a third of the time.
Both get the same float32 numbers and are called in turn; the figures are medians of the wall-clock time. On a machine
with other load, set OMP_WAIT_POLICY=passive: otherwise threads spin while they wait for one that has lost its core,
and every figure is noise.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from timed import Row, check_keeps_memory, medians, parser_of, report

from megappo.ppo.advantages import gae

GAMMA, LAM = 0.999, 0.95
TOLERANCE = 1e-6
BARS = {"prefix": "at least 8", "holes": "at least 8"}
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@torch.no_grad()
def loop_gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute GAE token by token from the last to the first, each step for all rows at once, as public trainers do.

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
    """Return response masks [rows, tokens]: uniform lengths, and the same with a fifth of the tokens masked out."""
    prefix = torch.arange(tokens) < torch.randint(1, tokens + 1, (rows, 1))
    return {"prefix": prefix.float(), "holes": (prefix & (torch.rand(rows, tokens) < 0.8)).float()}


def compare(name: str, inputs: Inputs, repeats: int) -> Row:
    """Return the speedup of the scan over the loop, after checking that both agree."""
    found = medians(
        {"loop": lambda: loop_gae(*inputs, GAMMA, LAM), "scan": lambda: gae(*inputs, GAMMA, LAM)},
        repeats,
    )
    expected, advantages = loop_gae(*inputs, GAMMA, LAM)[0], gae(*inputs, GAMMA, LAM)[0]
    valid = inputs[2].bool()  # elsewhere the loop carries its sum along
    difference = float((advantages - expected)[valid].abs().max() / expected[valid].abs().max())
    if difference > TOLERANCE:
        raise ValueError(f"the scan differs from the loop by {difference:.1e} of the largest advantage")
    shape = "x".join(map(str, inputs[0].shape))
    return Row(
        f"GAE of {shape}, {name}", found["loop"] / found["scan"], BARS[name], "a loop over tokens", found["scan"]
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=1024, help="responses in the batch (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=8192, help="width of the batch (default %(default)s)")
    args = parser.parse_args()
    check_keeps_memory()
    torch.manual_seed(0)
    shape = (args.rows, args.tokens)
    drawn = masks(*shape).items()
    report(
        [compare(name, (torch.randn(shape), torch.randn(shape), mask), args.repeats) for name, mask in drawn], args.json
    )


if __name__ == "__main__":
    main()

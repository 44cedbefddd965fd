"""Random ragged cases for property tests of megappo.ppo: shapes, masks with holes and empty rows."""

import torch
from hypothesis import settings
from hypothesis import strategies as st

CASES = settings(max_examples=200, deadline=None)


class Case:
    """A mask [B, R] (a prefix of each row with holes, maybe empty rows; two ones at least) and a source of numbers."""

    def __init__(self, batch: int, width: int, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.shape = (batch, width)
        lengths = torch.randint(0, width + 1, (batch, 1), generator=self.generator)
        holes = torch.rand(self.shape, generator=self.generator) < 0.2
        self.mask = ((torch.arange(width) < lengths) & ~holes).float()
        self.mask[0, :2] = 1.0

    def numbers(self, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(self.shape, generator=self.generator) * scale

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=self.generator))

    def tokens(self) -> list[tuple[int, int]]:
        """Row and position of each token with mask 1."""
        return [(int(i), int(t)) for i, t in self.mask.nonzero()]


def cases() -> st.SearchStrategy[Case]:
    return st.builds(Case, st.integers(1, 5), st.integers(2, 12), st.integers(0, 2**31))

"""Responses with tokens of mask 0 between, before or behind those of mask 1."""

import torch


def are_prefixes(mask: torch.Tensor) -> bool:
    """Whether the tokens with mask 1 of each row are its first ones: no environment turns, no left padding.

    A row has as many runs of ones as it has ones that no other one follows, at least mask[:, 0] of them.

    Args:
        mask: [B, R] float32 of 0 and 1, of at most 2 ** 24 tokens, up to where sums of them are exact.
    """
    tokens = mask.flatten()
    followed = tokens[:-1].dot(tokens[1:]) - mask[:-1, -1:].flatten().dot(mask[1:, :1].flatten())
    return bool(tokens.sum() - followed == mask[:, :1].sum())


def check_finite(name: str, values: torch.Tensor, valid: torch.Tensor | None = None) -> None:
    """See that all of [B], or of [B, R] those at tokens with mask 1, are numbers.

    Raises:
        FloatingPointError: names the first responses with one that is not.
    """
    broken = (~values.isfinite() if valid is None else (valid & ~values.isfinite()).any(dim=1)).nonzero().flatten()
    if len(broken):
        found = f": {values[broken[:10]].tolist()}" if valid is None else " on tokens with response_mask 1"
        raise FloatingPointError(f"{name} of responses {broken[:10].tolist()} are not finite{found}")


def add_to_last_token(x: torch.Tensor, valid: torch.Tensor, amounts: torch.Tensor) -> torch.Tensor:
    """x, [B, R], with amounts [B] added at each row's last token with mask 1; a row without any stays as it is."""
    is_last = valid & (valid.cumsum(dim=1) == valid.sum(dim=1, keepdim=True))
    return x + torch.where(is_last, amounts.float()[:, None], 0.0)


class Packing:
    """Moves each row's tokens with mask 1 together to its left end, and back; 0 elsewhere."""

    def __init__(self, valid: torch.Tensor):
        self.shape = valid.shape
        lengths = valid.sum(dim=1)
        self.apart = valid.flatten().nonzero().squeeze(1)
        row_starts = torch.arange(len(valid), device=valid.device) * valid.shape[1]
        shifts = (row_starts - lengths.cumsum(0) + lengths).repeat_interleave(lengths)
        self.together = torch.arange(len(self.apart), device=valid.device) + shifts

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        return self._move(x, self.apart, self.together)

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        return self._move(x, self.together, self.apart)

    def _move(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        moved = x.new_zeros(self.shape)
        moved.view(-1).index_copy_(0, target, x.reshape(-1).index_select(0, source))
        return moved

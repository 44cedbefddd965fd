"""Tokens with mask 1 without what stands between them."""

import torch


def keep(valid: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each [B, R] tensor in float32 with 0 where the [B, R] bool mask is False, whatever stands there.

    The bits are masked: a product would keep NaN, and torch.where takes several times as long on a CPU.
    """
    bits = -valid.int()
    return tuple((x.float().view(torch.int32) & bits).view(torch.float32) for x in tensors)


def has_holes(valid: torch.Tensor) -> bool:
    """Whether some row's tokens with mask 1 are not its first ones: environment turns, left padding."""
    steps = valid.view(torch.int8).diff(dim=1)
    return steps.numel() > 0 and bool(steps.max() > 0)


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


def add_to_last_token(x: torch.Tensor, valid: torch.Tensor, amounts: torch.Tensor) -> torch.Tensor:
    """x, [B, R], with amounts [B] added at each row's last token with mask 1; a row without any stays as it is."""
    position = torch.arange(valid.shape[1], device=valid.device)
    last = torch.where(valid, position, -1).argmax(dim=1, keepdim=True)
    amounts = torch.where(valid.any(dim=1), amounts.float(), 0.0)
    return x.scatter_add(1, last, amounts[:, None])

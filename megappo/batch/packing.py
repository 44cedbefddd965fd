"""Packing rows into one unpadded sequence for the models, and taking response-token values out of it again."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megappo.batch.rows import Rows
from megappo.batch.spans import positions_in
from megappo.batch.zigzag import granularity, held_positions, positions_within


@dataclass(frozen=True)
class PackedBatch:
    """Rows laid end to end, as Megatron's "thd" format takes them, or one context-parallel rank's share of them.

    Attributes:
        rows: the rows packed here, b of them.
        input_ids: [1, T] int64, the tokens held here of each row's prompt and response and of the padding.
        position_ids: [1, T] int64, counting from 0 in every row.
        cu_seqlens: [b + 1] int32 boundaries of the whole rows (one more where there is padding at the end: it counts as
            a row of its own). With context parallelism rows are padded, and the padding counts as theirs.
        max_seqlen: length of the longest of these.
        predictors: [N] int64 into T: the positions held here that predict a token of mask 1, rows in order.
        targets: [N] int64: the tokens that these predict.
        predicted: [N] int64 into b x R: which of all response tokens these are.
        last_tokens: [n] int64 into T: the rows' last tokens, as far as they are held here.
        ended: [n] int64 into b: whose these are.
    """

    rows: Rows
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    predictors: torch.Tensor
    targets: torch.Tensor
    predicted: torch.Tensor
    last_tokens: torch.Tensor
    ended: torch.Tensor

    def responses(self, flat: torch.Tensor) -> torch.Tensor:
        """[N] values at `predictors` as [b, R], 0 at mask 0 and at tokens predicted elsewhere; differentiable."""
        shape = self.rows.response_mask.shape
        # By numbers: the gradient of what goes by a mask has the GPU wait for the host.
        return flat.new_zeros(shape.numel()).index_copy(0, self.predicted, flat).view(shape)

    def ends(self, flat: torch.Tensor) -> torch.Tensor:
        """[n] values at `last_tokens` as [b], 0 for rows whose last token is elsewhere; differentiable."""
        return flat.new_zeros(len(self.rows)).index_copy(0, self.ended, flat)


def copied(tensor: torch.Tensor, device: torch.device, is_pinned: bool) -> torch.Tensor:
    """A tensor on the device.

    Args:
        is_pinned: the copy waits in pinned memory until the GPU comes to it; otherwise the host waits for it.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if is_pinned else tensor.to(device)


def num_held(lengths: Sequence[int], multiple: int, *, context: int = 1) -> int:
    """Tokens that each rank holds of a pack of sequences of these lengths; arguments as of `pack`."""
    unit = granularity(context)
    whole = sum(-(-length // unit) * unit for length in lengths)
    return -(-whole // (unit * multiple)) * unit * multiple // context


def pack(
    rows: Rows,
    multiple: int,
    device: torch.device,
    *,
    context: int = 1,
    context_rank: int = 0,
    is_pinned: bool = False,
) -> PackedBatch:
    """Pack rows, or a rank's share of them.

    Args:
        multiple: pads the end of the pack so that each rank holds a multiple of it (sequence parallelism needs that).
        context: ranks that share out the tokens of each row; above 1 every row is padded to divide among them.
        context_rank: whose share this is.
        is_pinned: see `copied`.
    """
    lengths = _padded(rows.lengths, granularity(context), multiple)
    starts = F.pad(lengths.cumsum(0), (1, 0))
    tokens = torch.zeros(int(starts[-1]), dtype=torch.int64)
    tokens[positions_in(starts[: len(rows)], rows.lengths)] = rows.input_ids
    first = starts[: len(rows)] + rows.prompt_lengths  # of each response
    valid = rows.response_mask.bool()
    written = (first[:, None] + torch.arange(rows.max_response_length))[valid]
    held = held_positions(starts, context, context_rank)
    place = torch.full((len(tokens),), -1).index_copy(0, held, torch.arange(len(held)))
    predictors, last_tokens = place[written - 1], place[first + rows.response_lengths - 1]
    made = {
        "input_ids": tokens[held][None],
        "position_ids": positions_within(starts, len(tokens))[held][None],
        "cu_seqlens": starts.to(torch.int32),
        "predictors": predictors[predictors >= 0],
        "targets": tokens[written[predictors >= 0]],
        "predicted": valid.flatten().nonzero()[predictors >= 0, 0],
        "last_tokens": last_tokens[last_tokens >= 0],
        "ended": (last_tokens >= 0).nonzero()[:, 0],
    }
    on_device = {name: copied(tensor, device, is_pinned) for name, tensor in made.items()}
    return PackedBatch(rows=rows, max_seqlen=int(lengths.max()), **on_device)


def _padded(lengths: torch.Tensor, unit: int, multiple: int) -> torch.Tensor:
    """Each filled up to a multiple of `unit`, and one more that fills all up to a multiple of unit x multiple."""
    filled = lengths + -lengths % unit
    padding = -int(filled.sum()) % (unit * multiple)
    return F.pad(filled, (0, 1), value=padding) if padding else filled

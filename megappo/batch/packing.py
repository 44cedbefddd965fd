"""Packing rows into one unpadded sequence for the models, and taking response-token values out of it again.

Context parallelism cuts a sequence into 2 x size equal chunks and gives a rank one from either end: so all ranks attend
to as many tokens, though early ones attend to few and late ones to many.

Source: TransformerEngine's context parallelism of "thd" batches, which Megatron's rotary embedding follows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from megappo.architecture.vision import Vision
from megappo.batch.image_layout import lay_out_images
from megappo.batch.images import Image, ImageSource
from megappo.batch.rows import Rows, positions_in


@dataclass(frozen=True)
class PackedBatch:
    """Rows laid end to end, as Megatron's "thd" format takes them, or one context-parallel rank's share of them.

    Attributes:
        rows: the rows packed here, b of them.
        input_ids: [1, T] int64, the tokens held here of each row's prompt and response and of the padding.
        position_ids: [1, T] int64, counting from 0 in every row.
        cu_seqlens: [b + 1] int32 boundaries of the whole rows (one more where there is padding at the end: it counts as
            a row of its own). With context parallelism rows are padded, and the padding counts as theirs.
        lengths: lengths of the sequences in cu_seqlens.
        predictor_index: [N] int64 into T: the positions held here that predict a token of mask 1, rows in order.
        targets: [N] int64: the tokens that these predict.
        response_index: [N] int64 into b x R: the positions of these tokens in the rows' responses.
        last_token_index: [n] int64 into T: the rows' last tokens that are held here.
        last_row_index: [n] int64 into b: the rows of these last tokens.
        token_rows: [T] int64: 1 + the row of each token held here, 0 for padding.
        expert_choices: [T, K] uint8, of the tokens held here, as in the rows, 0 for padding; None if they have none.
        mrope_positions: [3, T] int64: frame, row and column of the tokens held here, for a model with a vision tower.
        image_slots: [T] int64: numbers of the tokens held here among the tokens of `images`, -1 for text.
        images: the images in the rows, each once.
        returns: [N], targets of the values at `predictor_index`; None if the rows have none.
    """

    rows: Rows
    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    lengths: list[int]
    predictor_index: Tensor
    targets: Tensor
    response_index: Tensor
    last_token_index: Tensor
    last_row_index: Tensor
    token_rows: Tensor
    expert_choices: Tensor | None = None
    mrope_positions: Tensor | None = None
    image_slots: Tensor | None = None
    images: Sequence[Image] = ()
    returns: Tensor | None = None

    def responses(self, flat: Tensor) -> Tensor:
        """Return values at `predictor_index`, [N], as [b, R]; 0 at mask 0 and at other ranks' tokens."""
        shape = self.rows.response_mask.shape
        # By index: the gradient of indexing by a mask makes the GPU wait for the host.
        return flat.new_zeros(shape.numel()).index_copy(0, self.response_index, flat).view(shape)

    def at_last_tokens(self, flat: Tensor) -> Tensor:
        """Return values at `last_token_index`, [n], as [b]; 0 for rows whose last token another rank has."""
        return flat.new_zeros(len(self.rows)).index_copy(0, self.last_row_index, flat)


def copied(tensor: Tensor, device: torch.device, is_pinned: bool) -> Tensor:
    """Copy a tensor to the device.

    Args:
        is_pinned: copy from pinned memory without blocking the host.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if is_pinned else tensor.to(device)


def num_held(lengths: Sequence[int], multiple: int, *, context: int = 1) -> int:
    """Return the tokens that each rank holds of a pack of sequences of these lengths; arguments as in `pack`."""
    whole = _padded(torch.tensor(lengths, dtype=torch.int64), granularity(context), multiple)
    return int(whole.sum()) // context


def pack(
    rows: Rows,
    multiple: int,
    device: torch.device,
    *,
    context: int = 1,
    context_rank: int = 0,
    is_pinned: bool = False,
    vision: Vision | None = None,
    source: ImageSource | None = None,
) -> PackedBatch:
    """Pack rows, or a rank's share of them.

    Args:
        multiple: pads the end of the pack so that each rank holds a multiple of it (sequence parallelism needs that).
        context: number of ranks that share each row's tokens; above 1 every row is padded to divide among them.
        context_rank: the rank whose share to pack.
        is_pinned: see `copied`.
        vision: vision tower of the model; None = text only.
        source: source of the rows' images, if they may have any.
    """
    # b rows of R response columns, padded to W tokens in all, of which this rank holds T; M tokens have mask 1.
    lengths = _padded(rows.lengths, granularity(context), multiple)  # [b], or [b + 1] with padding at the end
    starts = pad(lengths.cumsum(0), (1, 0))
    tokens = torch.zeros(int(starts[-1]), dtype=torch.int64)  # [W]
    places = positions_in(starts[: len(rows)], rows.lengths)  # into W: the rows' tokens
    tokens[places] = rows.input_ids
    first = starts[: len(rows)] + rows.prompt_lengths  # [b] into W: the first token of each response
    is_written = rows.response_mask.bool()  # [b, R]
    written = (first[:, None] + torch.arange(rows.max_response_length))[is_written]  # [M] into W
    held = held_positions(starts, context, context_rank)  # [T] into W
    place = torch.full((len(tokens),), -1).index_copy(0, held, torch.arange(len(held)))  # [W] into T, -1 elsewhere
    predictor_index = place[written - 1]  # [M] into T
    last_token_index = place[first + rows.response_lengths - 1]  # [b] into T
    is_held = predictor_index >= 0  # [M]
    has_last = last_token_index >= 0  # [b]
    owners = torch.arange(1, len(rows) + 1).repeat_interleave(rows.lengths)
    tensors = {
        "input_ids": tokens[held][None],
        "position_ids": positions_in(torch.zeros_like(lengths), lengths)[held][None],
        "cu_seqlens": starts.to(torch.int32),
        "predictor_index": predictor_index[is_held],
        "targets": tokens[written[is_held]],
        "response_index": is_written.flatten().nonzero()[is_held, 0],
        "last_token_index": last_token_index[has_last],
        "last_row_index": has_last.nonzero()[:, 0],
        "token_rows": torch.zeros_like(tokens).index_copy(0, places, owners)[held],
    }
    if (choices := rows.fields.get("expert_choices")) is not None:
        whole = choices.new_zeros(len(tokens), choices.shape[1]).index_copy(0, places, choices)
        tensors["expert_choices"] = whole[held]
    if (returns := rows.fields.get("returns")) is not None:
        tensors["returns"] = returns[is_written][is_held]
    images: Sequence[Image] = ()
    if vision is not None:
        positions, slots, images = lay_out_images(rows, starts, vision, source)
        tensors |= {"mrope_positions": positions[:, held], "image_slots": slots[held]}
    on_device = {name: copied(tensor, device, is_pinned) for name, tensor in tensors.items()}
    return PackedBatch(rows=rows, lengths=lengths.tolist(), images=images, **on_device)


def _padded(lengths: Tensor, unit: int, multiple: int) -> Tensor:
    """Pad each length to a multiple of `unit` and add one that pads their sum to a multiple of unit x multiple."""
    padded = lengths + -lengths % unit
    padding = -int(padded.sum()) % (unit * multiple)
    return pad(padded, (0, 1), value=padding) if padding else padded


def chunk_numbers(size: int, rank: int) -> tuple[int, ...]:
    """Return the chunks of each sequence that a rank holds; without context parallelism a sequence is one chunk."""
    return (rank, 2 * size - 1 - rank) if size > 1 else (0,)


def granularity(size: int) -> int:
    """Return the number of chunks of a sequence, by which its length must divide."""
    return size * len(chunk_numbers(size, 0))


def held_positions(cu_seqlens: Tensor, size: int, rank: int) -> Tensor:
    """Return the positions, [T / size] int64, in the whole pack of the tokens that a rank holds, in its order.

    Args:
        cu_seqlens: [b + 1] boundaries of the whole sequences, all multiples of `granularity(size)`.
    """
    numbers = torch.tensor(chunk_numbers(size, rank), device=cu_seqlens.device)
    chunks = cu_seqlens.diff().long() // granularity(size)
    starts = (cu_seqlens[:-1, None] + numbers * chunks[:, None]).flatten()
    return positions_in(starts, chunks.repeat_interleave(len(numbers)))

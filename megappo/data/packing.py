"""Packing rows into one unpadded sequence for the models, and taking response-token values out of it again."""

from dataclasses import dataclass

import torch

from megappo.data.batch import Rows


@dataclass(frozen=True)
class Packed:
    """Rows laid end to end, as Megatron's "thd" format takes them.

    Attributes:
        rows: the rows packed here, b of them.
        input_ids: [1, T] int64, each row's prompt and response, then padding up to a multiple.
        position_ids: [1, T] int64, counting from 0 in every row.
        cu_seqlens: [b + 1] int32 row boundaries (one more where there is padding: it counts as a row of its own).
        max_seqlen: length of the longest of these.
        predictors: [N] int64 into T: the position that predicts response token i, rows in order (N = response tokens).
        last_tokens: [b] int64 into T: each row's last token.
    """

    rows: Rows
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    predictors: torch.Tensor
    last_tokens: torch.Tensor

    @property
    def targets(self) -> torch.Tensor:
        """[N] int64: the response tokens, in the order of `predictors`."""
        return self.input_ids[0, self.predictors + 1]

    def responses(self, flat: torch.Tensor) -> torch.Tensor:
        """[N] values at `predictors` as [b, R], 0 on padding; differentiable."""
        lengths = self.rows.response_lengths.to(flat.device)
        width = self.rows.max_response_length
        valid = torch.arange(width, device=flat.device) < lengths[:, None]
        return flat.new_zeros(valid.shape).masked_scatter(valid, flat)


def pack(rows: Rows, multiple: int, device: torch.device) -> Packed:
    """Pack rows, padding the end of the pack to `multiple` tokens (sequence parallelism needs it divisible)."""
    lengths = [len(tokens) for tokens in rows.input_ids]
    padding = -sum(lengths) % multiple
    sequences = [*rows.input_ids, *([torch.zeros(padding, dtype=torch.int64)] if padding else [])]
    lengths += [padding] if padding else []
    starts = torch.tensor([0, *lengths]).cumsum(0)
    predictors = [
        torch.arange(response) + start + prompt - 1
        for start, prompt, response in zip(
            starts.tolist(), rows.prompt_lengths.tolist(), rows.response_lengths.tolist(), strict=False
        )
    ]
    return Packed(
        rows=rows,
        input_ids=torch.cat(sequences)[None].to(device),
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None].to(device),
        cu_seqlens=starts.to(torch.int32).to(device),
        max_seqlen=max(lengths),
        predictors=torch.cat(predictors).to(device),
        last_tokens=(starts[1 : len(rows) + 1] - 1).to(device),
    )

"""Metrics of a critic's values beside the returns that they estimate: how much they explain, where, and how much they
are off.

Values are from before the step's update, of rollouts that the critic has not been trained on.
"""

import torch

from megappo.batch.rows import Rows
from megappo.ppo.reductions import Unreduced

NUM_PARTS = 4
"""Parts of a response, of equally many tokens, with metrics of their own."""


def value_metrics(rows: Rows) -> Unreduced:
    """Return this rank's parts of the metrics, by name; {} for rows without values and returns.

    Over the tokens with mask 1, values V, returns R and the score S of the token's response:
        vf_explained_var: 1 - variance of R - V / variance of R.
        vf_bias: mean of V - R.
        vf_slope: rise of R with V: 1 if calibrated, less where high and low values exaggerate.
        vf_separation: rise of V with S; of scores 0 and 1: mean V of good responses - mean V of bad ones.
        vf_part/<i>/{vf_explained_var,vf_bias,vf_separation}: the same in each of NUM_PARTS parts of the responses.
    """
    if not {"values", "returns"} <= rows.fields.keys():
        return {}
    mask = rows.response_mask.bool()
    values, returns = (rows.fields[name][mask].double() for name in ("values", "returns"))
    scores = rows.fields["scores"].double()[:, None].expand_as(mask)[mask]
    metrics = _of_tokens(values, returns, scores)
    metrics["vf_slope"] = (torch.stack([values, returns]), "slope")
    parts = response_parts(rows.response_mask)[mask]
    for part in range(NUM_PARTS):
        of_part = _of_tokens(*(numbers[parts == part] for numbers in (values, returns, scores)))
        metrics |= {f"vf_part/{part}/{name}": numbers for name, numbers in of_part.items()}
    return metrics


def _of_tokens(values: torch.Tensor, returns: torch.Tensor, scores: torch.Tensor) -> Unreduced:
    return {
        "vf_explained_var": (torch.stack([values, returns]), "explained_variance"),
        "vf_bias": (values - returns, "mean"),
        "vf_separation": (torch.stack([scores, values]), "slope"),
    }


def response_parts(mask: torch.Tensor) -> torch.Tensor:
    """Return the part of its response in which each token with mask 1 is, [B, R] of 0 to NUM_PARTS - 1.

    The first token is in the first part, the last one in the last part, unless it is the only one.

    Args:
        mask: [B, R], 1 on tokens of the policy.
    """
    place = mask.cumsum(dim=1) - 1
    last = (mask.sum(dim=1, keepdim=True) - 1).clamp(min=1)
    return (NUM_PARTS * place / last).long().clamp(0, NUM_PARTS - 1)

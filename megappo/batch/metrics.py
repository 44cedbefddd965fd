"""What is told of a step's rows, by name. Torch-free to import, so that anybody can add to it at any time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megappo.table import Table

RowValues = Callable[[Any], Any]
"""Of `Rows`: a tensor [n], of any length, or [n, K]; None where the run has no such values."""
SPREAD = ("mean", "max", "min")


@dataclass(frozen=True)
class RowMetric:
    """A metric of the rows of a step.

    Attributes:
        values: of this rank's rows.
        reductions: the metrics are `<name>/<reduction>`; a single reduction without a name: the metric is `<name>`.
            Of [n, K] values each column has its own, `<name>/<column>` in the place of `<name>`.
    """

    values: RowValues
    reductions: tuple[str, ...] | str = SPREAD


def of_rows(field: str) -> RowValues:
    """A field with one number per row, or several; of the rows of an episode, in which it is the same, one."""
    return lambda rows: _once(rows, rows.fields[field]) if field in rows.fields else None


def _once(rows: Any, values: Any) -> Any:
    """Of each episode once."""
    return values[rows.fields["segments"] == 0] if "segments" in rows.fields else values


def of_tokens(field: str) -> RowValues:
    """A field with one number per response token, at those with mask 1."""
    return lambda rows: rows.fields[field][rows.response_mask.bool()] if field in rows.fields else None


def log_prob_diff(rows: Any) -> Any:
    """How far trainer and engine are apart about each token that the policy wrote; None without a trainer."""
    if "old_log_probs" not in rows.fields:
        return None
    return (rows.fields["old_log_probs"] - rows.fields["rollout_log_probs"]).abs()[rows.response_mask.bool()]


ROW_METRICS = Table(
    "metric",
    {
        "reward/score": RowMetric(of_rows("scores")),
        "reward/score_component": RowMetric(of_rows("score_components")),
        "reward/loss_weight": RowMetric(of_rows("loss_weights")),
        "reward/shaped": RowMetric(of_rows("shaped_scores")),
        "reward/baseline": RowMetric(of_rows("baselines")),
        "reward/kl_penalty": RowMetric(of_tokens("kl_penalty")),
        "rollout/response_length": RowMetric(lambda rows: rows.response_lengths.float()),
        "rollout/truncated_frac": RowMetric(of_rows("truncated"), "mean"),
        "rollout/masked_frac": RowMetric(lambda rows: ~rows.response_mask.bool().any(dim=1), "mean"),
        "rollout/log_prob_diff": RowMetric(log_prob_diff),
        "advantages": RowMetric(of_tokens("advantages"), (*SPREAD, "histogram")),
        "advantages/clipped": RowMetric(of_tokens("clipped_advantages")),
        "returns": RowMetric(of_tokens("returns")),
        "values": RowMetric(of_tokens("values")),
    },
)
"""By name: the metrics of a step's rows with their advantages."""

"""Metrics of a step's rows. Torch-free to import, so that extensions can register theirs at any time."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megappo.table import Table

RowValues = Callable[[Any], Any]
"""Maps `Rows` to a tensor [n] of any length or [n, K]; None where the run has no such values."""
SPREAD = ("mean", "max", "min")
HISTOGRAM = "histogram"
"""A reduction that is made in some steps only, for its size."""
LOOP_TOKENS, GRAM_SIZE = 256, 4
"""Last tokens of a response that are searched for a loop, and tokens of the n-grams that repeat in it."""


@dataclass(frozen=True)
class RowMetric:
    """A metric of the rows of a step.

    Attributes:
        values: computes them from this rank's rows.
        reductions: the metrics are `<name>/<reduction>`; given as a string, the metric is `<name>`. For [n, K] values
            each column has its own metrics, `<name>/<column>` instead of `<name>`.
    """

    values: RowValues
    reductions: tuple[str, ...] | str = SPREAD


def of_rows(field: str) -> RowValues:
    """Return the values of a field with one or several numbers per row; once per episode, whose rows all have them."""

    def values(rows: Any) -> Any:
        found = rows.fields.get(field)
        if found is None or "segments" not in rows.fields:
            return found
        return found[rows.fields["segments"] == 0]

    return values


def of_tokens(field: str) -> RowValues:
    """Return the values of a field with one number per response token, at tokens with mask 1."""
    return lambda rows: rows.fields[field][rows.response_mask.bool()] if field in rows.fields else None


def taught_kl(rows: Any) -> Any:
    """Return the KL to its teacher of each token that the policy wrote in a row that has one; None without any."""
    if "distillation_kl" not in rows.fields:
        return None
    return rows.fields["distillation_kl"][rows.response_mask * rows.fields["teacher"][:, None] > 0]


def log_prob_diff(rows: Any) -> Any:
    """Return |old_log_probs - rollout_log_probs| of each token that the policy wrote; None without a trainer or
    any token to compare.

    Where the engines sample ahead of training, only rows count that were written wholly by the weights of the step.
    """
    if "old_log_probs" not in rows.fields:
        return None
    compared = rows.response_mask.bool()
    if "staleness" in rows.fields:
        compared = compared & ~rows.fields["staleness"].any(dim=1, keepdim=True)
    if not compared.any():
        return None
    return (rows.fields["old_log_probs"] - rows.fields["rollout_log_probs"]).abs()[compared]


def value_errors(rows: Any) -> Any:
    """Return values - returns of each token that the policy wrote; None without the two."""
    if not {"values", "returns"} <= rows.fields.keys():
        return None
    return of_tokens("values")(rows) - of_tokens("returns")(rows)


def oldest_tokens(rows: Any) -> Any:
    """Return the staleness of the oldest token of each row, [n]."""
    return rows.fields["staleness"].amax(dim=1) if "staleness" in rows.fields else None


def mixed_versions(rows: Any) -> Any:
    """Return 1 for each row that weights of several versions wrote, else 0, [n]."""
    if "staleness" not in rows.fields:
        return None
    is_policy = rows.response_mask.bool()
    ages = rows.fields["staleness"]
    newest = ages.masked_fill(~is_policy, math.inf)
    oldest = ages.masked_fill(~is_policy, -math.inf)
    return (newest.amin(dim=1) < oldest.amax(dim=1)).float()


def equal_groups(rows: Any) -> Any:
    """Return 1 for each prompt whose responses all have the same score, else 0, [n]; None where each has one."""
    is_first = rows.fields["segments"] == 0 if "segments" in rows.fields else slice(None)
    scores = rows.fields["scores"][is_first]
    prompts, group = rows.prompt_ids[is_first].unique(return_inverse=True)
    if len(prompts) == len(scores):
        return None
    highest, lowest = (
        scores.new_zeros(len(prompts)).scatter_reduce(0, group, scores, kind, include_self=False)
        for kind in ("amax", "amin")
    )
    return (highest == lowest).float()


def repeats(rows: Any) -> Any:
    """Return 1 for each response that ends in a loop, else 0, [n]; None where the tokens are on other ranks.

    It does if most of the n-grams among its last LOOP_TOKENS tokens are there more than once. N-grams with a token of
    an environment do not count.

    Source: Welleck et al. 2020, Neural Text Generation with Unlikelihood Training, section 6 (seq-rep-4).
    """
    if not len(rows.input_ids):
        return None
    found = []
    turns = rows.fields.get("turns")
    for row, (tokens, length) in enumerate(zip(rows.sequences, rows.response_lengths.tolist(), strict=True)):
        start = max(0, length - LOOP_TOKENS)
        response = tokens[len(tokens) - length + start :].tolist()
        if turns is not None:
            is_own = turns[row, start:length].tolist()
            response = [token if own else None for token, own in zip(response, is_own, strict=True)]
        grams = list(zip(*(response[offset:] for offset in range(GRAM_SIZE)), strict=False))
        own_grams = [gram for gram in grams if None not in gram]
        found.append(len(set(own_grams)) < len(own_grams) / 2)
    return rows.response_lengths.new_tensor(found)


ROW_METRICS = Table(
    "metric",
    {
        "reward/score": RowMetric(of_rows("scores"), (*SPREAD, "std", HISTOGRAM)),
        "reward/equal_groups_frac": RowMetric(equal_groups, "mean"),
        "reward/score_component": RowMetric(of_rows("score_components")),
        "reward/model": RowMetric(of_rows("reward_model_scores"), (*SPREAD, "std")),
        "reward/loss_weight": RowMetric(of_rows("loss_weights")),
        "reward/shaped": RowMetric(of_rows("shaped_scores")),
        "reward/baseline": RowMetric(of_rows("baselines")),
        "reward/kl_penalty": RowMetric(of_tokens("kl_penalty")),
        "distillation/kl": RowMetric(taught_kl, (*SPREAD, HISTOGRAM)),
        "rollout/response_length": RowMetric(lambda rows: rows.response_lengths.float(), (*SPREAD, HISTOGRAM)),
        "rollout/truncated_frac": RowMetric(of_rows("truncated"), "mean"),
        "rollout/repetition_frac": RowMetric(repeats, "mean"),
        "rollout/masked_frac": RowMetric(lambda rows: ~rows.response_mask.bool().any(dim=1), "mean"),
        "rollout/staleness": RowMetric(of_tokens("staleness"), ("mean", "max", HISTOGRAM)),
        "rollout/response_staleness": RowMetric(oldest_tokens, ("mean", "max", HISTOGRAM)),
        "rollout/mixed_versions_frac": RowMetric(mixed_versions, "mean"),
        "advantages": RowMetric(of_tokens("advantages"), (*SPREAD, HISTOGRAM)),
        "advantages/clipped": RowMetric(of_tokens("clipped_advantages")),
        "returns": RowMetric(of_tokens("returns"), (*SPREAD, HISTOGRAM)),
        "values": RowMetric(of_tokens("values"), (*SPREAD, HISTOGRAM)),
        "critic/vf_error": RowMetric(value_errors, (HISTOGRAM,)),
        "critic/ensemble_std": RowMetric(of_tokens("value_std"), (*SPREAD, HISTOGRAM)),
        "critic/agreed_frac": RowMetric(of_tokens("agreed"), "mean"),
        "critic/disputed_frac": RowMetric(of_tokens("disputed"), "mean"),
    },
)
"""Name -> metric of a step's rows with their advantages."""

"""Metrics of a critic's values beside the returns that they estimate: how much they explain, where, and how much they
are off; and the gate that ends the run of a critic that explains enough.

Values are from before the step's update, of rollouts that the critic has not been trained on.
"""

import math
from collections.abc import Sequence

import torch

from megappo.batch.exchange import Exchange
from megappo.batch.rows import Rows
from megappo.config.schema import Gate
from megappo.ppo.reductions import Unreduced
from megappo.trainer.statistics import over_ranks

NUM_PARTS = 4
"""Parts of a response, of equally many tokens, with metrics of their own."""
NUM_TENTHS = 10
"""Parts of the range of the values in which values and returns are compared."""
NUM_TURNS = 8
"""Turns of episodes with metrics of their own; later turns count as the last one of these."""


def value_metrics(rows: Rows) -> Unreduced:
    """Return this rank's parts of the metrics, by name; {} for rows without values and returns.

    Over the tokens with mask 1, values V, returns R and the score S of the token's response:
        vf_explained_var: 1 - variance of R - V / variance of R.
        vf_bias: mean of V - R.
        vf_slope: rise of R with V: 1 if calibrated, less where high and low values exaggerate.
        vf_separation: rise of V with S; of scores 0 and 1: mean V of good responses - mean V of bad ones.
        vf_part/<i>/{vf_explained_var,vf_bias,vf_separation}: the same in each of NUM_PARTS parts of the responses.
        vf_turn/<i>/{vf_explained_var,vf_bias,vf_separation}: the same in each turn of the episodes that there is.
    """
    if not {"values", "returns"} <= rows.fields.keys():
        return {}
    mask = rows.response_mask.bool()
    values, returns = (rows.fields[name][mask].double() for name in ("values", "returns"))
    scores = rows.fields["scores"].double()[:, None].expand_as(mask)[mask]
    metrics = _of_tokens(values, returns, scores)
    metrics["vf_slope"] = (torch.stack([values, returns]), "slope")
    parts = response_parts(rows.response_mask)[mask]
    places = {f"vf_part/{part}": parts == part for part in range(NUM_PARTS)}
    for place, is_in in (places | _turns(rows, mask)).items():
        of_place = _of_tokens(*(numbers[is_in] for numbers in (values, returns, scores)))
        metrics |= {f"{place}/{name}": numbers for name, numbers in of_place.items()}
    return metrics


def calibration(exchange: Exchange, rows: Rows) -> Unreduced:
    """Return this rank's parts of `vf_tenth/<i>/{predicted,observed}`, by name; {} for rows without values and returns.

    They are the mean value and the mean return of the tokens with mask 1 whose value is in the i-th of NUM_TENTHS equal
    parts of the range of all values; `vf_turn/<i>/{predicted,observed}` are the same of the tokens of a turn. All ranks
    call it together.
    """
    if not {"values", "returns"} <= rows.fields.keys():
        return {}
    mask = rows.response_mask.bool()
    values, returns = (rows.fields[name][mask].double() for name in ("values", "returns"))
    bounds = over_ranks(exchange, {"low": (values, "min"), "high": (values, "max")})
    width = (bounds["high"] - bounds["low"]) or 1.0
    tenths = ((values - bounds["low"]) / width * NUM_TENTHS).long().clamp(max=NUM_TENTHS - 1)
    metrics: Unreduced = {}
    places = {f"vf_tenth/{tenth}": tenths == tenth for tenth in range(NUM_TENTHS)}
    for place, is_in in (places | _turns(rows, mask)).items():
        metrics[f"{place}/predicted"] = (values[is_in], "mean")
        metrics[f"{place}/observed"] = (returns[is_in], "mean")
    return metrics


def _turns(rows: Rows, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return which tokens with mask 1 are in each turn of this rank's episodes; turns after NUM_TURNS count as that."""
    if "turns" not in rows.fields:
        return {}
    turns = rows.fields["turns"][mask].long().clamp(max=NUM_TURNS)
    return {f"vf_turn/{turn}": turns == turn for turn in turns.unique().tolist()}


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


class GateProgress:
    """Explained variance of a run's evaluations, and whether it is what critic.gate requires.

    Args:
        gate: None in a run without a gate, which it never ends.
    """

    def __init__(self, gate: Gate | None = None):
        self._gate = gate
        self._found: list[tuple[int, float, float]] = []  # step; explained variance, of all tokens and of the last ones

    @property
    def is_set(self) -> bool:
        """True if the run has a gate."""
        return self._gate is not None

    @property
    def ends_run(self) -> bool:
        """True if the last evaluation reached the gate, or critic.gate.patience is used up."""
        return self._is_reached or self._is_exhausted

    def note(self, step: int, explained: float, explained_at_end: float) -> None:
        """Add an evaluation: the explained variance over all tokens, and in the last part of the responses."""
        self._found.append((step, explained, explained_at_end))

    @property
    def _is_reached(self) -> bool:
        return self._gate is not None and bool(self._found) and self._found[-1][1] >= self._gate.explained_variance

    @property
    def _is_exhausted(self) -> bool:
        if self._gate is None or self._gate.patience is None or not self._found:
            return False
        return len(self._found) - 1 - self._found.index(self._best) >= self._gate.patience

    @property
    def _best(self) -> tuple[int, float, float]:
        return max(self._found, key=lambda found: or_lowest(found[1:]))

    def describe(self) -> str:
        """Return a line: the gate was reached, or why it was not and what to change."""
        required = "critic.gate" if self._gate is None else f"critic.gate {self._gate.explained_variance:g}"
        if not self._found:
            return f"{required} was not checked: the run had no evaluation"
        if self._is_reached:
            step, explained, _ = self._found[-1]
            return f"{required} is reached: at step {step} the critic explains {explained:.3f} of the held-out variance"
        step, explained, at_end = self._best
        found = f"{required} is not reached: the critic explains at most {explained:.3f} of the held-out variance"
        if math.isnan(explained):
            return f"{found}: the returns of the held-out rollouts do not vary, or there are too few of them"
        if self._best is self._found[-1]:
            return f"{found}, at step {step}, and was still rising: raise trainer.total_steps"
        since = f"{found}, at step {step}, and {len(self._found) - 1 - self._found.index(self._best)} evaluations since"
        if self._gate is not None and at_end >= self._gate.explained_variance:
            return (
                f"{since} were no better. In the last part of the responses it explains {at_end:.3f}, so that the "
                "outcome is open before: lower the gate, or raise rollout.n"
            )
        return (
            f"{since} were no better: lower critic.optim.lr if critic/vf_explained_var of the training rollouts is "
            "higher, else raise it, or name a larger critic.model_path"
        )


def or_lowest(explained: Sequence[float]) -> float:
    """Return the first number, or, if there is none, one that is below all."""
    return -math.inf if math.isnan(explained[0]) else explained[0]

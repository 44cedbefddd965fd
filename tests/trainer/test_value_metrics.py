"""Metrics of a critic beside plain loops over all tokens of two ranks, and the gate that ends a critic's run."""

import math
import statistics

import pytest
import torch
import torch.distributed as dist
from spawn import run_ranks

from megappo.batch.exchange import Exchange
from megappo.batch.rows import NO_TOKENS, Rows
from megappo.config.schema import Gate
from megappo.trainer.statistics import over_ranks
from megappo.trainer.value_metrics import GateProgress, calibration, response_parts, value_metrics

MASKS = ("1111111", "1", "11011", "1111", "111")
TURNS = ("1112228", "1", "11022", "1299", "111")
"""Turn of each token; 9 counts as 8, the last one with metrics of its own."""
PARTS = {7: [0, 0, 1, 2, 2, 3, 3], 1: [0], 4: [0, 1, 2, 3], 3: [0, 2, 3]}
"""Tokens of a response -> the part that each of them is in."""


def make_rows() -> Rows:
    generator = torch.Generator().manual_seed(5)
    mask = torch.tensor([[float(token) for token in written.ljust(7, "0")] for written in MASKS])
    fields = {name: torch.randn(5, 7, generator=generator) + 50 * (1 - mask) for name in ("values", "returns")}
    fields |= {"response_mask": mask, "scores": torch.randn(5, generator=generator)}
    fields["turns"] = torch.tensor([[int(turn) for turn in turns.ljust(7, "0")] for turns in TURNS]).float()
    ids, lengths = torch.arange(5), torch.tensor(list(map(len, MASKS)))
    return Rows(ids, ids, torch.ones_like(ids), lengths, NO_TOKENS, fields)


def tokens_of(rows: Rows) -> list[tuple[int, float, float, float, int]]:
    """Return part, value, return, score and turn of each token with mask 1."""
    found = []
    for row, written in enumerate(MASKS):
        places = [place for place, token in enumerate(written) if token == "1"]
        for part, place in zip(PARTS[len(places)], places, strict=True):
            numbers = (float(rows.fields[name][row, place]) for name in ("values", "returns"))
            turn = min(int(TURNS[row][place]), 8)
            found.append((part, *numbers, float(rows.fields["scores"][row]), turn))
    return found


def slope(x: list[float], y: list[float]) -> float:
    return statistics.covariance(x, y) / statistics.variance(x)


def plain(tokens: list[tuple[int, float, float, float, int]]) -> dict[str, float]:
    _, values, returns, scores, _ = map(list, zip(*tokens, strict=True))
    errors = [value - target for value, target in zip(values, returns, strict=True)]
    return {
        "vf_explained_var": 1 - statistics.variance(errors) / (statistics.variance(returns) + 1e-5),
        "vf_bias": statistics.fmean(errors),
        "vf_separation": slope(scores, values),
    }


def check(rank: int, world_size: int) -> None:
    rows = make_rows()
    tokens = tokens_of(rows)
    expected = plain(tokens)
    expected["vf_slope"] = slope([token[1] for token in tokens], [token[2] for token in tokens])
    for part in range(4):
        of_part = plain([token for token in tokens if token[0] == part])
        expected |= {f"vf_part/{part}/{name}": number for name, number in of_part.items()}
    turns = {turn: [token for token in tokens if token[4] == turn] for turn in (1, 2, 8)}
    for turn, of_turn in turns.items():
        expected |= {f"vf_turn/{turn}/{name}": number for name, number in plain(of_turn).items()}
    exchange = Exchange(dist.group.WORLD)
    found = over_ranks(exchange, value_metrics(rows.select([[0, 1, 2, 3], [4]][rank])))
    assert found == pytest.approx(expected, rel=1e-6)
    low, high = min(token[1] for token in tokens), max(token[1] for token in tokens)
    tenths: dict[int, list[tuple[float, float]]] = {}
    for _, value, target, _, _ in tokens:
        tenth = min(int(10 * (value - low) / (high - low)), 9)
        tenths.setdefault(tenth, []).append((value, target))
    of_tenths = over_ranks(exchange, calibration(exchange, rows.select([[0, 1, 2, 3], [4]][rank])))
    for tenth in range(10):
        names = [f"vf_tenth/{tenth}/{kind}" for kind in ("predicted", "observed")]
        if tenth not in tenths:
            assert all(math.isnan(of_tenths[name]) for name in names)
            continue
        means = map(statistics.fmean, zip(*tenths[tenth], strict=True))
        assert [of_tenths[name] for name in names] == pytest.approx(list(means))
    for turn, of_turn in turns.items():
        names = [f"vf_turn/{turn}/{kind}" for kind in ("predicted", "observed")]
        means = [statistics.fmean(token[column] for token in of_turn) for column in (1, 2)]
        assert [of_tenths[name] for name in names] == pytest.approx(means)
    constant = make_rows()
    constant.fields["values"].fill_(3.0)
    flat = over_ranks(exchange, value_metrics(constant.select([[0, 1, 2, 3], [4]][rank])))
    assert flat["vf_explained_var"] == pytest.approx(0.0, abs=1e-4) and math.isnan(flat["vf_slope"])
    assert flat["vf_separation"] == pytest.approx(0.0)


def test_metrics_are_those_of_all_tokens_of_all_ranks() -> None:
    run_ranks(2, check)


def test_the_first_token_is_in_the_first_part_and_the_last_in_the_last() -> None:
    for length, parts in PARTS.items():
        assert response_parts(torch.ones(1, length)).tolist() == [parts]


RISING = [(0, -0.1, 0.0), (10, 0.2, 0.3), (20, 0.4, 0.5)]


@pytest.mark.parametrize(
    ("patience", "found", "ends", "message"),
    [
        (None, [*RISING, (30, 0.61, 0.9)], True, "critic.gate 0.6 is reached: at step 30 the critic explains 0.610"),
        (2, RISING, False, "explains at most 0.400 of the held-out variance, at step 20, and was still rising: raise"),
        (2, [*RISING, (30, 0.3, 0.4)], False, "at step 20, and 1 evaluations since were no better: lower critic.optim"),
        (2, [*RISING, (30, 0.3, 0.4), (40, math.nan, 0.4)], True, "at step 20, and 2 evaluations since were no better"),
        (1, [(0, 0.5, 0.9), (10, 0.4, 0.95)], True, "In the last part of the responses it explains 0.900, so that"),
        (None, [(0, math.nan, math.nan)], False, "the returns of the held-out rollouts do not vary, or there are too"),
        (None, [], False, "critic.gate 0.6 was not checked: the run had no evaluation"),
    ],
)
def test_a_gate_ends_a_run_or_names_the_reason_why_it_was_missed(patience, found, ends, message) -> None:
    gate = GateProgress(Gate(explained_variance=0.6, patience=patience))
    for step, explained, at_end in found:
        gate.note(step, explained, at_end)
    assert gate.ends_run == ends
    assert message in gate.describe()

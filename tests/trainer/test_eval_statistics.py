"""Estimates for k of n responses to a prompt, against all choices of k, one by one."""

import itertools
import math
import random
import statistics
from collections import Counter

import pytest
import torch

from megappo.observe.metrics import Metric
from megappo.trainer.evaluation import best_at, majority_at, pass_at, prompt_statistics, subset_sizes

N = 7


def scores_of(seed: int, *, graded: bool) -> list[float]:
    draw = random.Random(seed)
    return [float(draw.random() < 0.4) if graded else draw.gauss(0, 2) for _ in range(N)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("k", range(1, N + 1))
def test_pass_and_best_and_worst_are_means_over_all_choices(seed, k):
    scores, right = scores_of(seed, graded=False), scores_of(seed, graded=True)
    choices = list(itertools.combinations(range(N), k))
    assert best_at(k, scores) == pytest.approx(statistics.fmean(max(scores[i] for i in chosen) for chosen in choices))
    passed = statistics.fmean(any(right[i] for i in chosen) for chosen in choices)
    assert pass_at(k, N, int(sum(right))) == pytest.approx(passed) == pytest.approx(best_at(k, right))
    if k in subset_sizes(N):
        worst = statistics.fmean(min(scores[i] for i in chosen) for chosen in choices)
        assert prompt_statistics(scores, [None] * N, 1.0)[f"worst@{k}"] == pytest.approx(worst)


def test_pass_at_k_is_the_published_product():
    for n, c, k in itertools.product([10, 200], [0, 1, 9], [1, 5, 10]):  # Chen et al. 2021, figure 3
        product = 1.0
        for i in range(n - c + 1, n + 1) if n - c >= k else ():
            product *= 1.0 - k / i
        assert pass_at(k, n, c) == pytest.approx(1.0 - product if n - c >= k else 1.0)


@pytest.mark.parametrize(
    ("answers", "scores", "expected"),
    [
        ("aab", [1, 1, 0], 1),
        ("abb", [1, 0, 0], 0),
        ("ab", [1, 0], 0.5),  # a draw
        ("aabbc", [1, 0, 0, 0, 1], 0.25),  # a draw of two, one of which is right half the time
        ("-a-", [0, 1, 0], 1),  # who answers nothing has no vote
        ("---", [0, 1, 0], 1 / 3),
    ],
)
def test_the_majority_answers(answers, scores, expected):
    given = [None if answer == "-" else answer for answer in answers]
    assert majority_at(len(scores), scores, given) == pytest.approx(expected)


def test_a_smaller_majority_is_of_groups_in_order():
    answers, scores = "aabbabb", [1, 1, 0, 0, 1, 0, 0]
    groups = [(answers[i : i + 3], scores[i : i + 3]) for i in (0, 3)]
    expected = [
        statistics.fmean(s for a, s in zip(*group, strict=True) if a == Counter(group[0]).most_common(1)[0][0])
        for group in groups
    ]
    assert majority_at(3, scores, list(answers)) == statistics.fmean(expected) == 0.5


def test_which_numbers_there_are():
    assert list(prompt_statistics([1.0], ["x"], 1.0)) == ["mean@1", "pass@1"]
    assert subset_sizes(6) == [2, 4, 6] and subset_sizes(8) == [2, 4, 8] and subset_sizes(2) == [2]
    kinds = ("pass", "best", "worst", "maj")
    names = {"mean@6", "pass@1", *(f"{kind}@{k}" for kind in kinds for k in (2, 4, 6))}
    assert set(prompt_statistics([1.0] * 6, ["x"] * 6, 1.0)) == names
    found = prompt_statistics([0.5, 1.0, 0.0, 0.0], [None] * 4, pass_threshold=0.5)
    assert found["mean@4"] == 0.375 and found["pass@1"] == 0.5 and found["pass@2"] == pytest.approx(5 / 6)


@pytest.mark.parametrize("cuts", [(5,), (0, 3, 3, 10), (1, 2, 3, 4)])
def test_the_interval_is_of_all_values_wherever_they_are(cuts):
    values = torch.tensor([0.1, 0.7, 0.4, 1e6, -3.0, 0.0, 0.25, 0.5, 0.5, 2.0, 1.0], dtype=torch.float64)
    parts = [Metric.of(part, "ci95") for part in torch.tensor_split(values, cuts)]
    error = statistics.stdev(values.tolist()) / math.sqrt(len(values))
    assert Metric.merged(parts).value == pytest.approx(statistics.NormalDist(0, error).inv_cdf(0.975), rel=1e-12)


def test_the_interval_covers_the_truth_as_often_as_it_claims():
    """Prompts that differ, with several responses each: those to a prompt are not independent."""
    torch.manual_seed(0)
    covered = []
    for _ in range(1000):
        difficulty = torch.rand(100, 1, dtype=torch.float64)
        of_prompts = (torch.rand(100, 8, dtype=torch.float64) < difficulty).double().mean(1)
        covered.append(abs(float(of_prompts.mean()) - 0.5) < Metric.of(of_prompts, "ci95").value)
    assert 0.93 < statistics.fmean(covered) < 0.97

"""Shaping of scores against loops in Python floats, hand-computed numbers, and over real ranks."""

import json
import math
import statistics

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from policy_oracles import numbers_of
from ragged import CASES
from spawn import run_ranks

from megappo.batch.exchange import Exchange
from megappo.config.methods import LENGTH_PENALTIES
from megappo.config.schema import Reward
from megappo.observe.metrics import Metric, reduce_ranks
from megappo.ppo.reward_shaping import RunningMoments, normalize_scores, overlong_penalty, shape_scores

SCORES = st.floats(-5.0, 5.0, width=32)
BATCHES = st.lists(SCORES, min_size=1, max_size=12)
MAX_LENGTH = 100


def loop_normalized(scores, population):
    """(score - mean) / (std + 1e-6) with the population's mean and std (ddof 1)."""
    mean = math.fsum(population) / len(population)
    std = statistics.stdev(population) if len(population) > 1 else 0.0
    return [(score - mean) / (std + 1e-6) for score in scores]


def loop_penalty(kind, length, buffer, factor):
    if kind == "none":
        return 0.0
    if kind == "linear":
        return -factor * length / MAX_LENGTH
    if length <= MAX_LENGTH - buffer:
        return 0.0
    if length <= MAX_LENGTH:
        return factor * ((MAX_LENGTH - buffer) - length) / buffer
    return -factor


@st.composite
def responses(draw):
    """Scores, lengths and prompts of a batch, at least two responses to each prompt, in any order."""
    sizes = draw(st.lists(st.integers(2, 4), min_size=1, max_size=4))
    groups = draw(st.permutations([7 * prompt for prompt, size in enumerate(sizes) for _ in range(size)]))
    scores = draw(st.lists(SCORES, min_size=len(groups), max_size=len(groups)))
    lengths = draw(st.lists(st.integers(1, 120), min_size=len(groups), max_size=len(groups)))
    return torch.tensor(scores), torch.tensor(lengths), torch.tensor(groups)


REWARDS = st.builds(
    Reward,
    scale=st.floats(0.01, 3.0),
    clip=st.none() | st.floats(0.5, 5.0),
    normalize=st.sampled_from(["none", "running", "batch", "group"]),
    length_penalty=st.sampled_from(["none", "overlong", "linear"]),
    overlong_buffer=st.integers(1, MAX_LENGTH),
    length_penalty_factor=st.floats(0.0, 2.0),
)


@CASES
@given(responses(), REWARDS, BATCHES)
def test_shape_scores_equals_the_loop(batch, config, earlier):
    scores, lengths, groups = batch
    running = RunningMoments()
    running.update(torch.tensor(earlier))
    shaped, metrics = shape_scores(scores, lengths, groups, config, running, max_response_length=MAX_LENGTH)

    scaled = (scores * config.scale).tolist()
    limit = torch.tensor(config.clip or math.inf).item()  # in the precision of the scores
    clipped = [min(max(score, -limit), limit) for score in scaled]
    expected = clipped
    if config.normalize == "batch":
        expected = loop_normalized(clipped, clipped)
    if config.normalize == "running":
        expected = loop_normalized(clipped, earlier + clipped)
    if config.normalize == "group":
        pairs = list(zip(clipped, groups.tolist(), strict=True))
        expected = [loop_normalized([x], [y for y, other in pairs if other == g])[0] for x, g in pairs]
    factor, buffer = config.length_penalty_factor, config.overlong_buffer
    penalties = [loop_penalty(config.length_penalty, n, buffer, factor) for n in lengths.tolist()]
    torch.testing.assert_close(
        shaped, torch.tensor([x + p for x, p in zip(expected, penalties, strict=True)]), rtol=1e-5, atol=1e-6
    )
    assert numbers_of(metrics) == pytest.approx(
        {
            "reward/length_penalty": statistics.fmean(penalties),
            "reward/clipped_frac": statistics.fmean([abs(x) > limit for x in scaled]),
        },
        rel=1e-6,
        abs=1e-9,
    )
    assert running.count == len(earlier) + (len(scores) if config.normalize == "running" else 0)


def test_overlong_penalty_is_dapos_equation_13():
    lengths = torch.tensor([1, 80, 81, 90, 100, 130])
    expected = torch.tensor([0.0, 0.0, -0.05, -0.5, -1.0, -1.0])
    for factor in (1.0, 0.5):
        config = Reward(overlong_buffer=20, length_penalty_factor=factor)
        torch.testing.assert_close(overlong_penalty(lengths, 100, config), factor * expected)


def test_every_length_penalty_has_one_signature():
    lengths = torch.tensor([50, 100])
    config = Reward(overlong_buffer=50, length_penalty_factor=2.0)
    penalties = {name: one.function(lengths, 100, config).tolist() for name, one in LENGTH_PENALTIES.items()}
    assert penalties == {"none": [0.0, 0.0], "overlong": [0.0, -2.0], "linear": [-1.0, -2.0]}


def test_hand_computed_normalisations():
    scores, groups = torch.tensor([0.0, 1.0, 4.0, 8.0]), torch.tensor([3, 3, 5, 5])
    root = math.sqrt(0.5)
    group = normalize_scores(scores, groups, "group", RunningMoments())
    torch.testing.assert_close(group, torch.tensor([-root, root, -root, root]), rtol=1e-5, atol=0)
    batch = normalize_scores(torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3), "batch", RunningMoments())
    torch.testing.assert_close(batch, torch.tensor([-1.0, 0.0, 1.0]), rtol=1e-5, atol=0)
    running = RunningMoments()
    running.update(torch.tensor([1.0, 2.0]))
    shifted = normalize_scores(torch.tensor([3.0]), torch.zeros(1), "running", running)
    torch.testing.assert_close(shifted, torch.tensor([1.0]), rtol=1e-5, atol=0)
    assert (running.count, running.mean, running.std) == (3.0, 2.0, 1.0)


def test_scale_comes_before_clip_and_the_length_penalty_last():
    config = Reward(scale=2.0, clip=3.0, normalize="group", length_penalty="linear")
    scores, lengths = torch.tensor([1.0, 2.0]), torch.tensor([100, 50])
    shaped, metrics = shape_scores(
        scores, lengths, torch.zeros(2), config, RunningMoments(), max_response_length=MAX_LENGTH
    )
    root = math.sqrt(0.5)
    torch.testing.assert_close(shaped, torch.tensor([-root - 1.0, root - 0.5]), rtol=1e-5, atol=0)
    assert numbers_of(metrics) == {"reward/length_penalty": -0.75, "reward/clipped_frac": 0.5}


@CASES
@given(st.lists(BATCHES, min_size=1, max_size=5), st.integers(0, 4))
def test_running_moments_equal_those_of_everything_seen_also_after_a_checkpoint(batches, restart):
    moments = RunningMoments()
    for step, batch in enumerate(batches):
        if step == restart:
            state = json.loads(json.dumps(moments.state_dict()))
            moments = RunningMoments()
            moments.load_state_dict(state)
        moments.update(torch.tensor(batch))
    everything = [score for batch in batches for score in batch]
    assert moments.count == len(everything)
    assert moments.mean == pytest.approx(statistics.fmean(everything), rel=1e-9, abs=1e-9)
    deviation = statistics.stdev(everything) if len(everything) > 1 else 0.0
    assert moments.std == pytest.approx(deviation, rel=1e-6, abs=1e-7)


@CASES
@given(SCORES, st.integers(1, 9), st.sampled_from(["running", "batch", "group"]), st.floats(0.01, 3.0))
def test_equal_scores_become_exactly_0(score, count, normalize, scale):
    count = max(count, 2) if normalize == "group" else count
    config, running = Reward(normalize=normalize, scale=scale), RunningMoments()
    for _ in range(2):
        shaped, _ = shape_scores(
            torch.full((count,), score),
            torch.ones(count),
            torch.zeros(count),
            config,
            running,
            max_response_length=MAX_LENGTH,
        )
        assert shaped.tolist() == [0.0] * count


def shaped(scores, **config):
    scores = torch.tensor(scores)
    lengths, groups = torch.full(scores.shape, 5), torch.arange(len(scores)) // 2
    return shape_scores(scores, lengths, groups, Reward(**config), RunningMoments(), max_response_length=MAX_LENGTH)


def test_bad_input_is_named():
    with pytest.raises(FloatingPointError, match=r"scores of responses \[1, 3\] are not finite"):
        shaped([0.0, math.nan, 1.0, math.inf])
    with pytest.raises(ValueError, match=r"groups \[1\] have one response only.*rollout\.n >= 2"):
        shaped([0.0, 1.0, 2.0], normalize="group")


def test_no_scores_at_all_change_nothing():
    for normalize in ("none", "running", "batch", "group"):
        scores, metrics = shaped([], normalize=normalize)
        assert scores.shape == (0,) and all(values.shape == (0,) for values, _ in metrics.values())
    moments = RunningMoments()
    moments.update(torch.tensor([]))
    assert (moments.count, moments.mean, moments.std) == (0.0, 0.0, 0.0)


def check_ranks(rank, world_size):
    exchange = Exchange(dist.group.WORLD)
    scores = torch.randn(8, generator=torch.Generator().manual_seed(3)) * 3
    lengths, groups = torch.arange(8) * 13, torch.arange(8) // 2
    for normalize in ("none", "running", "batch", "group"):
        config = Reward(scale=0.7, clip=1.5, normalize=normalize, length_penalty="overlong", overlong_buffer=30)
        alone, together = RunningMoments(), RunningMoments()
        for cut in (0, 2, 6, 8):
            expected, metrics = shape_scores(scores, lengths, groups, config, alone, max_response_length=MAX_LENGTH)
            mine = slice(0, cut) if rank == 0 else slice(cut, 8)
            part = scores[mine], lengths[mine], groups[mine]
            of_rank, parts = shape_scores(
                *part, config, together, max_response_length=MAX_LENGTH, process_group=dist.group.WORLD
            )
            torch.testing.assert_close(of_rank, expected[mine], rtol=1e-6, atol=1e-7)
            of_all = reduce_ranks(exchange.all_gather({name: Metric.of(*part) for name, part in parts.items()}))
            assert of_all == pytest.approx(numbers_of(metrics), rel=1e-12)
            assert together.state_dict() == pytest.approx(alone.state_dict(), rel=1e-12)
            states = [None] * world_size
            dist.all_gather_object(states, together.state_dict())
            assert states[0] == states[1]


def test_shaping_does_not_depend_on_how_rows_are_spread_over_ranks():
    run_ranks(2, check_ranks)

"""Samples as rows: what is masked, and episodes of several segments."""

import pytest
import torch
from samples_of import sample_of

from megappo.engines.generations import Generation
from megappo.rollouts.row_builder import with_scores
from megappo.rollouts.sample_rows import Sample, Segment, mask_truncated, sample_rows, segment_places


def test_what_was_cut_off_is_masked_and_what_has_nothing_left_to_be_compared_with():
    ends = {(0, 0): "length", (0, 1): "stop", (0, 2): "stop", (1, 0): "stop", (1, 1): "length", (1, 2): "length"}
    samples = [sample_of(*key, [7, 8], [-1.0, -2.0], end) for key, end in ends.items()]
    mask_truncated(samples, compared=False)
    assert [one.is_masked for one in samples] == [True, False, False, False, True, True]
    mask_truncated(samples, compared=True)
    rows = sample_rows(samples)
    assert rows.response_mask.sum(dim=1).tolist() == [0, 2, 2, 0, 0, 0]


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        pytest.param([(0, [1, 0, 2]), (2, [3])], [("new prompt", 2, 0)], id="the template rewrites the history"),
        pytest.param(
            [(0, [1, 2]), (0, [3, 4]), (0, [5])], [("new prompt", 2, 0), ("new prompt", 4, 0)], id="summaries"
        ),
        pytest.param(
            [(0, [1, 7]), (0, [2, 4]), (0, [3, 5]), (5, [6]), (7, [8])],
            [("branch", 1, 1), ("branch", 1, 1), ("branch", 5, 1), ("new prompt", 7, 0)],
            id="two helpers at once, one of them compacted",
        ),
        pytest.param(
            [(0, [1, 2]), (1, [3]), (1, [4, 5]), (4, [6])], [("branch", 1, 1)] * 2 + [("branch", 4, 2)], id="n"
        ),
    ],
)
def test_places_of_segments(segments, expected):
    """Segments as (parent, turns of the tokens)."""
    made = [Segment([9], tokens=[8] * len(turns), turns=turns, parent=parent) for parent, turns in segments]
    first, *places = segment_places(made)
    assert first.begins == "" and [(place.begins, place.follows, place.depth) for place in places] == expected


def test_each_segment_is_a_row_with_a_prompt_of_its_own():
    first, second = Segment([5, 6]), Segment([5, 9, 9])
    first.write(Generation([11, 12], [-1.0, -2.0], "stop", versions=[3, 4]), 1)
    first.reward(0.5)
    first.observe([20, 21])
    first.write(Generation([13], [-3.0], "stop", versions=[5]), 2)
    first.reward([0.25])
    second.write(Generation([14, 15], [-4.0, -5.0], "stop", versions=[5, 5]), 3)
    second.reward([1.0, 2.0])
    samples = [Sample(1, 3, [first, second], "turns", {})]
    rows = with_scores(sample_rows(samples, episodes=True), samples, torch.tensor([[3.75]]), has_weights=False)
    assert [row.tolist() for row in rows.sequences] == [[5, 6, 11, 12, 20, 21, 13], [5, 9, 9, 14, 15]]
    assert rows.prompt_lengths.tolist() == [2, 3] and rows.response_lengths.tolist() == [5, 2]
    fields = {name: values.tolist() for name, values in rows.fields.items()}
    assert fields["response_mask"] == [[1, 1, 0, 0, 1], [1, 1, 0, 0, 0]]
    assert fields["rollout_log_probs"] == [[-1, -2, 0, 0, -3], [-4, -5, 0, 0, 0]]
    assert fields["turn_rewards"] == [[0, 0.5, 0, 0, 0.25], [1, 2, 0, 0, 0]]
    assert fields["turns"] == [[1, 1, 0, 0, 2], [3, 3, 0, 0, 0]]
    assert fields["scores"] == [3.75, 3.75] and fields["truncated"] == [1, 1]
    assert "staleness" not in fields
    ahead = sample_rows(samples, episodes=True, step=6)
    assert ahead.fields["staleness"].tolist() == [[2, 1, 0, 0, 0], [0, 0, 0, 0, 0]], "step 6 trains weights 5"
    assert fields["episodes"] == [3, 3] and fields["segments"] == [0, 1] and len(set(rows.ids.tolist())) == 2

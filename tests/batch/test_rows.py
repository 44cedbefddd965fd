"""Rows: shapes, masks, selecting."""

from dataclasses import replace

import pytest
import torch

from megappo.batch.rows import NO_TOKENS, Rows


def rows(ids: list[int], prompts: list[int], responses: list[int], width: int) -> Rows:
    """Rows whose tokens and fields name their row, so that a mix-up shows."""
    tokens = torch.cat([torch.full((p + r,), i) for i, p, r in zip(ids, prompts, responses, strict=True)])
    mask = (torch.arange(width) < torch.tensor(responses)[:, None]).float()
    fields = {"old_log_probs": mask * torch.tensor(ids)[:, None], "scores": torch.tensor(ids).float()}
    return Rows(
        torch.tensor(ids), torch.tensor(ids) // 2, torch.tensor(prompts), torch.tensor(responses), tokens, fields
    )


def test_select_keeps_everything_of_a_row_together_and_the_width():
    picked = rows([5, 6, 7], [1, 2, 3], [4, 1, 2], width=6).select([2, 0])
    assert (picked.ids.tolist(), picked.prompt_ids.tolist()) == ([7, 5], [3, 2])
    assert [x.tolist() for x in picked.sequences] == [[7] * 5, [5] * 5]
    assert picked.fields["old_log_probs"].tolist() == [[7, 7, 0, 0, 0, 0], [5, 5, 5, 5, 0, 0]]
    assert picked.fields["scores"].tolist() == [7, 5]
    assert picked.max_response_length == 6


def test_several_columns_are_a_rows_own_and_no_width_of_responses():
    batch = rows([5, 6, 7], [1, 2, 3], [2, 1, 2], width=2)
    columns = torch.tensor([[5.0, 50.0, -5.0], [6.0, 60.0, -6.0], [7.0, 70.0, -7.0]])
    batch = replace(batch, fields={"score_components": columns} | batch.fields)
    assert batch.max_response_length == 2
    assert batch.select([2, 0]).fields["score_components"].tolist() == columns[[2, 0]].tolist()
    assert batch.select([]).fields["score_components"].shape == (0, 3)


def test_select_takes_a_tensor_and_nothing_at_all():
    batch = rows([5, 6], [1, 1], [2, 3], width=3)
    assert batch.select(torch.tensor([1])).ids.tolist() == [6]
    assert len(batch.select([])) == 0
    assert batch.select([]).response_mask.shape == (0, 3)


def test_response_mask_comes_from_the_lengths_unless_there_is_a_field():
    batch = rows([0, 1], [1, 1], [2, 1], width=3)
    assert batch.response_mask.tolist() == [[1, 1, 0], [1, 0, 0]]
    own = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    assert replace(batch, fields={"response_mask": own}).response_mask is own


def test_without_fields_the_longest_response_is_the_width():
    bare = Rows(torch.arange(2), torch.arange(2), torch.tensor([1, 1]), torch.tensor([2, 5]), NO_TOKENS)
    assert bare.max_response_length == 5
    assert bare.response_mask.sum(1).tolist() == [2, 5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": torch.zeros(12)}, "12 input_ids; expected 5, the sum of prompt and response lengths"),
        (
            {"fields": {"values": torch.zeros(2, 1)}},
            r"field values has shape \[2, 1\]; expected \[2, 2\], for it is the",
        ),
        ({"fields": {"values": torch.zeros(2, 3), "returns": torch.zeros(2, 4)}}, r"field returns has shape \[2, 4\]"),
        ({"fields": {"values": torch.zeros(2)}}, r"field values has shape \[2\]; expected \[2, 2\]"),
        ({"fields": {"scores": torch.zeros(2, 2)}}, r"field scores has shape \[2, 2\]; expected \[2\], for it is the"),
        ({"fields": {"scores": torch.zeros(3)}}, r"field scores has shape \[3\]; expected \[2\]"),
        ({"fields": {"score_components": torch.zeros(2)}}, r"score_components has shape \[2\]; expected \[2, 1\], for"),
        (
            {"fields": {"score_components": torch.zeros(3, 2)}},
            r"has shape \[3, 2\]; expected \[2, 2\], for it is the t",
        ),
        ({"fields": {"score_components": torch.zeros(2, 3, 1)}}, r"shape \[2, 3, 1\]; expected \[2, 3\], for it is"),
        ({"fields": {"score": torch.zeros(2)}}, "unknown field 'score' of rows: choose one of response_mask, "),
    ],
)
def test_rows_that_do_not_fit_together_are_refused(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        replace(rows([0, 1], [1, 1], [2, 1], width=3), **change)


def test_a_field_that_has_not_been_written_names_its_writer():
    batch = rows([0, 1], [1, 1], [2, 1], width=3)
    assert batch.field("scores") is batch.fields["scores"]
    with pytest.raises(ValueError, match="rows have no returns yet: written by the advantages"):
        batch.field("returns")
    with pytest.raises(ValueError, match="unknown field 'return' of rows"):
        batch.field("return")

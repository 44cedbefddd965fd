"""Rows in a file: what is written is read again, by any number of readers."""

import pytest
import torch

from megappo.batch.rows import Rows
from megappo.batch.rows_file import RowsFile, write_rows
from megappo.errors import ActionableError

LENGTHS = ((3, 2), (1, 5), (2, 1), (4, 3), (1, 1))
"""Tokens of each row's prompt and response."""


def make_rows() -> Rows:
    generator = torch.Generator().manual_seed(0)
    prompts, responses = torch.tensor(LENGTHS).unbind(1)
    mask = (torch.arange(5) < responses[:, None]).float()
    mask[1, 2] = 0.0  # an environment wrote it
    return Rows(
        torch.arange(5),
        torch.tensor([0, 0, 1, 2, 2]),
        prompts,
        responses,
        torch.randint(99, (sum(map(sum, LENGTHS)),), generator=generator),
        {
            "response_mask": mask,
            "rollout_log_probs": torch.randn(5, 5, generator=generator) * mask,
            "scores": torch.randn(5, generator=generator),
            "score_components": torch.randn(5, 3, generator=generator),
        },
    )


@pytest.mark.parametrize("bounds", [(0, 5), (0, 2, 5), (0, 1, 2, 3, 4, 5), (0, 0, 4, 5)])
def test_rows_are_read_as_they_were_written(tmp_path, bounds):
    rows, facts = make_rows(), {"step": 3, "labels": ["\u00e4", None, 4]}
    write_rows(tmp_path / "rows", rows, facts)
    with RowsFile(tmp_path / "rows") as file:
        assert file.facts == facts
        assert file.table.policy_lengths.tolist() == [2, 4, 1, 3, 1]
        assert file.table.max_response_length == 5
        parts = [file.rows(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]
    for name in ("ids", "prompt_ids", "prompt_lengths", "response_lengths"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(rows, name)), name
    found = [tokens for part in parts for tokens in part.sequences]
    assert all(torch.equal(one, other) for one, other in zip(found, rows.sequences, strict=True))
    for name, values in rows.fields.items():
        assert torch.equal(torch.cat([part.fields[name] for part in parts]), values), name


@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_whoever_may_read_the_folder_may_read_the_file(tmp_path, mode):
    tmp_path.chmod(mode)
    write_rows(tmp_path / "rows", make_rows(), {})
    assert (tmp_path / "rows").stat().st_mode & 0o777 == mode & 0o644


def test_what_is_cut_off_or_something_else_is_refused_by_name(tmp_path):
    path = tmp_path / "rows"
    write_rows(path, make_rows(), {})
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:20], b"", b"not at all"):
        path.write_bytes(damaged)
        with pytest.raises(ActionableError, match=f"{path} holds no whole rows"):
            RowsFile(path)

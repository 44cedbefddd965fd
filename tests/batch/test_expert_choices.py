"""Experts of tokens stay with their tokens: here each token's bytes follow from its number."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ppo_engines import at_owners, make_rows
from spawn import run_ranks
from tiny_models import hf_folder
from tiny_shapes import EXPERTS

from megappo.architecture.parsing import read_architecture
from megappo.batch.exchange import Exchange
from megappo.batch.packing import pack
from megappo.batch.rows import Rows
from megappo.batch.rows_file import RowsFile, write_rows
from megappo.batch.trajectories import Trajectories
from megappo.engines.generations import Generation
from megappo.rollouts.sample_rows import Segment, response_sample, sample_rows

ONE_BYTE = EXPERTS | {"num_hidden_layers": 1, "num_experts_per_tok": 1}
FACTORS = torch.tensor([1, 3, 7])


def bytes_of(tokens: torch.Tensor) -> torch.Tensor:
    return (tokens[:, None] * FACTORS % 251 + 1).to(torch.uint8)


def rows_with_choices() -> Rows:
    rows = make_rows(91)
    return replace(rows, fields=rows.fields | {"expert_choices": bytes_of(rows.input_ids)})


def check(rows: Rows) -> None:
    assert torch.equal(rows.fields["expert_choices"], bytes_of(rows.input_ids))


def _moves(rank: int, world_size: int, folder: Path) -> None:
    exchange, rows = Exchange(dist.group.WORLD), rows_with_choices()
    batch = at_owners(exchange, rows)
    assert 0 < len(batch.rows) < len(rows)
    check(batch.rows)
    whole = batch.at_rank_0(exchange)
    check(whole)
    assert len(whole) == (len(rows) if rank == 0 else 0)
    if rank == 0:
        write_rows(folder / "rows", whole, {})
    dist.barrier()
    with RowsFile(folder / "rows") as file:
        read = file.batch(exchange)
    check(read.rows)
    everywhere = exchange.move(read, (tuple(range(len(rows))),) * world_size, ["response_mask", "expert_choices"])
    check(everywhere.rows.select([4, 0, 3]))
    assert "expert_choices" not in Trajectories(replace_segments(everywhere.rows)).joined.fields


def replace_segments(rows: Rows) -> Rows:
    """Return the rows as segments of one episode, which are joined."""
    segments, zeros = torch.arange(len(rows)).float(), torch.zeros(len(rows))
    added = {"segments": segments, "episodes": zeros, "turns": torch.zeros_like(rows.response_mask)}
    return replace(rows, fields=rows.fields | added)


def test_they_move_between_ranks_and_through_files(tmp_path: Path) -> None:
    run_ranks(2, _moves, tmp_path)


@pytest.mark.parametrize(("multiple", "context"), [(1, 1), (4, 1), (2, 2)])
def test_they_are_packed_with_their_tokens(multiple: int, context: int) -> None:
    rows = rows_with_choices().select([3, 0, 4])
    num_known = 0
    for rank in range(context):
        packed = pack(rows, multiple, torch.device("cpu"), context=context, context_rank=rank)
        known = packed.expert_choices[:, 0] > 0
        assert torch.equal(packed.expert_choices[known], bytes_of(packed.input_ids[0][known]))
        assert not packed.expert_choices[~known].any()
        num_known += int(known.sum())
    assert num_known == len(rows.input_ids), "each token's choices are on one rank"


def test_each_token_of_an_episode_keeps_the_choice_with_which_it_was_sampled(tmp_path: Path) -> None:
    """The request for a turn returns the choices of the whole context, except for its last token."""
    segment = Segment([5, 6])
    segment.write(Generation([7, 8], [-1.0, -1.0], "stop", choices=bytes([1, 2, 3])), 1)
    segment.observe([9])
    segment.write(Generation([10], [-1.0], "stop", choices=bytes([9, 9, 9, 4, 5])), 2)
    segment.observe([11])
    sample = response_sample(0, 0, [5], Generation([6], [-1.0], "stop", choices=bytes([6])))
    policy = read_architecture(hf_folder(tmp_path / "hf", "qwen3_moe", **ONE_BYTE))
    assert policy.choice_bytes == 1
    rows = sample_rows([replace(sample, segments=[segment]), sample], replayed=policy)
    assert rows.fields["expert_choices"][:, 0].tolist() == [1, 2, 3, 4, 5, 0, 0, 6, 0]
    assert sample_rows([], replayed=policy).fields["expert_choices"].shape == (0, 1)
    wide = response_sample(0, 0, [5], Generation([6, 7], [-1.0, -1.0], "stop", choices=bytes(4)))
    with pytest.raises(ValueError, match="field expert_choices"):  # of another version's journal
        sample_rows([wide], replayed=policy)

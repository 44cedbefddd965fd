"""A component's MFU, against a plain count of the work on its rows."""

from pathlib import Path

import pytest
from recorder import recorder_in
from spawn import run_ranks

from megappo.architecture.parsing import read_architecture
from megappo.config.schema import Config

SECONDS = 2.5


def plain_work(folder: Path, rows: list[tuple[int, int]]) -> int:
    """Count forward and backward passes: 6 for each number of a matrix and token that it is multiplied with."""
    model = read_architecture(folder)
    hidden, head = model.hidden_size, model.head_size
    attention = 2 * hidden * head * (model.num_heads + model.num_kv_heads)
    layer = attention + 3 * hidden * model.ffn_size
    total = 0
    for tokens, responses in rows:
        attended = sum(seen + 1 for seen in range(tokens))
        total += 6 * model.num_layers * (tokens * layer + 2 * attended * model.num_heads * head)
        total += 6 * responses * hidden * model.vocab_size
    return total


def check_work(rank: int, world_size: int, folder: Path) -> None:
    bench = recorder_in(folder)
    config = Config.model_validate(bench.merged(bench.settings(folder), bench.LAYOUTS["actor cp2 dp2, critic tp2 pp2"]))
    run = bench.build(config)
    batch, _ = run.batches.score(1, run.batches.sample(1, run.phase), run.phase)
    scattered = run.models.scatter(batch)["actor"]
    lengths = list(zip(batch.table.lengths.tolist(), batch.table.response_lengths.tolist(), strict=True))
    whole = plain_work(folder, lengths)
    assert len(scattered.split) == 2
    for num_steps in (2, 3, 4):
        mfu = run.utilisation.mfu(scattered, num_steps, SECONDS)
        assert mfu * run.utilisation.peaks["actor"] * SECONDS == pytest.approx(whole * num_steps / 2)
    assert 1e8 < run.utilisation.peaks["actor"] < 1e14


def test_it_counts_the_rows_of_the_steps(tmp_path: Path) -> None:
    run_ranks(4, check_work, tmp_path)

"""A component's MFU, against a plain count of its optimizer steps' rows."""

from pathlib import Path

import pytest
from recorder import recorder_in
from spawn import run_ranks

from megappo.architecture.parsing import read_architecture
from megappo.config.schema import Config
from megappo.models.train_engine import OptimizerStep
from megappo.trainer.in_flight import InFlight, LocalUpdate

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
    lengths = list(zip(batch.table.total_lengths(), batch.table.response_lengths.tolist(), strict=True))
    halves = [[lengths[row] for shard in half for row in shard] for half in scattered.split]
    cases = ((0, 2, lengths), (0, 3, lengths + halves[0]), (0, 4, lengths * 2), (1, 1, halves[1]), (3, 1, halves[1]))
    for resumed, steps, rows in cases:
        flight = InFlight(1, batch, {}, None, num_updates={"actor": resumed})
        flight.resume({"actor": scattered})
        scattered.optimizer_steps = [OptimizerStep(1.0, 1.0, {})] * steps if rank == 0 else []  # on output ranks
        local = LocalUpdate(0, False, scattered.optimizer_steps, SECONDS if rank == 3 else 0.1)
        mfu = run.utilisation.mfu(scattered, run.exchange.share(local))
        assert mfu * run.utilisation.peaks["actor"] * SECONDS == pytest.approx(plain_work(folder, rows))
    assert 1e8 < run.utilisation.peaks["actor"] < 1e14


def test_it_counts_the_rows_of_the_steps(tmp_path: Path) -> None:
    run_ranks(4, check_work, tmp_path)

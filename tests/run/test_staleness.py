"""Runs whose engines sample while they get new weights: which weights wrote each response, and what proves them."""

import signal
from pathlib import Path

import pytest
from exported_adapters import LORA
from program import ONE_RANK_EACH, Program, has_logged, logged
from pyarrow import parquet

from megappo.observe.files import kept_file

MAX_STALENESS = 2
AHEAD = (
    *(*ONE_RANK_EACH, "placement.rollout=1", f"rollout.max_staleness={MAX_STALENESS}", "data.train_batch_size=16"),
    *("rollout.max_running_requests=8", "rollout.max_response_length=20", "trainer.total_steps=6"),
    *("trainer.eval_interval=0", "trainer.save_interval=0", "trainer.export_hf=false", "trainer.keep_rollouts=1"),
    "reward.batch_size=1",
)
RECOMPUTED, KEPT = "rollout.recompute_cache=true", "rollout.recompute_cache=false"
DISK, FINISH = "rollout.sync.transport=disk", "rollout.on_sync=finish"
WAYS = {
    "broadcast, cache recomputed": (RECOMPUTED,),
    "broadcast, cache kept": (KEPT,),
    "disk, cache recomputed": (DISK, RECOMPUTED),
    "disk, cache kept": (DISK, KEPT),
    "responses finished": (FINISH,),
    "responses finished, adapters": (FINISH, *LORA),
}

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]  # tests/engines has both modes, with a real engine


def check_steps(steps: list[dict], *, continues: bool) -> None:
    """Check that no token is too old, and that tokens of the newest weights prove the weights."""
    assert [metrics["step"] for metrics in steps] == [1, 2, 3, 4, 5, 6]
    for metrics in steps:
        assert metrics["sync/log_prob_diff/max"] < 1e-4
        assert metrics.get("rollout/log_prob_diff/max", 0.0) < 1e-4
        assert metrics["rollout/response_staleness/max"] <= MAX_STALENESS
    assert any("rollout/log_prob_diff/max" in metrics for metrics in steps)
    assert max(metrics["rollout/staleness/max"] for metrics in steps) > 0
    assert any(metrics["rollout/mixed_versions_frac"] > 0 for metrics in steps) == continues


@pytest.mark.parametrize("way", WAYS)
def test_responses_know_the_weights_that_wrote_them(way: str, config: Path, folder: Path) -> None:
    run = folder / "run"
    with Program(folder, config, f"trainer.output_dir={run}", *AHEAD, *WAYS[way]) as program:
        assert program.wait() == 0, program.output
    steps = logged(run)
    check_steps(steps, continues=FINISH not in WAYS[way])
    for metrics in steps:
        rows = parquet.read_table(kept_file(run, metrics["step"])).to_pylist()
        oldest = max(max(row["staleness"]) for row in rows)
        assert oldest == metrics["rollout/response_staleness/max"]


@pytest.mark.parametrize("recompute", [RECOMPUTED, KEPT])
def test_an_engine_that_is_killed_while_others_would_wait_for_it_gets_the_newest_weights(recompute, config, folder):
    run = folder / "run"
    with Program(folder, config, f"trainer.output_dir={run}", *AHEAD, recompute) as program:
        program.wait_until(lambda: has_logged(run, 2))
        [scheduler] = [one for one in program.ranks[1].children(recursive=True) if "scheduler" in one.name()]
        scheduler.send_signal(signal.SIGKILL)
        assert program.wait() == 0, program.output
    steps = logged(run)
    check_steps(steps, continues=True)
    assert sum(metrics["rollout/engine_restarts"] for metrics in steps) == 1

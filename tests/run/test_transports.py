"""Short runs of the whole program whose engines are on other ranks than the actor, or use other transports."""

from pathlib import Path

import pytest
from program import ONE_RANK_EACH, Program, logged
from slow import slow_ones

OTHERS = ("trainer.total_steps=4", "trainer.save_interval=0", "trainer.export_hf=false", "critic.warmup_steps=1")
WAYS = {
    "broadcast to an engine elsewhere": ("placement.rollout=1",),
    "one engine here, one elsewhere": ("placement.rollout=all", "rollout.sync.probe_interval=2"),
    "through a folder": ("placement.rollout=1", "rollout.sync.transport=disk"),
    "broadcast to the sender's own engine": ("placement.rollout=all", "rollout.sync.transport=broadcast"),
    "broadcast from each stage": ("placement.actor=0-1", "actor.parallel.pipeline=2", "placement.rollout=2-3"),
}
NUM_RANKS = {"broadcast from each stage": 4}
SLOW = tuple(way for way in WAYS if way != "one engine here, one elsewhere")
"""tests/sync/test_stages.py has stages that send to a real engine."""
PROBED = {"one engine here, one elsewhere": [2, 4]}

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("way", slow_ones(WAYS, SLOW))
def test_the_engines_follow_the_actor(way: str, config: Path, folder: Path) -> None:
    run = folder / "run"
    arguments = (*ONE_RANK_EACH, *OTHERS, "rollout.sync.bucket_bytes=20000", *WAYS[way])
    ranks = ("--nproc-per-node", str(NUM_RANKS.get(way, 2)))
    with Program(folder, config, f"trainer.output_dir={run}", *arguments, options=ranks) as program:
        assert program.wait() == 0, program.output
    steps = logged(run)[1:]
    assert [metrics["step"] for metrics in steps] == [1, 2, 3, 4]
    assert all(metrics["rollout/log_prob_diff/mean"] < 1e-4 for metrics in steps)
    assert steps[0]["sync/bytes"] == 0, "while the critic warms up, the engines have the actor's weights"
    assert all(metrics["sync/bytes"] > 50_000 for metrics in steps[1:])
    probed = [metrics["step"] for metrics in steps if "sync/log_prob_diff/max" in metrics]
    assert probed == PROBED.get(way, [1, 2, 3, 4])
    assert all(metrics.get("sync/log_prob_diff/max", 0) < 1e-4 for metrics in steps)

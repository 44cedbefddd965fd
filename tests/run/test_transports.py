"""Short runs of the whole program whose engines are on other ranks than the actor, or use other transports."""

import re
import signal
import subprocess
from pathlib import Path
from socket import AF_INET

import psutil
import pytest
from program import ENDLESS, ONE_RANK_EACH, Program, has_logged, logged
from report_pages import content_of

OTHERS = ("trainer.save_interval=0", "trainer.export_hf=false", "critic.warmup_steps=1")
OTHERS += (*ONE_RANK_EACH, "rollout.sync.bucket_bytes=20000")
WAYS = {
    "broadcast to an engine elsewhere": ("placement.rollout=1",),
    "through a folder": ("placement.rollout=1", "rollout.sync.transport=disk"),
    "broadcast to the sender's own engine": ("placement.rollout=all", "rollout.sync.transport=broadcast"),
    "broadcast from each stage": ("placement.actor=0-1", "actor.parallel.pipeline=2", "placement.rollout=2-3"),
}
NUM_RANKS = {"broadcast from each stage": 4}

pytestmark = pytest.mark.timeout(300)


def check_steps(steps: list[dict], probe_interval: int = 1) -> None:
    """Check that the engines of each step had the actor's weights."""
    assert [metrics["step"] for metrics in steps[:4]] == [1, 2, 3, 4]
    assert all(metrics["rollout/log_prob_diff/mean"] < 1e-4 for metrics in steps)
    assert steps[0]["sync/bytes"] == 0, "while the critic warms up, the engines have the actor's weights"
    assert all(metrics["sync/bytes"] > 50_000 for metrics in steps[1:])
    probed = [metrics["step"] for metrics in steps[:4] if "sync/log_prob_diff/max" in metrics]
    assert probed == list(range(probe_interval, 5, probe_interval))
    assert all(metrics.get("sync/log_prob_diff/max", 0) < 1e-4 for metrics in steps)


def outside() -> str:
    """Return an address of this machine other than loopback, or loopback if there is none."""
    found = [a.address for addresses in psutil.net_if_addrs().values() for a in addresses if a.family == AF_INET]
    return max(found, key=lambda address: not address.startswith("127."))


def test_an_engine_here_and_one_elsewhere_follow_the_actor_until_ctrl_c(config: Path, folder: Path) -> None:
    """All listen on loopback alone."""
    run, ways = folder / "run", ("placement.rollout=all", "rollout.sync.probe_interval=2")
    # gloo listens where the host's name leads to: here not to loopback, unless the machine has nothing else.
    named = ("unshare", "--map-root-user", "--uts", "bash", "-c", 'hostname "$0"; exec "$@"', outside())
    permitted = subprocess.run([*named, "true"], capture_output=True).returncode == 0
    arguments = (config, f"trainer.output_dir={run}", *ENDLESS, *OTHERS, *ways)
    with Program(folder, *arguments, prefix=named if permitted else ()) as program:
        program.wait_until(lambda: has_logged(run, 4))
        assert program.listening.keys() == {"127.0.0.1"}, program.listening
        program.signal_group(signal.SIGINT)
        assert program.wait(20) == 128 + signal.SIGINT
    check_steps(steps := logged(run), probe_interval=2)
    ending = f"ended by SIGINT: no checkpoint yet; {len(steps)} steps lost. To resume: .* -m megappo.torchrun "
    assert re.match(ending, program.output.splitlines()[-1])
    assert "Traceback" not in program.output and "\nerror" not in program.output
    [report] = content_of(run / "report.html")["runs"]
    assert (report["status"], report["message"]) == ("interrupted", "ended by SIGINT") and report["steps"][-1][1] >= 4


@pytest.mark.slow  # tests/sync has each transport, and test_stages.py stages that send to a real engine
@pytest.mark.parametrize("way", WAYS)
def test_the_engines_follow_the_actor(way: str, config: Path, folder: Path) -> None:
    run, ranks = folder / "run", ("--nproc-per-node", str(NUM_RANKS.get(way, 2)))
    arguments = (config, f"trainer.output_dir={run}", "trainer.total_steps=4", *OTHERS, *WAYS[way])
    with Program(folder, *arguments, options=ranks) as program:
        assert program.wait() == 0, program.output
    check_steps(logged(run)[1:])

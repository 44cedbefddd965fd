"""A run on recorded rollouts that is killed or terminated at random points ends with bitwise the same weights, and the
same metrics, as an undisturbed run."""

import json
import random
import signal
import time

import psutil
import pytest
from faults import Series
from program import Program, logged

from megappo.observe.run_file import read_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ENDINGS = ("all", "rank 0", "rank 1", "launcher", "SIGTERM", "SIGUSR1", "SIGINT")


def end(program: Program, how: str) -> None:
    """By a signal to the launcher, or a kill of some of its processes."""
    if how.startswith("SIG"):
        program.process.send_signal(signal.Signals[how])
        return
    launcher = psutil.Process(program.process.pid)
    ranks = program.ranks
    if how.startswith("rank") and len(ranks) == 2:
        ranks[int(how[-1])].kill()
    else:
        for process in [launcher] if how == "launcher" else [*ranks, launcher]:
            process.kill()


@pytest.mark.parametrize("seed", range(5))
def test_the_same_weights_after_four_endings_at_random_points(seed: int, series: Series, whole):
    chance, metrics = random.Random(seed), series.out / "metrics.jsonl"
    for _ in range(4):
        with series.start("trainer.save_interval=2") as program:
            program.wait_until(lambda: metrics.exists() or chance.random() < 0.01)
            time.sleep(chance.uniform(0, 8))
            how = chance.choice(ENDINGS)
            if program.process.poll() is None:
                end(program, how)
            code = program.wait(60)
            print(f"{how}: exit code {code}, {len(logged(series.out)) if metrics.exists() else 0} steps")
            assert code != 2 and "Traceback" not in program.output, program.output
        if how in ("SIGTERM", "SIGUSR1") and code == 75 and read_run(series.out).get("status") == "interrupted":
            newest = json.loads((series.out / "checkpoints" / series.latest / "state.json").read_text())
            assert newest["step"] >= len(logged(series.out)), "every finished step is saved"
    series.finish(whole)

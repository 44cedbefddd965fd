"""A run on recorded rollouts that is killed or terminated at random points ends with bitwise the same weights, and the
same metrics, as an undisturbed run."""

import json
import random
import signal
import time
from functools import partial

import psutil
import pytest
from faults import Series
from program import Program, logged

from megappo.observe.run_file import read_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ENDINGS = ("all", "rank 0", "rank 1", "launcher", "SIGTERM", "SIGUSR1", "SIGINT")
LINES, STEP_SECONDS = 12, 2
"""Lines that a run prints, about half of them in its start, and the seconds that a step takes at most."""


def has_ended_or_printed(program: Program, num_lines: int) -> bool:
    return program.process.poll() is not None or program.output.count("\n") >= num_lines


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
        num_lines, seconds, how = chance.randrange(LINES), chance.uniform(0, STEP_SECONDS), chance.choice(ENDINGS)
        with series.start("trainer.save_interval=2") as program:
            program.wait_until(partial(has_ended_or_printed, program, num_lines))
            time.sleep(seconds)
            if program.process.poll() is None:
                end(program, how)
            code = program.wait(60)
            print(f"{how}: exit code {code}, {len(logged(series.out)) if metrics.exists() else 0} steps")
            assert code != 2 and "Traceback" not in program.output, program.output
        has_saved = how in ("SIGTERM", "SIGUSR1") and code == 75 and series.latest
        if has_saved and read_run(series.out).get("status") == "interrupted":
            newest = json.loads((series.out / "checkpoints" / series.latest / "state.json").read_text())
            assert newest["step"] >= len(logged(series.out)), "every finished step is saved"
    series.finish(whole)

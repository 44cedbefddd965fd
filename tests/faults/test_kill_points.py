"""Killed or asked to end at random points, a run that trains on a record ends with the same weights, to the bit, and
the same metrics as one that nothing happened to."""

import json
import random
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from commands import assert_equal, tensors_of
from program import Program, logged

pytestmark = pytest.mark.timeout(900)
OF_CLOCKS = re.compile("^(timing_s|memory)/|/mfu$|^time$")
ENDINGS = ("all", "rank 0", "rank 1", "launcher", "SIGTERM", "SIGUSR1", "SIGINT")
UPDATES = ("actor.ppo_epochs=3", "critic.ppo_epochs=2", "actor.ppo_mini_batch_size=8")
"""So that most of a step's time, and most points, lie within updates."""


def arguments(record: Path, out: Path) -> tuple[str, ...]:
    places = (f"trainer.output_dir={out}", f"trainer.replay_rollouts={record}")
    return (*places, "trainer.eval_interval=0", "trainer.save_interval=2", *UPDATES)


def numbers(out: Path) -> list[dict]:
    return [{key: value for key, value in step.items() if not OF_CLOCKS.search(key)} for step in logged(out)]


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


@pytest.fixture(scope="module")
def whole(config: Path, run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happens to, on the rollouts of `run`."""
    folder = tmp_path_factory.mktemp("whole")
    with Program(folder, config, *arguments(run / "record", folder / "out")) as program:
        assert program.wait() == 0, program.output
    return folder / "out"


@pytest.mark.slow  # the fixture `run` is killed and asked to end, and tests/trainer/test_interrupted.py has each update
@pytest.mark.parametrize("seed", range(5))
def test_the_same_weights_after_four_endings_at_random_points(config, run, whole, folder, seed):
    chance = random.Random(seed)
    out = folder / "out"
    for number in range(4):
        with Program(folder / str(number), config, *arguments(run / "record", out)) as program:
            program.wait_until(lambda: (out / "metrics.jsonl").exists() or chance.random() < 0.01)
            time.sleep(chance.uniform(0, 8))
            how = chance.choice(ENDINGS)
            if program.process.poll() is None:
                end(program, how)
            code = program.wait(60)
            print(f"{how}: exit code {code}, {len(logged(out)) if (out / 'metrics.jsonl').exists() else 0} steps")
            assert code != 2 and "Traceback" not in program.output, program.output
        if how in ("SIGTERM", "SIGUSR1") and code == 75 and "all is saved" in program.output:
            newest = json.loads((out / "checkpoints" / latest(out) / "state.json").read_text())
            assert newest["step"] >= len(logged(out)), "every finished step is saved"
    with Program(folder / "last", config, *arguments(run / "record", out)) as program:
        assert program.wait() == 0, program.output
    assert numbers(out) == numbers(whole)
    assert_equal(tensors_of(out / "hf_actor"), tensors_of(whole / "hf_actor"))


def latest(out: Path) -> str:
    return (out / "checkpoints" / "latest").read_text().strip()

"""launch/slurm.sbatch under a real SLURM of two nodes, each with a network of its own: on a record, without engines."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from network import INTERFACE
from program import REPOSITORY, logged, trained_on
from slurm import Slurm, missing
from tiny_run import has_saved, latest, reached

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
PULLED_SECONDS = 60.0
LIFE_SECONDS = 240.0
SLOWLY = """
import time
from dataclasses import replace

from megappo.config.methods import ESTIMATORS


def slowly(token_level_rewards, values, response_mask, gamma, lam):
    from megappo.ppo.advantages import gae

    time.sleep(6)
    return gae(token_level_rewards, values, response_mask, gamma, lam)


ESTIMATORS.register("slowly", replace(ESTIMATORS["gae"], source=slowly))
"""
"""An extension with gae, by which no run of 10 steps ends within a minute."""


@pytest.fixture
def slurm(folder, request) -> Iterator[Slurm]:
    if absent := missing():
        pytest.skip(absent)
    network = request.getfixturevalue("network")
    (folder / "slurm").mkdir()
    with Slurm(folder / "slurm", network, **getattr(request, "param", {})) as slurm:
        yield slurm


@pytest.fixture
def repository(folder) -> Path:
    """The folder from which a user submits: its environment for GPUs is this one."""
    python = folder / "repository" / ".venv-gpu" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/usr/bin/env bash\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return folder / "repository"


class Job:
    """A run under SLURM, on `run`'s record."""

    def __init__(self, slurm: Slurm, repository: Path, config: Path, run: Path, *words: str, minutes: int = 10):
        self.slurm, self.out = slurm, repository / "out"
        script = REPOSITORY / "launch" / "slurm.sbatch"
        # Slurm may send the signal up to a minute too early, and this one is to come too late.
        options = ("--gpus-per-node=1", f"--time={minutes}", "--signal=B:USR1@1")
        settings = (f"trainer.output_dir={self.out}", f"trainer.replay_rollouts={run / 'record'}")
        settings += ("trainer.eval_interval=0", *words)
        variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE, "TMPDIR": "/tmp"}
        self.number = slurm.submit(repository, *options, script, config, *settings, **variables)
        self.file = repository / f"slurm-{self.number}.out"

    @property
    def output(self) -> str:
        return self.file.read_text(errors="replace") if self.file.exists() else ""

    @property
    def state(self) -> str:
        return self.slurm.job(self.number)["JobState"]

    def has_ended(self) -> bool:
        return self.state in ("COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "CANCELLED", "OUT_OF_MEMORY")

    def wait_until(self, condition, seconds: float = LIFE_SECONDS) -> None:
        self.slurm.wait_until(condition, seconds, lambda: f"{self.state}\n{self.output}")


def check_trained(out: Path, run: Path) -> None:
    """Each step once, and as on one node."""
    found = trained_on(out)
    assert [metrics["step"] for metrics in found] == list(range(1, 11))
    assert found == trained_on(run)


def test_a_job_is_requeued_before_its_limit_and_goes_on(slurm, repository, config, run):
    """The first time by the run's own clock, then because Slurm's signal comes."""
    (repository / "slowly.py").write_text(SLOWLY)
    words = ("algorithm.adv_estimator=slowly", "trainer.extensions=slowly.py", "trainer.grace_seconds=120")
    job = Job(slurm, repository, config, run, *words, minutes=3)
    job.wait_until(lambda: "requeueing job" in job.output)
    assert "ended by the time limit: resumes " in job.output and "; nothing is lost" in job.output
    saved = int(latest(job.out)[5:13])
    assert not reached(job.out, 10) and saved >= logged(job.out)[-1]["step"], job.output
    job.wait_until(lambda: "resuming after step" in job.output and reached(job.out, saved + 1))
    assert f" from {job.out}/checkpoints/step_{saved:08d}" in job.output
    slurm.run("scancel", "--batch", "--signal=USR1", job.number)
    job.wait_until(lambda: job.output.count("; nothing is lost. To resume: sbatch ") == 2)
    job.wait_until(job.has_ended, 2 * LIFE_SECONDS)
    assert job.state == "COMPLETED", job.output
    assert not [line for line in job.output.splitlines() if line.startswith("error")], job.output
    assert int(slurm.job(job.number)["Restarts"]) == job.output.count("requeueing job") >= 2
    check_trained(job.out, run)


@pytest.mark.parametrize("slurm", [{"node_timeout": 30}, {"node_timeout": 300}], indirect=True)
def test_a_cable_that_is_pulled_ends_the_job_which_can_be_submitted_again(slurm, repository, config, run):
    """Either Slurm or the run itself misses the node first."""
    job = Job(slurm, repository, config, run)
    job.wait_until(lambda: reached(job.out, 4) and has_saved(job.out, 3))
    slurm.network.pull_cable(1)
    job.wait_until(lambda: job.state != "RUNNING" and not slurm.processes("megappo"), PULLED_SECONDS)
    assert not reached(job.out, 10) and "requeueing" not in job.output
    slurm.network.plug_cable(1)
    if job.state == "PENDING":
        slurm.run("scancel", job.number)
    slurm.resume(1)
    saved = int(latest(job.out)[5:13])
    again = Job(slurm, repository, config, run)
    again.wait_until(again.has_ended)
    assert again.state == "COMPLETED" and f"resuming after step {saved} " in again.output, again.output
    check_trained(again.out, run)

"""A run that fails or is terminated exits at once, reports the cause once, and leaves nothing behind."""

import signal

import pytest
from program import ENDLESS, Program, has_logged, logged

pytestmark = pytest.mark.timeout(600)

FAILING = """
calls = 0


def fails(prompts, responses, labels):
    global calls
    calls += 1
    if calls == 3:
        raise KeyError("no such answer")
    return [0.0] * len(responses)


def too_few(prompts, responses, labels):
    return [1.0]
"""
DREAM = """
import os
import time

from megappo.config.methods import POLICY_LOSSES, PolicyLoss
from megappo.ppo.policy_losses import gpg


def dream(tokens, config):
    while os.environ["RANK"] == "1":
        time.sleep(1)
    return gpg(tokens, config)


POLICY_LOSSES.register("dream", PolicyLoss(dream))
"""


def errors(output: str) -> list[str]:
    """Return the lines that begin an error message."""
    return [line for line in output.splitlines() if line.startswith("error")]


@pytest.mark.slow  # tests/launch has the signals, and tests/rollout an engine whose start is cut short
def test_sigterm_while_the_engine_starts(config, folder):
    with Program(folder, config, f"trainer.output_dir={folder / 'run'}", *ENDLESS) as program:
        log = folder / "run" / "engines" / "engine_0.log"
        program.wait_until(log.exists)
        program.process.terminate()
        assert program.wait(20) == 75
    last = program.output.splitlines()[-1]
    assert last.startswith("ended by SIGTERM: before the first step; nothing is lost. To resume: ")
    assert "Traceback" not in program.output and not errors(program.output)


@pytest.mark.slow  # tests/launch/test_torchrun.py has a killed launcher of a node
def test_the_ranks_end_with_a_killed_torchrun(config, folder):
    with Program(folder, config, f"trainer.output_dir={folder / 'run'}", *ENDLESS) as program:
        program.wait_until(lambda: has_logged(folder / "run", 1))
        assert len(program.ranks) == 2
        program.process.kill()
        assert program.wait(20) == 128 + signal.SIGKILL


@pytest.mark.slow  # tests/userland has the message; test_bad_input.py has errors that are printed once
def test_a_reward_function_that_raises(config, folder):
    (folder / "reward.py").write_text(FAILING)
    reward = f"{folder / 'reward.py'}:fails"
    arguments = (f"reward.function={reward}", f"trainer.output_dir={folder / 'run'}")
    # With plain torchrun: its report, which comes last, must repeat the message.
    with Program(folder, config, *arguments, launcher="torch.distributed.run") as program:
        program.wait_until(lambda: has_logged(folder / "run", 1))
        assert program.wait(60) == 1
    assert errors(program.output) == [f"error (rank 0): reward function {reward} raised KeyError: 'no such answer'"]
    message = program.output[program.output.index("error (rank 0)") :]
    assert 'in fails\n    raise KeyError("no such answer")' in message
    assert "set reward.on_error=zero" in message
    report = message[message.index("Root Cause") :]
    assert f"traceback : error (rank 0): reward function {reward} raised KeyError" in report


@pytest.mark.slow  # tests/userland has the message; the overflowing loss of test_bad_input.py is printed once
def test_a_reward_function_that_returns_too_few_values(config, folder):
    (folder / "reward.py").write_text(FAILING)
    reward = f"{folder / 'reward.py'}:too_few"
    arguments = (f"reward.function={reward}", f"trainer.output_dir={folder / 'run'}")
    with Program(folder, config, *arguments) as program:
        assert program.wait(90) == 1
    first, where, remedy = program.output.splitlines()[-3:]
    assert first == f"error (rank 0): reward function {reward} returned 1 values for 8 responses; expected one each"
    assert where.startswith("it was scoring 8 responses, of which the first is ") and "train.jsonl line " in where
    assert remedy.startswith("fix it, or, if few calls fail, set reward.on_error=zero, ")


@pytest.mark.slow  # tests/launch has ranks that hang
def test_a_loss_that_hangs_on_one_rank(config, folder):
    extension = folder / "mine.py"
    extension.write_text(DREAM)
    arguments = (f"trainer.extensions={extension}", "actor.policy_loss=dream", f"trainer.output_dir={folder / 'run'}")
    with Program(folder, config, *arguments, "trainer.hang_timeout_seconds=30", *ENDLESS) as program:
        program.wait_until(lambda: "no rank has made progress" in program.output)
        assert program.wait(60) == 1
    report = program.output[program.output.index("error") :]
    assert errors(report) == [
        "error: no rank has made progress for 30 s (trainer.hang_timeout_seconds): check rank 1 first"
    ]
    first, second = (line for line in report.splitlines() if line.startswith("rank "))
    assert first.startswith("rank 1 (pid ") and first.endswith(" is in update_actor and waits for no other rank:")
    assert second.startswith("rank 0 (pid ") and " is in update_actor and waits in " in second
    assert "in dream\n      time.sleep(1)" in report[: report.index(second)]


@pytest.mark.slow  # tests/launch has ranks that are started again
def test_a_killed_rank_with_a_restart_left(config, folder):
    run = folder / "run"
    arguments = (f"trainer.output_dir={run}", "trainer.total_steps=6", "trainer.save_interval=2")
    with Program(folder, config, *arguments, options=["--max-restarts", "1"]) as program:
        program.wait_until(lambda: (run / "checkpoints" / "latest").exists())
        program.ranks[0].kill()  # the one that owns the engine and the lock
        assert program.wait() == 0, program.output
    [line] = errors(program.output)
    assert line.startswith("error: rank 0 (pid ") and "was ended by SIGKILL" in line
    assert "starting all ranks again; --max-restarts leaves 0 more" in program.output
    assert f"resuming after step 2 from {run}/checkpoints/" in program.output or "after step 4" in program.output
    assert [metrics["step"] for metrics in logged(run)][-1] == 6

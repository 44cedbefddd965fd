"""Faults of runs with engines: in rollouts, rewards, weight sync and the engines themselves."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from commands import assert_equal, tensors_of
from faults import ON_RECORD, UPDATES, Point, Series
from ports import free_port
from program import logged, trained_on

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
AT_ONCE = ("trainer.save_interval=1", "trainer.async_save=false")
"""Finishes a step's checkpoint before the next step begins, and not only before its rewards."""
SAVING = ("trainer.save_interval=1", "trainer.eval_interval=0", "trainer.export_hf=false")
ONE_BY_ONE = "rollout.max_running_requests=4"
"""Makes many requests a step: 128, and 4 more after each sync, one of which is before the first step."""
REWARD = """
import os, signal, time

calls = 0


def hangs(prompts, responses, labels):
    return scores(responses, lambda: time.sleep(10**6))


def dies(prompts, responses, labels):
    return scores(responses, lambda: os.kill(os.getpid(), signal.SIGKILL))


def eats(prompts, responses, labels):
    return scores(responses, lambda: [bytearray(2**28) for _ in range(1000)])


def scores(responses, fault):
    global calls
    calls += 1
    if calls == 2:
        fault()
    return [0.0] * len(responses)
"""
ENDS = {
    "hangs": "took longer than 5 seconds and was stopped",
    "dies": "ended its process (killed by SIGKILL)",
    "eats": "raised MemoryError: ",
}
"""Messages about a reward function with that fault."""
ANSWERS = "megappo.engines.client:checked"


def test_killed_and_asked_to_end_where_engines_are_needed(config, folder):
    """An undisturbed run that replays the recorded rollouts ends in the same state."""
    series = Series(folder, config, f"trainer.record_rollouts={folder / 'record'}", *AT_ONCE, *ON_RECORD, *UPDATES)
    series.harm(Point("megappo.rollouts.rollouts:Rollouts.sample", call=2, rank=0), "kill rank")
    assert series.latest == "step_00000001"
    series.harm(Point("megappo.rollouts.row_builder:RowBuilder.build"), "kill launcher")
    series.harm(Point("megappo.sync.sync:WeightSync._send", call=2, rank=0), "kill all")
    series.harm(Point("megappo.rollouts.record:Record.write", call=2, rank=0), "kill rank")
    series.harm(Point("megappo.rollouts.rollouts:Rollouts.sample", rank=0), "SIGTERM")
    series.finish()
    again = Series(folder / "again", config, f"trainer.replay_rollouts={folder / 'record'}", *ON_RECORD, *UPDATES)
    again.finish()
    assert trained_on(again.out) == trained_on(series.out)
    assert_equal(tensors_of(again.out / "hf_actor"), tensors_of(series.out / "hf_actor"))


@pytest.mark.parametrize("how", ENDS)
def test_a_reward_function_that_does_not_answer(how: str, config, folder):
    (folder / "reward.py").write_text(REWARD)
    function = f"{folder / 'reward.py'}:{how}"
    seconds = 5 if how == "hangs" else 60  # memory may come slowly
    limits = (f"reward.timeout_seconds={seconds}", "reward.memory_limit_gib=2")
    series = Series(folder, config, f"reward.function={function}", *limits, *SAVING)
    with series.start() as program:
        assert program.wait() == 1, program.output
    assert f"error (rank 0): reward function {function} {ENDS[how]}" in program.output, program.output
    assert "Traceback" not in program.output and series.latest == "step_00000001"


def test_an_engine_that_answers_as_another_policy(config, folder):
    """The run ends, before it trains on that."""
    series = Series(folder, config, ONE_BY_ONE, *SAVING)
    output = series.harm(Point(ANSWERS, call=236, rank=0, after=True, again=True), "other policy")
    assert "trainer and SGLang engine disagree about the log-probs of the rollouts by " in output
    assert series.latest == "step_00000001"


def test_an_engine_that_answers_nonsense(config, folder):
    """The engine is restarted, and the run continues."""
    series = Series(folder, config, ONE_BY_ONE, *SAVING, "trainer.total_steps=3")
    output = series.harm(Point(ANSWERS, call=236, rank=0, after=True), "nonsense", code=0)
    assert (
        "WARNING: engine 0 has failed (1 of 3 times in a row; rollout.max_engine_restarts): the engine's reply is "
        in output
    )
    assert [metrics["rollout/engine_restarts"] for metrics in logged(series.out)] == [0, 1, 0]


def steal(port: int) -> socket.socket:
    """Listen there as soon as the engine, which does now or will, does not any more."""
    deadline, seen = time.monotonic() + 120, False
    while time.monotonic() < deadline:
        try:
            if seen:
                return socket.create_server(("127.0.0.1", port))
            socket.create_connection(("127.0.0.1", port)).close()
            seen = True
        except OSError:
            time.sleep(0.001 if seen else 0.1)
    raise TimeoutError


def test_an_engine_that_is_killed_and_its_port_stolen(config, folder):
    """The run ends with an error about the port. Restarted when the port is free, it resumes."""
    port = free_port()
    series = Series(folder, config, f"rollout.port={port}", *SAVING, "trainer.total_steps=2")
    with ThreadPoolExecutor(1) as thread:
        thief = thread.submit(steal, port)
        output = series.harm(Point("megappo.rollouts.rollouts:Rollouts.sample", call=2, rank=0), "kill engine", code=1)
        thief.result().close()
    assert f"error (rank 0): port {port} for an SGLang engine is not free on 127.0.0.1" in output
    assert series.latest == "step_00000001"
    series.finish()

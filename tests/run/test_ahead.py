"""Runs that sample ahead of training: no response is too old, none is lost, and no prompt is trained on twice."""

import random
import shutil
import signal
import time
from collections import Counter
from itertools import chain
from pathlib import Path

import psutil
import pytest
from ahead_runs import journal_lines, trained_responses
from commands import assert_equal, tensors_of
from program import ONE_RANK_EACH, Program, has_logged, logged, trained_on
from safetensors.torch import load_file

from megappo.batch.rows_file import RowsFile
from megappo.observe.files import rows_file

STEPS = 6
AHEAD = (*ONE_RANK_EACH, "placement.rollout=1", "rollout.max_staleness=2", f"trainer.total_steps={STEPS}")
pytestmark = pytest.mark.timeout(900)


def trained_prompts(record: Path) -> Counter[int]:
    """Return how often a run was trained on each prompt."""
    found = Counter[int]()
    for step in range(1, STEPS + 1):
        with RowsFile(rows_file(record, step)) as file:
            found.update(file.facts["prompts"])
    return found


def finished_responses(run: Path) -> dict[tuple[int, int], list[int]]:
    """Return (position of the prompt, sample_index) -> tokens, of the responses in the run's journal."""
    found: dict[tuple[int, int], list[int]] = {}
    for line in journal_lines(run):
        if "sample" in line:
            key, [segment] = (line["position"], line["sample"]["sample_index"]), line["sample"]["segments"]
            assert key not in found
            found[key] = segment["tokens"]
    return found


def written_tokens(run: Path) -> dict[tuple[int, int], list[int]]:
    """Return the same of the first tokens of responses."""
    lines = journal_lines(run)
    partial = [line for line in lines if "written" in line]
    return {(line["position"], line["sample_index"]): line["written"]["tokens"] for line in partial}


def kill(program: Program) -> None:
    for process in [*program.ranks, psutil.Process(program.process.pid)]:
        process.send_signal(signal.SIGKILL)
    program.wait(30)


def check_run(run: Path, record: Path, synchronous_record: Path) -> None:
    """Check the ages of what a finished run was trained on, and that it was trained on each prompt once.

    Args:
        synchronous_record: record of a run that draws the same prompts, and trains on them in this order.
    """
    steps = logged(run)[1:]
    assert [metrics["step"] for metrics in steps] == list(range(1, STEPS + 1))
    assert all(metrics["rollout/response_staleness/max"] <= 2 for metrics in steps)
    assert max(metrics["rollout/staleness/max"] for metrics in steps) > 0
    assert trained_prompts(record) == trained_prompts(synchronous_record)
    kept = [int(path.stem[-8:]) for path in (run / "ahead").glob("engine_*")]
    assert all(version >= STEPS - 2 for version in kept), "what no later step can train on is deleted"


def test_killed_and_resumed(config: Path, run: Path, folder: Path) -> None:
    """The steps after the checkpoint are done again, with the same responses."""
    out, record = folder / "out", folder / "record"
    arguments = (config, *AHEAD, f"trainer.output_dir={out}", f"trainer.record_rollouts={record}")
    with Program(folder / "1", *arguments, "trainer.save_interval=2") as program:
        program.wait_until(lambda: has_logged(out, 4))
        kill(program)
    copy = folder / "copy"
    shutil.copytree(record, copy)
    with Program(folder / "2", *arguments, "trainer.save_interval=2") as program:
        assert program.wait() == 0, program.output
        check_run(out, record, run / "record")
    for step in range(1, 5):
        assert_equal(load_file(rows_file(record, step)), load_file(rows_file(copy, step)))


@pytest.mark.slow  # that a session continues what was aborted is in tests/rollouts/test_sampler.py
def test_unfinished_responses_continue(config: Path, folder: Path) -> None:
    """Once a response of step 2's prompts is finished, the engine, which decodes few at once, writes further ones."""
    out, record = folder / "out", folder / "record"
    keys = (
        "rollout.keep_partial=true",
        "rollout.max_response_length=20",
        "rollout.max_running_requests=5",
        "trainer.save_interval=0",
    )
    further = ("rollout.max_staleness=4", f"trainer.output_dir={out}", f"trainer.record_rollouts={record}")
    arguments = (config, *AHEAD, *keys, *further)
    with Program(folder / "1", *arguments) as program:
        program.wait_until(lambda: any((out / "ahead").glob("engine_*_version_00000001.jsonl")))
        program.process.send_signal(signal.SIGTERM)
        assert program.wait() == 75, program.output
    finished = finished_responses(out)
    written = {key: tokens for key, tokens in written_tokens(out).items() if key not in finished}
    assert written, program.output
    with Program(folder / "2", *arguments) as program:
        assert program.wait() == 0, program.output
    responses = list(chain.from_iterable(trained_responses(record, step) for step in range(1, STEPS + 1)))
    for tokens in written.values():
        assert any(list(one[: len(tokens)]) == tokens and len(one) > len(tokens) for _, one in responses)


@pytest.mark.slow  # what is drawn, and what is in time, are in the tests above
def test_resumed_with_a_lower_limit(config: Path, run: Path, folder: Path) -> None:
    """Four batches are in progress or wait when the limit becomes one."""
    out, record = folder / "out", folder / "record"
    arguments = (config, *AHEAD, f"trainer.output_dir={out}", f"trainer.record_rollouts={record}")
    with Program(folder / "1", *arguments, "rollout.max_staleness=4", "trainer.save_interval=0") as program:
        program.wait_until(lambda: has_logged(out, 1))
        program.process.send_signal(signal.SIGTERM)
        assert program.wait() == 75, program.output
    num_done = len(logged(out)) - 1
    with Program(folder / "2", *arguments, "rollout.max_staleness=1") as program:
        assert program.wait() == 0, program.output
    assert "its responses were sampled with another " in program.output
    steps = logged(out)[1:]
    assert [metrics["step"] for metrics in steps] == list(range(1, STEPS + 1))
    assert all(metrics["rollout/response_staleness/max"] <= 1 for metrics in steps[num_done:])
    assert trained_prompts(record) == trained_prompts(run / "record")


@pytest.mark.slow  # one kill, and the loss of no response, are in the test before
@pytest.mark.parametrize("number", range(8))
def test_killed_at_random(number: int, config: Path, run: Path, folder: Path) -> None:
    """Three kills of each run, at any moment: no finished response is lost. A replay of the record trains alike."""
    draw = random.Random(number)
    out, record = folder / "out", folder / "record"
    arguments = (config, *AHEAD, f"trainer.output_dir={out}", f"trainer.record_rollouts={record}")
    options = (
        f"rollout.on_sync={draw.choice(['continue', 'finish'])}",
        f"rollout.keep_partial={draw.choice(['true', 'false'])}",
        f"trainer.save_interval={draw.choice([2, 6])}",
    )
    finished: dict[tuple[int, int], list[int]] = {}
    for attempt in range(3):
        with Program(folder / f"kill_{attempt}", *arguments, *options) as program:
            reached = draw.randrange(1 + attempt, 3 + attempt)
            program.wait_until(lambda step=reached: has_logged(out, step))
            time.sleep(draw.random())
            kill(program)
        for response, tokens in finished_responses(out).items():
            assert finished.setdefault(response, tokens) == tokens, "a finished response was sampled again"
    with Program(folder / "last", *arguments, *options) as program:
        assert program.wait() == 0, program.output
    check_run(out, record, run / "record")
    again = folder / "again"
    replay = (f"trainer.output_dir={again}", f"trainer.replay_rollouts={record}", "trainer.eval_interval=0")
    with Program(folder / "3", config, *AHEAD, "rollout.max_staleness=0", *replay) as program:
        assert program.wait() == 0, program.output
    assert [metrics["actor/pg_loss"] for metrics in trained_on(again)] == [
        metrics["actor/pg_loss"] for metrics in trained_on(out)
    ]
    assert_equal(tensors_of(again / "hf_actor"), tensors_of(out / "hf_actor"))

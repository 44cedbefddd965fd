"""Runs that sample ahead of training while functions are slow, engines fail and processes are killed."""

import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ahead_runs import Response, journal_lines, trained_responses
from program import ONE_RANK_EACH, Program, has_logged, logged

from megappo.batch.rows_file import RowsFile
from megappo.observe.files import rows_file

NUM_PROMPTS = 1600
"""Prompts of the training data, all different."""
SLOW = '''
"""Episodes, and scores, that take 0 to 0.2 s, and one in twenty 1 to 3 s."""

import asyncio
import random


def delay():
    return random.uniform(1, 3) if random.random() < 0.05 else random.uniform(0, 0.2)


class Environment:
    async def reset(self, row):
        await asyncio.sleep(delay())

    async def step(self, message):
        await asyncio.sleep(delay())
        return None, float("7" in message["content"]), True


async def reward(solution_str, ground_truth):
    await asyncio.sleep(delay())
    return float("7" in solution_str)
'''
EQUAL = """
import zlib
def f(solution_str, ground_truth):
    return 0 if int(ground_truth) % 2 else 1 + zlib.crc32(solution_str.encode()) % 1000
"""
"""All responses to an odd sum have the same score."""
STEPS, BATCH_SIZE, N = 200, 8, 2
LONG = (
    *(*ONE_RANK_EACH, "placement.rollout=1", f"trainer.total_steps={STEPS}", "trainer.save_interval=10"),
    *(f"data.train_batch_size={BATCH_SIZE}", f"rollout.n={N}", "actor.optim.lr=1e-3", "critic.optim.lr=1e-3"),
    *(f"actor.ppo_mini_batch_size={BATCH_SIZE}", f"critic.ppo_mini_batch_size={BATCH_SIZE}"),
    *("trainer.eval_interval=50", "trainer.export_hf=false"),
)
KINDS = {
    2: ("rollout.environment={}:Environment", "reward.function=null"),
    4: ("reward.function={}:reward", "rollout.on_sync=finish"),
}
"""rollout.max_staleness -> keys of its run."""
FAULTS = ("all", "rank 0", "rank 1", "SIGTERM", *["engine"] * 4)
STEP_LINE = re.compile(r"^ *\d+/\d+ ", re.MULTILINE)
Responses = Counter[Response]

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]  # test_ahead.py has kills, test_staleness.py an engine's


@pytest.fixture
def prompts(folder: Path) -> Path:
    """Return a file of sums."""
    path = folder / "train.jsonl"
    sums = [(10 + number // 32, 10 + number % 32) for number in range(NUM_PROMPTS)]
    path.write_text("".join(json.dumps({"prompt": f"{a}+{b}=", "label": str(a + b)}) + "\n" for a, b in sums))
    return path


def kill_engine(program: Program, rank: int) -> None:
    """Kill the scheduler process of a rank's engine, after a step that the program has done."""
    program.wait_until(lambda: STEP_LINE.search(program.output) is not None)
    program.wait_until(lambda: len(schedulers(program, rank)) == 1)
    schedulers(program, rank)[0].kill()


def schedulers(program: Program, rank: int) -> list[psutil.Process]:
    return [process for process in program.ranks[rank].children(recursive=True) if "scheduler" in process.name()]


def end_program(program: Program, ending: str) -> None:
    """Kill or terminate all or some processes of a run, which may be starting."""
    launcher, ranks = psutil.Process(program.process.pid), program.ranks
    if ending == "SIGTERM":
        launcher.terminate()
    elif ending.startswith("rank") and len(ranks) == 2:
        ranks[int(ending[-1])].kill()
    else:
        for process in [*ranks, launcher]:
            process.kill()
    assert program.wait(120) != 0


def journaled(run: Path) -> Responses:
    """Return the finished responses of the journal."""
    found = Responses()
    for line in journal_lines(run):
        if "sample" in line:
            segment = line["sample"]["segments"][0]
            found[tuple(segment["prompt"]), tuple(segment["tokens"])] += 1
    return found


def harm(program: Program, run: Path, faults: Iterator[tuple[int, str]], draw: random.Random) -> bool:
    """Cause the next faults, each after a step, until one ends the program; return whether one did."""
    for step, fault in faults:
        program.wait_until(lambda step=step: has_logged(run, step), 600)
        time.sleep(draw.random())
        if fault != "engine":
            end_program(program, fault)
            return True
        kill_engine(program, 1)
    return False


@pytest.mark.parametrize("max_staleness", KINDS)
def test_nothing_is_too_old_lost_or_trained_on_twice(
    max_staleness: int, config: Path, folder: Path, prompts: Path
) -> None:
    """Two hundred steps, in which the engine is killed four times and the run ended four times, at random moments."""
    draw = random.Random(max_staleness)
    out, record, functions = folder / "out", folder / "record", folder / "slow.py"
    functions.write_text(SLOW)
    arguments = [config, *LONG, f"trainer.output_dir={out}", f"trainer.record_rollouts={record}"]
    arguments += [key.format(functions) for key in KINDS[max_staleness]]
    arguments += [f"rollout.max_staleness={max_staleness}", f"data.train_files={prompts}"]
    steps = sorted(draw.sample(range(1, STEPS - 10), len(FAULTS)))
    faults = zip(steps, draw.sample(FAULTS, len(FAULTS)), strict=True)
    finished: list[Responses] = []
    outputs: list[str] = []
    is_ended = False
    while not is_ended:
        with Program(folder / str(len(outputs)), *arguments) as program:
            if not harm(program, out, faults, draw):
                assert program.wait(600) == 0, program.output
                is_ended = True
        outputs.append(program.output)
        finished.append(journaled(out))
    assert len(outputs) == 1 + len(FAULTS) - FAULTS.count("engine")
    assert 0 < "".join(outputs).count("WARNING: engine 0 has failed") <= FAULTS.count("engine")
    metrics = logged(out)[1:]
    assert [step["step"] for step in metrics] == list(range(1, STEPS + 1))
    ages = Counter(step["rollout/response_staleness/max"] for step in metrics)
    print(f"steps by the age of their oldest response: {sorted(ages.items())}")
    assert max_staleness - 1 <= max(ages) <= max_staleness
    assert all(step["rollout/num_tokens"] == step["rollout/trained_tokens"] for step in metrics), "none was discarded"
    trained, steps_of = Responses(), Counter[tuple[int, ...]]()
    for step in range(1, STEPS + 1):
        responses = Counter(trained_responses(record, step))
        trained += responses
        steps_of.update({prompt for prompt, _ in responses})
        assert responses.total() == BATCH_SIZE * N
    assert len(steps_of) == steps_of.total() == NUM_PROMPTS, "no prompt is skipped or trained on twice"
    print(f"finished responses after each process: {[responses.total() for responses in finished]}")
    for responses in finished:
        assert responses <= trained, "no finished response is lost"


def test_two_engines_and_groups_of_equal_scores(config: Path, folder: Path, prompts: Path) -> None:
    """The run is killed."""
    out, record = folder / "out", folder / "record"
    (folder / "reward.py").write_text(EQUAL)
    arguments = (
        *(config, *ONE_RANK_EACH, "placement.rollout=1-2", "rollout.max_staleness=2", "trainer.save_interval=2"),
        *("trainer.total_steps=8", "trainer.eval_interval=0", f"data.train_files={prompts}"),
        *(f"trainer.output_dir={out}", f"trainer.record_rollouts={record}"),
        *(f"reward.function={folder / 'reward.py'}:f", "algorithm.filter_groups.enable=true"),
    )
    three_ranks = ("--nproc-per-node", "3")
    with Program(folder / "1", *arguments, options=three_ranks) as program:
        program.wait_until(lambda: has_logged(out, 5))
        assert {path.name[:8] for path in (out / "ahead").glob("engine_*")} == {"engine_0", "engine_1"}
        end_program(program, "all")
    with Program(folder / "2", *arguments, options=three_ranks) as program:
        assert program.wait() == 0, program.output
    trained, num_drawn, num_equal = Counter(), 0, 0
    for step, metrics in enumerate(logged(out), start=1):
        assert metrics["rollout/response_staleness/max"] <= 2
        with RowsFile(rows_file(record, step)) as file:
            facts = file.facts
            scores = file.field("scores").reshape(32, 4)
        assert (scores.min(dim=1).values < scores.max(dim=1).values).all()
        assert metrics["filter_groups/equal_groups_kept"] == 0
        num_drawn, num_equal = facts["prompts_drawn"], num_equal + metrics["filter_groups/equal_groups"]
        trained.update(facts["prompts"])
    assert len(trained) == trained.total() == 8 * 32, "no prompt is trained on twice"
    assert all(sum(divmod(index, 32)) % 2 == 0 for index in trained)
    assert 0 <= num_drawn - trained.total() - num_equal <= 3 * 32, "no prompt is skipped"

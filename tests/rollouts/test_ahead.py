"""Sampling ahead: which steps have enough groups, so that none becomes too old, and what the journal keeps."""

import random
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed as dist

from megappo.engines.generations import Generation
from megappo.observe.metrics import Metric
from megappo.rollouts.ahead import SharedCounts, has_enough
from megappo.rollouts.journal import BegunGroup, Choice, FinishedGroup, Journal
from megappo.rollouts.sample_rows import Sample, Segment
from megappo.userland.grades import Grade

SIZE = 4


@pytest.mark.parametrize("max_staleness", [1, 2, 4, 8])
@pytest.mark.parametrize("num_slots", [3, 8, 100])
def test_no_group_becomes_too_old_and_none_is_left(max_staleness: int, num_slots: int) -> None:
    """An engine with some slots and random durations: groups overtake each other, and the models' speed varies."""
    draw = random.Random(f"{max_staleness}/{num_slots}")
    begun: dict[int, tuple[int, float]] = {}  # number -> version, time at which it is finished
    finished: dict[int, tuple[int, float]] = {}
    clock, num_begun, ages = 0.0, 0, []
    for step in range(1, 81):
        may_begin = (step + max_staleness) * SIZE
        ends_at_the_earliest = clock + draw.choice([0.0, 3.0])
        while True:
            while num_begun < may_begin and len(begun) < num_slots:
                begun[num_begun] = step - 1, clock + draw.choice([0.5, 1.0, draw.expovariate(0.1)])
                num_begun += 1
            for number in [number for number, (_, end) in begun.items() if end <= clock]:
                finished[number] = begun.pop(number)
            counts = [Counter(version for version, _ in groups.values()) for groups in (finished, begun)]
            if clock >= ends_at_the_earliest and has_enough(*counts, step, SIZE, max_staleness):
                break
            clock = min([end for _, end in begun.values() if end > clock] or [clock + 1])
        for number in sorted(finished, key=finished.__getitem__)[:SIZE]:
            ages.append(step - 1 - finished.pop(number)[0])
    assert max(ages) <= max_staleness
    assert min(ages) >= 0
    assert len(ages) == 80 * SIZE


def test_a_step_waits_for_groups_that_a_later_one_could_not_take() -> None:
    # Version 0 must be trained on by step 2: of six groups, step 1 takes four, and two of these may remain.
    assert has_enough({0: 4}, {0: 2}, step=1, batch_size=4, max_staleness=1)
    assert not has_enough({0: 1, 1: 3}, {0: 4}, step=2, batch_size=4, max_staleness=1)
    assert not has_enough({0: 3, 1: 1}, {0: 1}, step=2, batch_size=4, max_staleness=1)
    assert has_enough({0: 3, 1: 1}, {1: 4}, step=2, batch_size=4, max_staleness=1)
    assert not has_enough({0: 3}, {}, step=1, batch_size=4, max_staleness=1)


def test_engines_share_counts() -> None:
    store = dist.HashStore()
    one, other = SharedCounts(store), SharedCounts(store)
    assert [one.take(2), other.take(3), one.take(0)] == [0, 2, 5]
    one.add("begun", 3, 2)
    other.add("finished", 3)
    assert one.total("begun", [3, 4]) == {3: 2, 4: 0}
    assert one.total("finished", [3]) == {3: 1}


def sample(order: int = 0) -> Sample:
    segments = [Segment([5, 6], "text", [7, 8], [-0.1, None], [0.0, 1.5], [1, 0])]
    return Sample(0, order, segments, "done", Counter({"calls": 2.0}))  # as an episode counts


def write_group(journal: Journal, position: int, version: int) -> None:
    graded = sample()
    journal.write_sample(position, version, graded)
    graded.grade = Grade([1.25], {"part": 0.1}, "answer", steps=[[(3, 0.5)]])
    failures = {"errors": Metric((1,), "sum")}
    journal.write_grades(FinishedGroup(position, version, False, [graded], failures))


def test_the_journal_returns_groups_as_they_were(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0, 1, {"rollout.n": 1})
    for position in range(4):
        write_group(journal, position, version=position // 2)
    finished, begun = Journal(tmp_path, 0, 1, {"rollout.n": 1}).read()
    assert finished.keys() == {0, 1, 2, 3}
    assert not begun
    [found] = finished[3].samples
    assert found.segments == sample().segments
    assert (found.ending, found.parts, found.grade.scores, found.grade.totals) == (
        "done",
        {"calls": 2.0},
        [1.25],
        [1.75],
    )
    assert (finished[3].version, finished[3].failures) == (1, {"errors": Metric((1,), "sum")})


def test_the_journal_returns_responses_of_groups_that_are_not_finished(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0, 1, {})
    written = [
        Generation([3], [-1.0], "abort", versions=[1]),
        Generation([3, 4], [-1.0, -2.0], "abort", versions=[1, 2]),
    ]
    journal.write_partial(5, 1, 1, written[0])
    journal.write_sample(5, 1, sample(order=2))
    journal.write_partial(5, 1, 1, written[1])
    finished, begun = Journal(tmp_path, 0, 1, {}).read()
    assert not finished
    assert begun == {5: BegunGroup(1, [sample(order=2)], {1: written[1]})}


def test_the_journal_survives_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0, 1, {})
    write_group(journal, 0, 0)
    [path] = (tmp_path / "ahead").iterdir()
    path.write_text(path.read_text("utf-8") + '{"position": 1, "samp', "utf-8")
    resumed = Journal(tmp_path, 0, 1, {})
    assert resumed.read()[0].keys() == {0}
    write_group(resumed, 2, 0)
    assert Journal(tmp_path, 0, 1, {}).read()[0].keys() == {0, 2}


def test_the_journal_of_two_engines_is_taken_over_by_one(tmp_path: Path) -> None:
    for number in range(2):
        write_group(Journal(tmp_path, number, 2, {}), number, 0)
    assert Journal(tmp_path, None, 1, {}).read() == ({}, {})
    assert Journal(tmp_path, 0, 1, {}).read()[0].keys() == {0, 1}


def test_the_journal_forgets_what_is_old_or_of_other_settings(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0, 1, {"model.path": "a"})
    for version in range(3):
        write_group(journal, version, version)
    journal.forget(1)
    assert journal.read()[0].keys() == {1, 2}
    assert Journal(tmp_path, 0, 1, {"model.path": "b"}).read() == ({}, {})
    assert journal.read() == ({}, {})


def test_the_journal_keeps_the_choices_of_steps(tmp_path: Path) -> None:
    journal = Journal(tmp_path, None, 1, {})
    assert journal.read_choices() == {}
    first, second = Choice([0, 2], [], 2), Choice([1, 3], [4], 1)
    journal.write_choice(1, first)
    journal.write_choice(2, Choice([1], [], 1))
    journal.write_choice(2, second)
    assert journal.read_choices() == {1: first, 2: second}
    journal.forget_choices(1)
    assert journal.read_choices() == {2: second}

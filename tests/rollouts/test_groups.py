"""Groups of responses: which ones a step waits for, so that none becomes too old, and what the journal keeps."""

import itertools
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from samplers import queue_config
from samples_of import sample_of

from megappo.data.prompts import Prompt
from megappo.engines.generations import Generation
from megappo.observe.metrics import Metric
from megappo.rollouts.fingerprint import prompt_digest
from megappo.rollouts.group_queue import GroupQueue
from megappo.rollouts.group_sampler import EngineShare
from megappo.rollouts.journal import Choice, Group, GroupFacts, Journal, unchanged
from megappo.rollouts.rank_groups import RankGroups, SharedCounts, differ
from megappo.rollouts.sample_rows import Sample, Segment
from megappo.userland.grades import Grade
from megappo.userland.rewards import RewardError

SIZE = 4


@pytest.mark.parametrize("max_staleness", [1, 2, 4, 8])
@pytest.mark.parametrize("num_slots", [3, 8, 100])
def test_no_group_becomes_too_old_and_steps_take_them_in_their_order(max_staleness: int, num_slots: int) -> None:
    """An engine with some slots and random durations: groups overtake each other, and the models' speed varies."""
    draw = random.Random(f"{max_staleness}/{num_slots}")
    queue = make_queue(max_staleness, filters=False)
    numbers = itertools.count()
    begun: dict[int, tuple[int, float]] = {}  # position -> version, time at which it is finished
    done: dict[int, int] = {}  # position -> version
    clock, num_begun, ages, trained = 0.0, 0, [], []
    for step in range(1, 81):
        queue.admit(step, lambda: [(next(numbers), None) for _ in range(SIZE)])
        ends_at_the_earliest = clock + draw.choice([0.0, 3.0])
        while True:
            while num_begun < len(queue.admitted) and len(begun) < num_slots:
                begun[queue.admitted[num_begun]] = step - 1, clock + draw.choice([0.5, 1.0, draw.expovariate(0.1)])
                num_begun += 1
            for position in [position for position, (_, end) in begun.items() if end <= clock]:
                done[position] = begun.pop(position)[0]
            if clock >= ends_at_the_earliest and queue.has_enough(queue.num_waiting(), blocks(done), Counter()):
                break
            clock = min([end for _, end in begun.values() if end > clock] or [clock + 1])
        queue.finished = [GroupFacts(position, False) for position in sorted(done)]
        choice = queue.choose(step)
        trained += choice.chosen
        ages += [step - 1 - done.pop(position) for position in choice.chosen]
        queue.remove(choice)
        queue.adapt_lookahead(draw.choice([0.0, 0.5]))
    assert trained == list(range(80 * SIZE))
    assert queue.lookahead == max_staleness
    assert max(ages) <= max_staleness
    assert min(ages) >= 0


def blocks(positions: Iterable[int]) -> Counter[int]:
    return Counter(position // SIZE for position in positions)


def test_a_step_waits_for_the_first_prompts_however_many_others_are_finished() -> None:
    queue = make_queue(max_staleness=2)
    queue.adapt_lookahead(0.5)
    for _ in range(2):  # filter_groups.max_num_gen_batches is 2, and 3 batches may be ahead
        queue.num_draws = 0
        queue.admit(1, lambda: [(len(queue.prompts) + i, None) for i in range(SIZE)])
    assert not queue.has_enough(queue.num_waiting(), blocks([0, 1, 3, *range(4, 12)]), Counter())
    assert queue.has_enough(queue.num_waiting(), blocks(range(4)), Counter())
    # One of the first block is left out: the step needs a whole block more.
    assert not queue.has_enough(queue.num_waiting(), blocks([0, 1, 2, 4, 5, 6]), blocks([3]))
    assert queue.has_enough(queue.num_waiting(), blocks([0, 1, 2, 4, 5, 6, 7]), blocks([3]))
    queue.finished = [GroupFacts(position, position == 3) for position in range(8)]
    queue.remove(choice := queue.choose(1))
    assert choice == Choice(1, [0, 1, 2, 4], [3], 1)
    assert not queue.has_enough(queue.num_waiting(), blocks([5, 6, 7, 8, 9, 10]), Counter())
    assert queue.has_enough(queue.num_waiting(), blocks(range(5, 12)), Counter())


def test_prompts_are_begun_further_ahead_while_the_models_wait_long() -> None:
    queue = make_queue(max_staleness=3, filters=False)
    num_admitted = []
    for step, waited_frac in enumerate([0.5, 0.05, 0.5, 0.5], start=1):
        queue.admit(step, lambda: [(len(queue.admitted) + i, None) for i in range(SIZE)])
        num_admitted.append(len(queue.admitted) / SIZE)
        queue.finished = [GroupFacts(position, False) for position in sorted(queue.prompts)]
        queue.remove(queue.choose(step))
        queue.adapt_lookahead(waited_frac)
    assert num_admitted == [2, 4, 5, 7], "one ahead, then two, two and three"
    assert queue.lookahead == 3


def test_each_admitted_prompt_is_taken_by_one_engine() -> None:
    store, admitted, draw = dist.HashStore(), list[int](), random.Random(0)
    engines = [EngineShare(admitted, 3, SharedCounts(store, SIZE)) for _ in range(3)]
    taken = [list[int]() for _ in engines]
    for first in range(0, 60, 6):
        admitted += range(100 + first, 106 + first)
        for number in draw.choices(range(3), k=8):
            taken[number] += engines[number].take(4)
    for _ in range(20):
        for engine, own in zip(engines, taken, strict=True):
            own += engine.take(4)
    assert sorted(sum(taken, [])) == admitted
    assert all(taken), "an engine leaves others a share"


def make_queue(max_staleness: int = 1, *, filters: bool = True) -> GroupQueue:
    return GroupQueue(
        queue_config(SIZE, max_staleness=max_staleness, **({"max_num_gen_batches": 2} if filters else {}))
    )


def test_groups_of_equal_scores_make_room_for_others_and_then_fill_up_the_step() -> None:
    queue = make_queue()
    draws = iter([[(first + i, None) for i in range(SIZE)] for first in range(0, 10 * SIZE, SIZE)])
    queue.admit(1, lambda: next(draws))
    assert queue.admitted == list(range(2 * SIZE)), "two batches"
    queue.finished = [GroupFacts(position, True) for position in range(2 * SIZE)]
    queue.num_draws = 0
    queue.admit(1, lambda: next(draws))
    assert (len(queue.prompts), queue.num_draws, queue.takes_equal) == (4 * SIZE, 2, True)
    queue.admit(1, lambda: pytest.fail("filter_groups.max_num_gen_batches is reached"))
    choice = queue.choose(1)
    assert choice == Choice(1, [0, 1, 2, 3], [4, 5, 6, 7], 2)
    queue.remove(choice)
    assert (sorted(queue.prompts), queue.finished) == (list(range(2 * SIZE, 4 * SIZE)), [])


@pytest.mark.parametrize("draw_size", [SIZE, SIZE + 2])
def test_steps_that_wait_choose_as_a_plain_loop_over_whole_draws(draw_size: int) -> None:
    """The scores of about half of the groups are equal; three draws at most."""
    for seed in range(50):
        rng = random.Random(seed)
        is_equal = [rng.random() < 0.5 for _ in range(100 * draw_size)]
        queue = GroupQueue(queue_config(SIZE, None if draw_size == SIZE else draw_size, max_num_gen_batches=3))
        draws = ([(first + i, None) for i in range(draw_size)] for first in itertools.count(0, draw_size))
        drawn = 0
        for step in range(1, 9):
            queue.num_draws = 0
            finished: set[int] = set()
            while not has_enough(queue, finished, is_equal):
                queue.finished = [GroupFacts(position, is_equal[position]) for position in sorted(finished)]
                queue.admit(step, partial(next, draws))
                finished.add(rng.choice(sorted(queue.prompts.keys() - finished)))
            queue.finished = [GroupFacts(position, is_equal[position]) for position in sorted(finished)]

            places: list[int] = []
            num_draws = 0
            while sum(not is_equal[place] for place in places) < SIZE and num_draws < 3:
                places += range(drawn, drawn + draw_size)
                drawn += draw_size
                num_draws += 1
            choice = queue.choose(step)
            queue.remove(choice)
            assert sorted(choice.chosen + choice.left_out) == places, "the next step begins with a new draw"
            assert (choice.num_draws, queue.prompts, queue.drawn) == (num_draws, {}, {})
            usable = sorted(finished) if draw_size > SIZE else places
            expected = sorted(usable, key=lambda place: (is_equal[place], place))[:SIZE]
            assert choice.chosen == sorted(expected), "over-sampling: of the first finished ones"


def has_enough(queue: GroupQueue, finished: set[int], is_equal: list[bool]) -> bool:
    waiting = queue.num_waiting()
    size = max(1, queue._draw_size)
    counts = [Counter(place // size for place in finished if is_equal[place] == equal) for equal in (False, True)]
    return queue.has_enough(waiting, *counts)


def test_over_sampling_ahead_takes_the_first_of_each_draw() -> None:
    """A step drops the rest of its draw; the draws after it are begun, and stay."""
    queue = GroupQueue(queue_config(2, 5, max_staleness=1))
    numbers = itertools.count()
    is_equal = [False] * 100
    for step, finished in ((1, {3, 1, 6}), (2, {6, 9, 8, 12}), (3, {10, 14})):
        queue.admit(step, lambda: [(next(numbers), None) for _ in range(5)])
        first = 5 * (step - 1)
        assert queue.prompts.keys() == set(range(first, first + 10))
        own = {place for place in finished if place < first + 5}
        assert not has_enough(queue, finished - {min(own), sorted(own)[1]}, is_equal)
        assert has_enough(queue, finished, is_equal)
        queue.finished = [GroupFacts(position, False) for position in sorted(finished)]
        choice = queue.choose(step)
        assert choice.chosen == sorted(own)[:2]
        assert sorted(choice.chosen + choice.left_out) == list(range(first, first + 5))
        queue.remove(choice)


def test_a_group_counts_if_a_metric_differs_within_it() -> None:
    def group(*grades: Grade) -> list[Sample]:
        samples = [sample_of(0, i, [1], [-1.0]) for i in range(len(grades))]
        for one, grade in zip(samples, grades, strict=True):
            one.grade = grade
        return samples

    zero, one = Grade([0.0], {"acc": 0.0}), Grade([1.0], {"acc": 0.0})
    other, failed = Grade([0.0], {"acc": 1.0}), Grade([], {}, failed=True)
    assert differ(group(zero, one), "score") and not differ(group(zero, one), "acc")
    assert differ(group(zero, other), "acc") and not differ(group(zero, other), "score")
    for metric in ("acc", "score"):
        assert not differ(group(zero, failed), metric), "what failed makes no difference"
    with pytest.raises(RewardError, match="filter_groups.metric accuracy: the reward .* no such .*, but score, acc\n"):
        differ(group(zero, one), "accuracy")


def test_finished_groups_are_counted_until_a_step_takes_them(tmp_path: Path) -> None:
    shared = SharedCounts(dist.HashStore(), SIZE)
    groups = RankGroups(shared, Journal(tmp_path, 0, 1, {}))
    first, second, third = groups.begin({at: Prompt(at, [at], str(at), None) for at in (7, 8, 9)}, version=3)
    third.is_equal = True
    for group in (first, third):
        groups.finish(group)
    assert (shared.total("finished", [1, 2]), shared.total("equal", [1, 2])) == ({1: 1, 2: 0}, {1: 0, 2: 1})
    assert (groups.finished(), groups.num_equal) == ([GroupFacts(7, False), GroupFacts(9, True)], 1)
    assert groups.remove([5, 7, 9]) == [first, third]
    assert (shared.total("finished", [1]), shared.total("equal", [2])) == ({1: 0}, {2: 0})
    assert groups.unfinished() == [second]


def sample(order: int = 0) -> Sample:
    segments = [Segment([5, 6], [7, 8], [-0.1, None], [0.0, 1.5], [1, 0], parent=3)]
    return Sample(0, order, segments, "done", Counter({"calls": 2.0}))  # as an episode counts


def write_group(journal: Journal, position: int, version: int) -> None:
    group, graded = Group(position, version, str(position)), sample()
    journal.write_sample(group, graded)
    graded.grade = Grade([1.25], {"part": 0.1}, "answer", steps=[[(3, 0.5)]])
    group.samples.append(graded)
    group.failures = {"errors": Metric((1,), "sum")}
    journal.write_grades(group)


def test_the_journal_returns_groups_as_they_were(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0, 1, {"rollout.n": 1})
    for position in range(4):
        write_group(journal, position, version=position // 2)
    groups = Journal(tmp_path, 0, 1, {"rollout.n": 1}).read()
    groups = {position: group for (position, _), group in groups.items()}
    assert groups.keys() == {0, 1, 2, 3}
    assert all(group.is_finished for group in groups.values())
    [found] = groups[3].samples
    assert found.segments == sample().segments
    assert (found.ending, found.parts, found.grade.scores, found.grade.totals) == (
        "done",
        {"calls": 2.0},
        [1.25],
        [1.75],
    )
    assert (groups[3].version, groups[3].failures) == (1, {"errors": Metric((1,), "sum")})


def test_the_journal_returns_responses_of_groups_that_are_not_finished(tmp_path: Path) -> None:
    journal, group = Journal(tmp_path, 0, 1, {}), Group(5, 1, "5")
    group.written[1] = Generation([3], [-1.0], "abort", versions=[1])
    journal.write_partial(group, 1)
    journal.write_sample(group, sample(order=2))
    group.written[1] = Generation([3, 4], [-1.0, -2.0], "abort", versions=[1, 2])
    journal.write_partial(group, 1)
    assert Journal(tmp_path, 0, 1, {}).read() == {(5, "5"): Group(5, 1, "5", [sample(order=2)], group.written)}


def test_the_journal_survives_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0, 1, {})
    write_group(journal, 0, 0)
    [path] = (tmp_path / "ahead").iterdir()
    path.write_text(path.read_text("utf-8") + '{"position": 1, "samp', "utf-8")
    resumed = Journal(tmp_path, 0, 1, {})
    assert resumed.read().keys() == {(0, "0")}
    write_group(resumed, 2, 0)
    assert Journal(tmp_path, 0, 1, {}).read().keys() == {(0, "0"), (2, "2")}


def test_the_journal_of_two_engines_is_taken_over_by_one(tmp_path: Path) -> None:
    for number in range(2):
        write_group(Journal(tmp_path, number, 2, {}), number, 0)
    assert Journal(tmp_path, None, 1, {}).read() == {}
    assert Journal(tmp_path, 0, 1, {}).read().keys() == {(0, "0"), (1, "1")}


def test_responses_to_prompts_that_have_changed_are_sampled_again(capsys: pytest.CaptureFixture) -> None:
    prompts = [Prompt(0, [1], "1+1=", "2"), Prompt(1, [1], "1+1=", "3"), Prompt(2, [2], "2+1=", "3", {"level": 1})]
    groups = [Group(position, 0, prompt_digest(prompt)) for position, prompt in enumerate(prompts)]
    assert unchanged(groups, prompts) == dict(enumerate(groups))
    moved = [replace(prompts[0], index=7), replace(prompts[1], label="2"), replace(prompts[2], columns={"level": 2})]
    assert unchanged(groups, moved) == {0: groups[0]}
    assert "responses to 2 prompts are sampled again: prompts, labels or other fields" in capsys.readouterr().out


def test_the_journal_forgets_what_is_old_or_of_other_settings(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    journal = Journal(tmp_path, 0, 1, {"model.path": "a"})
    for version in range(3):
        write_group(journal, version, version)
    journal.forget(1)
    assert journal.read().keys() == {(1, "1"), (2, "2")}
    assert Journal(tmp_path, 0, 1, {"model.path": "b"}).read() == {}
    assert "its responses were sampled with another model.path\n" in capsys.readouterr().out
    assert journal.read() == {}


def test_the_journal_keeps_the_choices_of_steps(tmp_path: Path) -> None:
    journal = Journal(tmp_path, None, 1, {})
    assert journal.forget_choices(0) == {}
    first, second = Choice(1, [0, 2], [], 2), Choice(2, [1, 3], [4], 1)
    for choice in (first, Choice(2, [1], [], 1), second):
        journal.write_choice(choice)
    with (tmp_path / "ahead" / "choices.jsonl").open("a") as file:
        file.write('{"step": 3, "cho')  # cut short by a kill
    assert journal.forget_choices(0) == {1: first, 2: second}
    journal.write_choice(third := Choice(3, [5], [], 0))
    assert journal.forget_choices(1) == {2: second, 3: third}
    assert journal.forget_choices(2) == {3: third}

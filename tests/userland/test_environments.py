"""Environments in worker processes: many at once; whatever they do, the trainer continues or reports why not."""

import asyncio
import contextlib
import time

import psutil
import pytest

from megappo.userland import worker_process
from megappo.userland.environments import EnvironmentPool, Replacement
from megappo.userland.episode_pool import EnvironmentFault, EpisodeLost

TURN = {"role": "assistant", "content": "x", "token_ids": [1, 2]}


def pool_of(environments, name: str, num_workers: int = 1, seconds: float = 0.5) -> EnvironmentPool:
    return EnvironmentPool(name, [str(environments), name], num_workers=num_workers, timeout_seconds=seconds)


async def episode(pool: EnvironmentPool, number: int = 3) -> list:
    async with pool.session() as environment:
        found = [await environment.reset({"number": number})]
        while True:
            observation, reward, done, _ = await environment.step(TURN)
            found.append((observation, reward))
            if done:
                return found


def play(pool: EnvironmentPool, count: int) -> list:
    async def all_of_them():
        return await asyncio.gather(*(episode(pool) for _ in range(count)), return_exceptions=True)

    return asyncio.run(all_of_them())


def test_many_episodes_run_at_once_in_each_process(environments):
    with pool_of(environments, "Counts", 2, seconds=60.0) as pool:
        assert pool.takes.needed == ("number",)
        start = time.monotonic()
        found = play(pool, 100)
        assert time.monotonic() - start < 10.0, "one after the other they take 60 s"
        message = [[{"role": "user", "content": f"left {left}"}] for left in (2, 1, 0)]
        assert found == [[[], *((one, 1.0) for one in message)]] * 100
        assert play(pool, 2) == found[:2], "in another event loop"


def test_plain_methods_have_threads_of_their_own(environments):
    with pool_of(environments, "Plain", seconds=60.0) as pool:
        start = time.monotonic()
        assert play(pool, 50) == [[[{"role": "tool", "content": "3"}], ([], [0.5, 0.5])]] * 50
        assert time.monotonic() - start < 5.0


def test_an_observation_may_replace_the_conversation(environments):
    with pool_of(environments, "Rewrites", seconds=60.0) as pool:
        for number, count in ((2, 1), (3, 2)):
            [_, (observation, _)] = asyncio.run(episode(pool, number))
            assert isinstance(observation, Replacement)
            assert observation == [{"role": "user", "content": "a" if count == 2 else "again"}] * count


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raises", "step raised KeyError: 'no such thing'"),
        ("Exits", "step raised SystemExit: 3"),
        ("ThreeOnly", r"step returned 3; expected \(observation, reward, done\)"),
        ("NoJson", "step returned something that is no JSON: {1, 2} is set"),
        ("HalfACharacter", "step returned the observation .*, which is no text: .* surrogates not allowed"),
        ("NoText", "step returned the observation 3; expected a text"),
        ("RewritesToNothing", "step returned the observation .*; expected .*, or {'replace': messages} with at least"),
        ("RewritesAndMore", "step returned the observation .*; expected a text, None, messages"),
        ("NoNumber", "step returned the reward '1'; expected a finite number"),
        ("NotFinite", "step returned the reward nan; expected a finite number"),
        ("TooLarge", "step returned the reward 1000.*; expected a finite number"),
        ("NoBool", "step returned .*'no'.; expected .* done is True or False"),
        ("TooManyRewards", "step returned 9 rewards for a turn of 2 tokens; expected as many, or one"),
    ],
)
def test_an_environments_fault_is_reported(environments, name, message):
    with pool_of(environments, name, seconds=60.0) as pool:
        [error] = play(pool, 1)
        with pytest.raises(EnvironmentFault, match=f"^environment {name} {message}"):
            raise error


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Hangs", "step took longer than 0.5 seconds"),
        ("HangsInAThread", "step took longer than 0.5 seconds"),
        ("Blocks", "step took longer than 0.5 seconds and was stopped"),
        ("Dies", "step ended its process (exit code 3)"),
    ],
)
def test_an_environment_that_does_not_answer_loses_its_episode_alone(environments, name, message, monkeypatch):
    monkeypatch.setattr(worker_process, "GRACE_SECONDS", 1.0)
    with pool_of(environments, name, 2) as pool:
        for _ in range(2):  # the second time in processes restarted, where these had to end
            found = play(pool, 4)
            assert all(isinstance(one, EpisodeLost) for one in found)
            assert message in map(str, found)
    assert not [one for one in psutil.Process().children(recursive=True) if "environments" in " ".join(one.cmdline())]


def test_a_process_that_ends_takes_the_episodes_that_it_hosts_and_no_others(environments):
    async def all_of_them():
        one = await asyncio.gather(*(episode(pool, number) for number in (100, 2)), return_exceptions=True)
        return [*one, *await asyncio.gather(*(episode(pool, 100) for _ in range(4)), return_exceptions=True)]

    with pool_of(environments, "DiesOfAHundred", 2, seconds=60.0) as pool:
        descriptors = psutil.Process().num_fds()
        first, other, *later = asyncio.run(all_of_them())
        assert isinstance(first, EpisodeLost) and isinstance(other, list)
        assert all(isinstance(one, EpisodeLost) for one in later)
        assert psutil.Process().num_fds() <= descriptors
        zombies = [p for p in psutil.Process().children(recursive=True) if p.status() == psutil.STATUS_ZOMBIE]
        assert len(zombies) <= 2, "those in whose place nobody is yet"


def test_an_environment_that_is_left_while_it_is_made_is_closed(environments):
    async def leave():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1), pool.session() as environment:
                await environment.reset({"number": 1})
        await asyncio.sleep(1.0)
        async with pool.session() as environment:
            return await environment.reset({"number": 1})

    with pool_of(environments, "Slow", seconds=60.0) as pool:
        assert asyncio.run(leave()) == [{"role": "user", "content": "2 made, 1 closed"}]


def test_an_environment_that_is_left_in_a_step_is_closed_when_that_has_ended(environments):
    """And its worker serves on in another event loop."""

    async def leave():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5), pool.session() as environment:
                await environment.reset({"number": 1})
                await environment.step(TURN)

    async def look():
        async with pool.session() as environment:
            [message] = await environment.reset({"number": 1})
            return message["content"]

    with pool_of(environments, "Long", seconds=60.0) as pool:
        started = time.monotonic()
        asyncio.run(leave())
        assert time.monotonic() - started < 3.0
        time.sleep(1.0)
        assert asyncio.run(look()) == "1 ended, 1 closed"


async def leave_after(pool: EnvironmentPool, seconds: float, count: int) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*(episode(pool) for _ in range(count)))


@pytest.mark.parametrize("name", ["ClosesSlowly", "MadeSlowly", "NotCancelled"])
def test_what_is_left_is_closed_later_and_before_its_worker_ends(environments, name, monkeypatch, tmp_path):
    closed = tmp_path / "closed"
    monkeypatch.setenv("CLOSED", str(closed))
    with pool_of(environments, name, seconds=8.0) as pool:
        before = workers()
        for _ in range(2):
            asyncio.run(leave_after(pool, 0.5, 3))
        assert workers() == before
        assert not closed.exists()
        (tmp_path / "closed may be").touch()
    assert closed.read_text() == "x" * 6
    assert not workers()


def test_answers_that_have_come_in_part_are_lost_to_no_other_event_loop(environments):
    with pool_of(environments, "SaysMuch", seconds=60.0) as pool:
        before = workers()
        for tick in range(12):
            asyncio.run(leave_after(pool, 0.01 * tick, 1))
        [[_, ([message], _)]] = play(pool, 1)
        assert message["content"] == "x" * 2**23
        assert workers() == before


def workers() -> set[int]:
    """The pids of worker processes."""
    found = psutil.Process().children(recursive=True)
    return {one.pid for one in found if "megappo.userland.worker" in one.cmdline()}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Nothing", "does not exist: the file defines .*Counts"),
        ("NoStep", "has no step: expected a class"),
        ("OneColumn", "has columns = 'number'; expected a tuple of names"),
        ("NoTools", "returned something that is no JSON: <class 'environments.Counts'> is type"),
    ],
)
def test_a_class_that_cannot_be_loaded_is_reported_at_the_start(environments, name, message):
    with pytest.raises(EnvironmentFault, match=f"^environment {name} {message}"):
        pool_of(environments, name)

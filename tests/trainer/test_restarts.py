"""Engines that fail while they sample: which prompts are sent again, who restarts what, and when the run gives up."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from engine_handles import restarts_of
from engine_server import EngineServer
from spawn import run_ranks

from megappo.batch.exchange import Exchange
from megappo.config.schema import Config
from megappo.data.prompts import Prompt
from megappo.engines.client import EngineClient, EngineError, EngineFault
from megappo.engines.handle import EngineHandle
from megappo.engines.restarts import EngineLost, EngineRestarts
from megappo.rollouts.datasets import Datasets
from megappo.rollouts.rollouts import Rollouts
from megappo.runtime.listening import run_store

EXPLAINING = SimpleNamespace(explain=str)
CONFIG = {
    "model": {"path": "m"},
    "data": {"train_files": ["f"], "train_batch_size": 50},
    "trainer": {"output_dir": "o"},
    "rollout": {"max_running_requests": 8},
}
PROMPTS = [Prompt(i, [i + 1], "", None) for i in range(50)]


class Engine:
    """A server in an engine's place; a restart cures it."""

    def __init__(self, server: EngineServer):
        self.server = server
        self.num_restarts = 0

    def wait_ready(self) -> EngineClient:
        return self.server.client()

    def explain(self, fault: EngineFault) -> str:
        return str(fault)

    def stop(self) -> None:
        pass

    def restart(self) -> None:
        self.server.failure = ""
        self.num_restarts += 1


def sample_with_faults(rank: int, world_size: int) -> None:
    """Rank 0 has no engine. Both engines fail at once, then rank 2's alone."""
    given, store = [], dist.PrefixStore("faults", run_store())
    with EngineServer("no list", num_well=2 * rank) as server:
        engine = Engine(server)
        own = EngineHandle(rank - 1, engine) if rank else EngineHandle()
        exchange, datasets = Exchange(dist.group.WORLD), Datasets(None, (), 30, None, {})
        own.wait_ready()
        config, restarts = Config.model_validate(CONFIG), restarts_of(own, exchange)
        rollouts = Rollouts(config, datasets, restarts, exchange, workers={}, num_engines=2)
        rollouts.restarts.give_weights = lambda: given.append(engine.num_restarts)
        for count, failing in enumerate(("no list", "no list" if rank == 2 else "")):
            server.failure = failing
            if count == 1:  # the well engine must not have taken all prompts before the other one gets any
                server.before = partial(store.set, "sent", "") if rank == 2 else partial(store.wait, ["sent"])
            samples = rollouts.sample(PROMPTS, 2, rollouts.training).samples
            found = [(one.prompt_index, one.sample_index) for part in exchange.all_gather(samples) for one in part]
            assert sorted(found) == [(i, order) for i in range(len(PROMPTS)) for order in range(2)]
            assert rollouts.restarts.take_count() == (2, 1)[count]
    assert engine.num_restarts == (0, 1, 2)[rank]
    assert given == ([0, 0], [1, 1], [1, 2])[rank], "all take part, once engines are up"


def test_prompts_without_an_answer_are_sent_again():
    run_ranks(3, sample_with_faults)


def recorded_restarts(limit: int, events: list[str]) -> EngineRestarts:
    alone = SimpleNamespace(all_gather=lambda value: [value])
    own = SimpleNamespace(number=4, part_of=None, engine=EXPLAINING, stop=lambda: None)
    own.restart = lambda: events.append("restart")
    return EngineRestarts(own, alone, events.append, limit)


def test_an_engine_that_fails_again_and_again_ends_the_run():
    events: list[str] = []
    found, fault = recorded_restarts(2, events), EngineFault("it ended")
    assert found.restart_after_rollout(fault)
    assert not found.restart_after_rollout(None), "a rollout without a fault resets the count"
    assert found.restart_after_rollout(fault) and found.restart_after_rollout(fault)
    assert events[2:] == [
        "WARNING: engine 4 has failed (1 of 2 times in a row; rollout.max_engine_restarts): it ended",
        "restart",
        "WARNING: engine 4 has failed (2 of 2 times in a row; rollout.max_engine_restarts): it ended",
        "restart",
    ]
    with pytest.raises(EngineLost, match="^it ended\nengine 4 has been restarted 2 times"):
        found.restart_after_rollout(fault)
    with pytest.raises(EngineLost, match="^it ended$"):
        recorded_restarts(0, events).restart_after_rollout(fault)
    assert len(events) == 6


def restart_of_parts(rank: int, world_size: int) -> None:
    """Rank 0 owns an engine on two nodes, rank 1 starts its part on the second, rank 2 owns another engine."""
    events: list[str] = []
    exchange = Exchange(dist.group.WORLD)

    def all_gather(value: object) -> list[object]:
        events.append("meet")
        return exchange.all_gather(value)

    own = SimpleNamespace(number=(0, None, 1)[rank], part_of=(None, 0, None)[rank], engine=EXPLAINING)
    own.stop, own.restart = (lambda: events.append("stop")), (lambda: events.append("restart"))
    found = EngineRestarts(own, SimpleNamespace(all_gather=all_gather), print, 3)
    assert found.restart_after_rollout(EngineFault("it ended") if rank == 0 else None)
    assert events == (["meet"] * 3 if rank == 2 else ["meet", "stop", "meet", "restart", "meet"]), (
        "no part meets an old one"
    )


def test_all_parts_of_an_engine_are_restarted_with_it():
    run_ranks(3, restart_of_parts)


def lose(rank: int, world_size: int) -> None:
    """Engine 1 is lost, and then engine 0 does not start."""
    own = SimpleNamespace(number=rank, part_of=None, engine=EXPLAINING)
    own.stop, own.restart = (lambda: None), does_not_start
    found = EngineRestarts(own, Exchange(dist.group.WORLD), print, limit=1 - rank)
    for lost in (1, 0):
        with pytest.raises(EngineLost, match="^(it ended|no start)$") as caught:
            found.restart_failed(EngineFault("it ended") if rank == lost else None)
        assert caught.value.is_consequence == (rank != lost)


def does_not_start() -> None:
    raise EngineError("no start")


def test_all_ranks_learn_that_an_engine_is_lost_for_good():
    run_ranks(2, lose)

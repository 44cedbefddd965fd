"""The route of the weights to each engine, from the placement."""

from collections.abc import Sequence

import pytest

from megappo.commands.train import shared_nccl_variables
from megappo.config.config_error import ConfigError
from megappo.config.schema import Config
from megappo.placement.run_plan import plan_run
from megappo.sync.build import engine_sleeps

SECTIONS = {"model": {"path": "m"}, "data": {"train_files": ["f"]}, "trainer": {"output_dir": "o"}}


def config_of(
    actor: str, rollout: str, engine_ranks: int = 1, transport: str = "auto", engines: Sequence[str] = ()
) -> Config:
    placement = {"actor": actor, "critic": actor, "rollout": rollout}
    settings = {"tensor_parallel": engine_ranks, "sync": {"transport": transport}, "engines": engines}
    return Config.model_validate(SECTIONS | {"placement": placement, "rollout": settings})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (config_of("0-3", "0-3"), ["ipc"] * 4),
        (config_of("0-1", "2-3"), ["broadcast"] * 2),
        (config_of("2-3", "0-3", 2), ["broadcast", "ipc"]),
        (config_of("1-3", "0-3", 2), ["broadcast", "ipc"]),  # engine 0's owner, rank 0, has no weights
        (config_of("0-3", "0-3", transport="disk"), ["disk"] * 4),
        (config_of("0-3", "0-3", transport="broadcast"), ["broadcast"] * 4),
    ],
)
def test_each_engine_takes_the_way_that_is_open_to_it(config: Config, expected: list[str]) -> None:
    route = plan_run(config, 4).route
    assert [engine.transport for engine in route.engines] == expected


def test_the_plan_names_transport_and_sending_rank() -> None:
    config = config_of("2-3", "0-7")
    route = plan_run(config, 8).route
    assert route.describe() == "weights: broadcast from rank 2 to engine 0-1,4-7; ipc to engine 2-3"
    assert route.full_tensor_ranks(on_gpus=False) == {2, 3}


@pytest.mark.parametrize(
    ("config", "sender", "sources"),
    [
        (config_of("1-3", "0-3", 2), 2, {2}),  # engine 0, fed by broadcast, is on rank 1; rank 2 owns the other
        (config_of("0-3", "0-1", transport="broadcast"), 2, {2}),  # both engines are fed by broadcast
        (config_of("0-3", "0-3", transport="disk"), 0, {0}),
        (config_of("1-3", "0-3", transport="auto"), 1, {1, 2, 3}),
    ],
)
def test_who_sends_keeps_off_the_gpus_of_engines_that_take_a_broadcast(
    config: Config, sender: int, sources: set[int]
) -> None:
    route = plan_run(config, 4).route
    assert (route.senders, route.full_tensor_ranks(on_gpus=False)) == ((sender,), sources)


@pytest.mark.parametrize(
    ("actor", "rollout", "transport", "senders"),
    [
        ("0-3", "4-5", "auto", (0, 2)),
        ("0-3", "0,4-5", "broadcast", (1, 2)),
        ("0-3", "0-1,4-5", "broadcast", (2,)),  # all of the first stage is on the engines' GPUs
        ("0-3", "3-5", "auto", (0,)),  # rank 3, which hands over itself, needs everything
        ("0-3", "4-5", "disk", (0,)),
    ],
)
def test_each_stage_sends_its_own_where_nothing_else_must_be_gathered(
    actor: str, rollout: str, transport: str, senders: tuple[int, ...]
) -> None:
    parts = {"placement": {"actor": actor, "critic": actor, "rollout": rollout}}
    others = {"actor": {"parallel": {"pipeline": 2}}, "rollout": {"sync": {"transport": transport}}}
    config = Config.model_validate(SECTIONS | parts | others)
    route = plan_run(config, 6).route
    assert route.senders == senders
    assert route.full_tensor_ranks(on_gpus=True) == {
        *senders,
        *((3,) if transport == "auto" and "3" in rollout else ()),
    }
    assert list(route.errors(on_gpus=True)) == []


@pytest.mark.parametrize(
    ("config", "endpoints", "sources"),
    [
        (config_of("0-3", "0-3", 2), [(0, 1), (2, 3)], {0, 1, 2, 3}),
        (config_of("0-2", "0-3", 2), [(0, 1), (2,)], {0, 1, 2}),  # rank 3 has no weights
        (config_of("0-3", "0-3", 2, "disk"), [(0,), (2,)], {0}),
        (config_of("0-3", "2-3", 2, "broadcast"), [(2,)], {0}),
    ],
)
def test_on_gpus_each_rank_of_an_engine_is_handed_the_weights_of_its_own_gpu(
    config: Config, endpoints: list[tuple[int, ...]], sources: set[int]
) -> None:
    route = plan_run(config, 4).route
    assert [route.endpoint_ranks(engine, on_gpus=True) for engine in route.engines] == endpoints
    assert [route.endpoint_ranks(engine, on_gpus=False) for engine in route.engines] == [
        (found[0],) for found in endpoints
    ]
    assert route.full_tensor_ranks(on_gpus=True) == sources


def test_a_broadcast_on_gpus_that_has_no_gpu_to_come_from_is_refused() -> None:
    config = config_of("0-1", "0-3", transport="broadcast")
    route = plan_run(config, 4).route
    assert list(route.errors(on_gpus=False)) == []
    [error] = route.errors(on_gpus=True)
    assert error.startswith("engine 0 on ranks 0 shares the GPU of rank 0, from which broadcast cannot reach it: place")


def test_an_engine_elsewhere_is_on_nobodys_gpus() -> None:
    """Its owner, the rank that sends its requests, does not matter."""
    engines = {"engines": ["http://a:1", "http://b:1"], "tensor_parallel": 4}
    config = Config.model_validate(SECTIONS | {"placement": {"actor": "0-3", "critic": "0-3"}, "rollout": engines})
    route = plan_run(config, 4).route
    assert route.describe() == "weights: broadcast from rank 0 to engine 0-1"
    assert [engine.ranks for engine in route.engines] == [(0,), (1,)]
    assert not any(engine.frees_memory for engine in route.engines)
    assert list(route.errors(on_gpus=True)) == []


def test_an_engine_frees_memory_for_any_model_on_one_of_its_ranks() -> None:
    config = Config.model_validate(
        SECTIONS | {"placement": {"actor": "0", "critic": "3", "rollout": "0-5"}, "rollout": {"tensor_parallel": 2}}
    )
    route = plan_run(config, 6).route
    assert [engine.frees_memory for engine in route.engines] == [True, True, False]


@pytest.mark.parametrize(
    ("config", "transport", "endpoints"),
    [
        (config_of("0-3", "0-3", 4), "ipc", (0, 1, 2, 3)),
        (config_of("0-2", "0-3", 4), "broadcast", (0,)),  # rank 3, on the second node, has no weights to hand over
        (config_of("0-3", "0-3", 4, "disk"), "disk", (0,)),
    ],
)
def test_an_engine_on_two_nodes_is_handed_the_weights_on_each(
    config: Config, transport: str, endpoints: tuple[int, ...]
) -> None:
    route = plan_run(config, 4, 2).route
    [engine] = route.engines
    assert (engine.transport, engine.spans_nodes) == (transport, True)
    assert route.endpoint_ranks(engine, on_gpus=False) == route.endpoint_ranks(engine, on_gpus=True) == endpoints
    assert list(route.errors(on_gpus=False)) == []


def test_memory_that_an_engine_on_two_nodes_cannot_reach_is_refused() -> None:
    config = config_of("0-2", "0-3", 4, "ipc")
    assert plan_run(config, 4, 4).route
    with pytest.raises(ConfigError) as refused:
        plan_run(config, 4, 2)
    [error] = refused.value.errors
    assert error == (
        "rollout.sync.transport is ipc, but the engines' ranks 3 are not the actor's (0-2): set it to auto, or place "
        "the engines there"
    )


OFF = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}


@pytest.mark.parametrize(
    ("config", "ranks_per_node", "expected"),
    [
        (config_of("0-3", "0-3"), 4, {}),
        (config_of("0-3", "0-3", 4), 4, {}),
        (config_of("0-1", "2-3"), 4, OFF),
        (config_of("2-3", "0-3", 2), 4, OFF),  # one engine of two
        (config_of("0-3", "0-3", 4), 2, {}),  # an engine on two nodes, whose ranks have the actor's weights
        (config_of("0-1", "0-3", 4), 2, OFF),  # those on the second node have none
        (config_of("0-1", "2-3", transport="disk"), 4, {}),
        (config_of("0-3", "0-3", transport="broadcast"), 4, OFF),
        (config_of("0-3", "0-3", engines=[f"http://a:{port}" for port in range(1, 5)]), 4, OFF),
        (config_of("0-3", "0-3", transport="disk", engines=[f"http://a:{port}" for port in range(1, 5)]), 4, {}),
    ],
)
def test_nccls_defaults_stay_where_no_engine_joins_a_group(config: Config, ranks_per_node: int, expected: dict) -> None:
    assert shared_nccl_variables(plan_run(config, 4, ranks_per_node)) == expected


@pytest.mark.parametrize(
    ("sleep", "expected"), [("always", [True, False]), ("auto", [True, False]), ("never", [False] * 2)]
)
def test_an_engine_sleeps_where_it_shares_gpus_unless_it_stays_awake(monkeypatch, sleep: str, expected: list) -> None:
    config = config_of("0", "0-1")
    config = config.changed("rollout.sleep", sleep)
    monkeypatch.setattr("megappo.runtime.platform.has_cuda", lambda: True)
    route = plan_run(config, 2).route
    assert [engine_sleeps(route, number) for number in (0, 1)] == expected


@pytest.mark.parametrize(
    ("config", "shared"),
    [
        (config_of("0", "0"), None),  # neither engine nor models have collectives
        (config_of("0-1", "2-3", 2), None),
        (config_of("0-1", "0-3", 2), "0-1"),
        (config_of("0-1", "1-2"), "1"),
        (config_of("0", "0-1", 2), "0-1"),
    ],
)
def test_engines_and_models_do_not_compute_at_once_on_gpus_that_wait_for_others(
    config: Config, shared: str | None
) -> None:
    """A GPU gives two processes turns without regard to other GPUs: a collective waits until all have its turn."""
    ahead = config.changed("rollout.max_staleness", 1).changed("rollout.sleep", "never")
    world_size = 1 + max(int(ranks[-1]) for ranks in (config.placement.actor, config.placement.rollout))
    plan, planned = plan_run(ahead, world_size), plan_run(ahead.changed("rollout.max_staleness", 0), world_size)
    assert not [*plan.sleep_errors(on_gpus=False), *planned.sleep_errors(on_gpus=True)]
    errors = [line.partition(" compute at once on the GPUs of ranks ")[2] for line in plan.sleep_errors(on_gpus=True)]
    assert [line.partition(".")[0] for line in errors] == ([shared] if shared else [])

"""The way of the weights to each engine, from the placement."""

import pytest

from megappo.config.schema import Config
from megappo.placement.ranks import placement_layouts
from megappo.sync.route import describe_transports, sending_rank, shares_gpus, transports

SECTIONS = {"model": {"path": "m"}, "data": {"train_files": ["f"]}, "trainer": {"output_dir": "o"}}


def config_of(actor: str, rollout: str, engine_ranks: int = 1, transport: str = "auto") -> Config:
    placement = {"actor": actor, "critic": actor, "rollout": rollout}
    engines = {"tensor_parallel": engine_ranks, "sync": {"transport": transport}}
    return Config.model_validate(SECTIONS | {"placement": placement, "rollout": engines})


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
    assert list(transports(config, placement_layouts(config, 4))) == expected


def test_the_plan_says_which_way_from_which_rank() -> None:
    config = config_of("2-3", "0-7")
    layouts = placement_layouts(config, 8)
    assert sending_rank(config, layouts) == 2
    shared = config_of("1-3", "0-3", 2)
    assert sending_rank(shared, placement_layouts(shared, 4)) == 2, "engine 0, fed by broadcast, is on rank 1"
    chosen = config_of("0-3", "0-1", transport="broadcast")
    assert sending_rank(chosen, placement_layouts(chosen, 4)) == 2, "both engines are fed by broadcast"
    assert describe_transports(config, layouts) == "weights: broadcast from rank 2 to engine 0-1,4-7; ipc to engine 2-3"


def test_an_engine_shares_gpus_with_any_model_on_one_of_its_ranks() -> None:
    config = Config.model_validate(
        SECTIONS | {"placement": {"actor": "0", "critic": "3", "rollout": "0-5"}, "rollout": {"tensor_parallel": 2}}
    )
    layouts = placement_layouts(config, 6)
    assert [shares_gpus(layouts, engine) for engine in range(3)] == [True, True, False]

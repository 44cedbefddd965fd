"""An actor and a critic on different ranks compute at the same time: neither waits for the other in a forward pass or
an update, which are held here until the other's has run to its end."""

from datetime import timedelta
from pathlib import Path

from recorder import recorder_in
from spawn import run_ranks
from torch.distributed import distributed_c10d

from megappo.config.schema import Config
from megappo.models.megatron_engine import MegatronEngine
from megappo.placement.components import components_of
from megappo.recipes.ppo import ppo_step

PATIENCE = timedelta(seconds=30)
APART = {"placement": {"actor": "0-1", "critic": "2-3"}, "critic": {"parallel": {"tensor": 2}}}


def hold(engine: MegatronEngine, method: str, key: str) -> None:
    """Make every call wait for a key in the store."""
    store, call = distributed_c10d._get_default_store(), getattr(engine, method)

    def held(*args):
        store.wait([key], PATIENCE)
        return call(*args)

    setattr(engine, method, held)


def announce(engine: MegatronEngine, method: str, key: str, num_calls: int) -> None:
    """Set a key in the store once a method has run so often, and a forward pass after it."""
    store, call, forward = distributed_c10d._get_default_store(), getattr(engine, method), engine.forward
    calls = []

    def counted(*args):
        result = call(*args)
        calls.append(method)
        if len(calls) == num_calls:
            forward(args[0])
            store.set(key, "")
        return result

    setattr(engine, method, counted)


def step_with_one_held(rank: int, world_size: int, folder: str) -> None:
    bench = recorder_in(Path(folder))
    config = Config.model_validate(bench.merged(bench.settings(Path(folder)), APART))
    trained = {name: spec.training for name, spec in components_of(config).items() if spec.training}
    updates = {name: one.optimizer_steps(config) // bench.STEPS for name, one in trained.items()}
    for method in ("forward", "train_batch"):
        for first in updates:
            run = bench.build(config)
            key = f"the {first}'s {method} has ended"
            for name, engine in run.models.trained.items():
                if engine and name == first:
                    announce(engine, method, key, updates[first] if method == "train_batch" else 1)
                elif engine:
                    hold(engine, method, key)
            metrics = ppo_step(run, 1)
            found = {name: metrics[f"{name}/num_optimizer_steps"] for name in updates}
            assert found == updates


def test_neither_waits_for_the_other(tmp_path):
    run_ranks(4, step_with_one_held, str(tmp_path))

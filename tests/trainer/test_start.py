"""A start takes no more memory than planned: models are built, and a checkpoint is loaded, one by one."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from recorder import recorder_in
from spawn import run_ranks

from megappo.config.schema import Config
from megappo.lab.estimate.gpu_memory import SAVE, START, Cluster, MemoryEstimate
from megappo.models.megatron_engine import MegatronEngine
from megappo.models.offload import Offload, _storages
from megappo.placement.run_plan import plan_run
from megappo.recipes.ppo import ppo_step
from megappo.trainer import models
from megappo.trainer.run import Run

ALL = ["weights", "gradients", "optimizer"]
WITH_REFERENCE = {"actor": {"use_kl_loss": True, "kl_loss_type": "k3", "kl_loss_coef": 0.1}}
BUILT_LAST = {"actor": {"use_kl_loss": True, "kl_loss_type": "full", "kl_loss_coef": 0.1}}
OFFLOADS = {
    "everything": {"actor": {"offload": ALL}, "critic": {"offload": ALL}, "ref": {"offload": ["weights"]}},
    "the critic alone": {"critic": {"offload": ALL}},
    "optimizers": {"actor": {"offload": ["optimizer"]}, "critic": {"offload": ["optimizer"]}},
    "the reference": {"ref": {"offload": ["weights"]}},
    "nothing": {},
}
CASES = [
    *(("one rank", WITH_REFERENCE, offload) for offload in OFFLOADS),
    ("one rank", BUILT_LAST, "everything"),
    ("actor tp2, critic pp2", WITH_REFERENCE, "everything"),
    ("actor dp2, critic elsewhere tp2 sp", WITH_REFERENCE, "everything"),
    ("tp2 dp2 sp", WITH_REFERENCE | {"model": {"dtype": "bf16"}}, "everything"),
]
SHOWN = (0, 3, 5)


class Peak:
    """Counts what all models together have on the device: what sleeps has NaN everywhere."""

    def __init__(self) -> None:
        self.engines: list[MegatronEngine] = []
        self.bytes = 0
        self.rest = Offload.rest

    def look(self, offload: Offload, *use: object) -> None:
        """In place of `Offload.rest`, before which most is awake."""
        if all(offload._engine is not engine for engine in (None, *self.engines)):
            self.engines.append(offload._engine)
        self.bytes = max(self.bytes, sum(map(awake_bytes, self.engines)))
        self.rest(offload, *use)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        with patch.object(Offload, "rest", lambda offload, use: self.look(offload, use)):
            yield


def awake_bytes(engine: MegatronEngine) -> int:
    storages = [storage for kind in _storages(engine, None).values() for storage in kind]
    return sum(storage.nbytes() for storage in storages if not is_nan(storage))


def is_nan(storage: torch.UntypedStorage) -> bool:
    return bool(torch.tensor([], dtype=torch.uint8).set_(storage).eq(255).all())


def planned_bytes(config: Config, phase: str = START) -> float:
    """Return the planned bytes of this rank's models in a phase."""
    memory = MemoryEstimate(plan_run(config, dist.get_world_size()), Cluster(2**40))
    (rank_kind,) = (kind for kind in memory.rank_kinds if dist.get_rank() in kind.ranks)
    entries = rank_kind.ledgers[phase].items()
    return sum(size for name, size in entries if name.split()[0] in memory.models)


def config_of(bench: ModuleType, folder: Path, *parts: dict) -> Config:
    return Config.model_validate(bench.merged(bench.settings(folder), *parts, {"trainer": {"save_interval": 0}}))


def start(rank: int, world_size: int, folder: Path, layout: str, method: dict, offload: str) -> None:
    bench = recorder_in(folder)
    output = {"trainer": {"output_dir": str(folder / "run")}}
    config = config_of(bench, folder, bench.LAYOUTS[layout], method, OFFLOADS[offload], output)
    with (built := Peak()).watched():
        run = bench.build(config)
    resident = sum(awake_bytes(engine) for engine in built.engines)
    assert_asleep(run)
    planned = planned_bytes(config)
    # Padded buffers and the head's row of biases are not in the plan.
    assert built.bytes == pytest.approx(planned, rel=0.05) and resident <= built.bytes
    ppo_step(run, 1)
    run.save()
    with (loaded := Peak()).watched():
        resumed = bench.build(config)
        resumed.progress.restore(resumed.models)
    assert_asleep(resumed)
    assert loaded.bytes <= 1.05 * max(planned, planned_bytes(config, SAVE))
    assert resumed.progress.start_step == 1


def assert_asleep(run: Run) -> None:
    for name, one in run.models.components.items():
        offload = one.offload
        assert one.engine is None or offload.asleep == set(one.spec.offload.value), name
        assert all(is_nan(memory.storage) for kind in offload.asleep for memory in offload._memories[kind])


@pytest.mark.parametrize(
    ("layout", "method", "offload"),
    [pytest.param(*case, marks=() if n in SHOWN else pytest.mark.slow) for n, case in enumerate(CASES)],
)
def test_models_take_the_planned_memory_as_they_are_built_and_loaded(
    layout: str, method: dict, offload: str, tmp_path: Path
) -> None:
    run_ranks(4, start, tmp_path, layout, method, offload)


def built_whole(rank: int, world_size: int, folder: Path) -> None:
    """A model that is built while another is awake is more than the plan has room for."""
    bench = recorder_in(folder)
    config = config_of(bench, folder, bench.LAYOUTS["one rank"], WITH_REFERENCE, OFFLOADS["everything"])
    with (peak := Peak()).watched(), patch.object(models, "NOTHING", dict.fromkeys(ALL, False)):
        bench.build(config)
    assert rank or peak.bytes > 1.5 * planned_bytes(config)


def test_a_model_that_stays_awake_would_show(tmp_path: Path) -> None:
    run_ranks(4, built_whole, tmp_path)

"""Host memory of what sleeps: its bytes are the plan's, whatever torch's allocator rounds up to."""

import contextlib
from pathlib import Path

import pytest
import torch
from planning import REPOSITORY
from published_models import published_folders

from megappo.config.loading import load_config
from megappo.lab.estimate.gpu_memory import Cluster, MemoryEstimate
from megappo.models import offload
from megappo.models.offload import Offload, block_sizes
from megappo.placement.run_plan import plan_run
from megappo.runtime.gpus import GIB

RECIPES = {"qwen2.5_7b_critic_7b_8gpu": 8, "llama3.1_70b_8node": 64, "qwen3_30b_a3b_4node": 32}


def rounded_up(nbytes: int) -> int:
    """As torch's allocator of pinned memory does."""
    return 1 << (nbytes - 1).bit_length()


@pytest.mark.parametrize("nbytes", [0, 1, 2**20, 2**20 + 1, 5 * 2**30, 2**33 + 1, 2**33 - 1, 11423731200])
def test_blocks_add_up_and_are_not_rounded(nbytes: int) -> None:
    sizes = block_sizes(nbytes)
    assert sizes == sorted(map(rounded_up, sizes), reverse=True)
    assert sum(sizes) == nbytes


@pytest.mark.parametrize("recipe", RECIPES)
def test_published_models_take_the_planned_bytes(recipe: str, tmp_path: Path) -> None:
    with contextlib.chdir(published_folders(tmp_path)):
        config = load_config(REPOSITORY / "configs" / f"{recipe}.yaml", ["actor.offload=[weights,gradients,optimizer]"])
        memory = MemoryEstimate(plan_run(config, RECIPES[recipe]), Cluster(79.1 * GIB))
        stages = [place for rank_kind in memory.rank_kinds for place in rank_kind.stages.items()]
        models = [memory.models[name].copied(stage) for name, stage in stages]
        planned = [int(size) for copied in models for size in copied.values()]
    taken = [sum(map(rounded_up, block_sizes(size))) for size in planned]
    assert taken == planned
    assert max(rounded_up(size) / size for size in planned) > 1.3, "in one block they would take more"


class Model:
    """The storages of a model's kinds, as `_storages` finds them."""

    def __init__(self, *sizes: int):
        self.weights = [torch.randint(0, 200, (size,), dtype=torch.uint8) for size in sizes]
        self.optimizer = [torch.randint(0, 200, (3 * size,), dtype=torch.uint8) for size in sizes]

    def storages(self, base: None) -> dict[str, list[torch.UntypedStorage]]:
        kinds = {"weights": self.weights, "gradients": [], "optimizer": self.optimizer}
        return {kind: [tensor.untyped_storage() for tensor in tensors] for kind, tensors in kinds.items()}


@pytest.mark.parametrize("sizes", [(64,), (1, 63, 64, 65), (1000, 3), (7,) * 40, (2**12 + 1, 2**12 - 1)])
def test_what_sleeps_comes_back_to_the_bit_however_blocks_cut_it(sizes: tuple[int, ...], monkeypatch) -> None:
    monkeypatch.setattr(offload, "_storages", Model.storages)
    model = Model(*sizes)
    found = Offload(model, ("weights", "optimizer"))
    for step in range(3):
        before = [tensor.clone() for tensor in model.weights + model.optimizer]
        found.rest({})
        assert all((tensor == 255).all() for tensor in model.weights + model.optimizer)
        assert found.host_bytes == 4 * sum(sizes)
        found.wake({"weights": True, "optimizer": True})
        assert all(map(torch.equal, before, model.weights + model.optimizer))
        model.weights[0] += 1
        if step == 1:  # a checkpoint has been loaded: the states are other tensors
            model.optimizer = [torch.randint(0, 200, (3 * size,), dtype=torch.uint8) for size in sizes]


def test_what_was_not_changed_is_not_copied_again(monkeypatch) -> None:
    monkeypatch.setattr(offload, "_storages", Model.storages)
    model = Model(100)
    found = Offload(model, ("weights",))
    before = model.weights[0].clone()
    found.rest({})
    found.wake({"weights": False})
    model.weights[0].zero_()  # which nothing but a use that changes them may do
    found.rest({})
    found.wake({"weights": False})
    assert torch.equal(model.weights[0], before)

"""Models that share the weights that none of them trains give the numbers of models with copies of their own."""

import shutil
from pathlib import Path

import pytest
import torch.distributed as dist
from recorder import recorder_in
from scoring_adapters import write_adapters
from spawn import run_ranks
from watched_steps import config_of, numbers_of, weights_of

from megappo.config.config_error import ConfigError
from megappo.config.schema import Config
from megappo.placement.components import components_of
from megappo.placement.run_plan import plan_run
from megappo.trainer.models import Models

ALL = ["weights", "gradients", "optimizer"]
LORA = {"model": {"layer_spec": "torch"}, "actor": {"lora": {"rank": 2}}, "critic": {"lora": {"rank": 3}}}
OFFLOADED = {"actor": {"offload": ALL}, "critic": {"offload": ALL}}
LAYOUTS = {
    "tp2": {"tensor": 2},
    "tp2 dp2 sp": {"tensor": 2, "sequence": True},
    "pp2 dp2": {"pipeline": 2},
    "cp2 tp2 sp": {"context": 2, "tensor": 2, "sequence": True},
    "pp2 vpp2 tp2 sp": {"pipeline": 2, "virtual_pipeline": 2, "tensor": 2, "sequence": True},
}
METHODS = {
    "KL loss": {"actor": {"use_kl_loss": True, "kl_loss_type": "k3", "kl_loss_coef": 0.1}},
    "full KL": {"actor": {"use_kl_loss": True, "kl_loss_type": "full", "kl_loss_coef": 0.1}},
}
CASES = [
    *[(layout, "KL loss") for layout in LAYOUTS],
    ("tp2 dp2 sp", "full KL"),
    ("cp2 tp2 sp", "full KL"),
]


def placed(layout: str, method: str) -> dict:
    """Return settings that place actor and critic alike."""
    parallel, ranks = {"parallel": LAYOUTS[layout], "max_tokens_per_micro_batch": 400}, f"0-{num_ranks(layout) - 1}"
    return {
        "placement": {"actor": ranks, "critic": ranks, "rollout": ranks},
        "actor": METHODS[method]["actor"] | parallel,
        "critic": parallel,
    }


def num_weights(models: Models, name: str) -> int:
    """Return the numbers in the weights of a component here that no component before it has."""
    found: dict[int, int] = {}
    for other, component in models.components.items():
        if component.engine is not None:
            weights = {id(one): one.numel() for chunk in component.engine.chunks for one in chunk.parameters()}
            own = sum(size for key, size in weights.items() if key not in found)
            found |= weights
            if other == name:
                return own
    raise AssertionError(f"no {name} here")


def num_ranks(layout: str) -> int:
    return 2 if layout == "tp2" else 4


def separate(folder: Path, layout: str) -> dict:
    """Return settings that have each model load weights of its own: the critic's are in another folder, and the
    reference's ranks are written in other words."""
    return {
        "critic": {"model_path": str(folder / "copy")},
        "placement": {"ref": ",".join(map(str, range(num_ranks(layout))))},
    }


def compared(rank: int, world_size: int, folder: Path, layout: str, method: str) -> None:
    bench = recorder_in(folder)
    if rank == 0:
        shutil.copytree(folder, folder / "copy", ignore=shutil.ignore_patterns("copy", "shared", "separate"))
    dist.barrier()
    parts = (placed(layout, method), LORA)
    shared, other = (
        bench.build(config_of(bench, folder, *parts, {"trainer": {"output_dir": str(folder / name)}}, changes))
        for name, changes in (("shared", OFFLOADED), ("separate", separate(folder, layout)))
    )
    assert [spec.base for spec in shared.models.specs.values()] == [None, "actor", "actor"]
    assert [spec.base for spec in other.models.specs.values()] == [None, None, None]
    assert (
        num_weights(shared.models, "ref")
        == 0
        < num_weights(shared.models, "critic")
        < num_weights(other.models, "critic") / 2
    )
    num_steps = 1 if layout == "tp2" else 2
    assert numbers_of(bench, shared, num_steps) == numbers_of(bench, other, num_steps)
    weights = weights_of(bench, other)
    assert weights_of(bench, shared) == weights
    loaded = bench.build(shared.config)
    loaded.progress.restore(loaded.models)
    assert loaded.progress.start_step == num_steps and weights_of(bench, loaded) == weights


@pytest.mark.parametrize(
    ("layout", "method"),
    [pytest.param(*CASES[0]), *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])],
)
def test_the_same_numbers_as_with_copies(layout: str, method: str, tmp_path: Path) -> None:
    run_ranks(num_ranks(layout), compared, tmp_path, layout, method)


def config(**sections: dict) -> Config:
    whole = {
        "model": {"path": "models/m", "layer_spec": "torch"},
        "actor": {"lora": {}, "use_kl_loss": True},
        "algorithm": {"use_kl_in_reward": False},
        "data": {"train_files": ["t.jsonl"]},
        "trainer": {"output_dir": "o", "total_steps": 1},
    }
    return Config.model_validate({name: whole.get(name, {}) | sections.get(name, {}) for name in whole | sections})


@pytest.mark.parametrize(
    ("sections", "bases"),
    [
        ({}, {"ref": "actor"}),
        ({"critic": {"lora": {}}}, {"ref": "actor", "critic": "actor"}),
        ({"critic": {"lora": {}, "model_path": "models/other"}}, {"ref": "actor"}),
        (
            {"critic": {"lora": {}, "model_path": "models/r"}, "reward_model": {"model_path": "models/r"}},
            {"ref": "actor", "reward_model": "critic"},
        ),
        ({"critic": {"lora": {}}, "placement": {"critic": "0"}}, {"ref": "actor"}),
        ({"ref": {"parallel": {"tensor": 2}}}, {}),
        ({"actor": {"lora": None, "use_kl_loss": True}, "critic": {"lora": {}}}, {"ref": "critic"}),
        ({"actor": {"lora": None, "use_kl_loss": True}}, {}),
        (
            {"critic": {"lora": {}}, "reward_model": {"model_path": "models/m", "adapter": "adapter"}},
            {"ref": "actor", "critic": "actor", "reward_model": "actor"},
        ),
    ],
)
def test_which_weights_are_shared(sections: dict, bases: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of one folder, on the same ranks and in the same layout, share them if they train adapters or nothing."""
    monkeypatch.chdir(tmp_path)
    write_adapters(tmp_path / "adapter", "models/m")
    assert {name: spec.base for name, spec in components_of(config(**sections)).items() if spec.base} == bases


def test_an_offload_of_shared_weights_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        plan_run(config(ref={"offload": ["weights"]}), 2)
    assert "ref.offload weights has no effect on weights that are the actor's: drop it, or set actor.offload" in str(
        error.value
    )

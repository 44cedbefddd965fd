"""Offloading changes nothing but where tensors are: the same numbers to the bit, and no use of what sleeps."""

from pathlib import Path

import pytest
from recorder import recorder_in
from spawn import run_ranks
from watched_steps import Watch, config_of, numbers_of, weights_of

from megappo.observe.metrics import reduce_ranks
from megappo.recipes.ppo import ppo_step

ALL = ["weights", "gradients", "optimizer"]
OFFLOADS = {
    "everything": {"actor": {"offload": ALL}, "critic": {"offload": ALL}, "ref": {"offload": ["weights"]}},
    "weights": {"actor": {"offload": ["weights"]}, "critic": {"offload": ["weights"]}},
    "gradients": {"actor": {"offload": ["gradients"]}, "critic": {"offload": ["gradients"]}},
    "optimizer": {"actor": {"offload": ["optimizer"]}, "critic": {"offload": ["optimizer"]}},
}
METHODS = {
    "KL loss": {"actor": {"use_kl_loss": True, "kl_loss_type": "k3", "kl_loss_coef": 0.1}},
    "full KL": {"actor": {"use_kl_loss": True, "kl_loss_type": "full", "kl_loss_coef": 0.1}},
    "shared backbone": {"algorithm": {"shared_backbone": True}},
}
IN_BF16 = {"model": {"dtype": "bf16"}}  # the main parameters are no views of the weights
BF16 = {
    "bf16, optimizer sharded": {**IN_BF16, "placement": {"actor": "0-3", "critic": "0-1"}},
    "bf16, optimizer sharded, two ranks": {**IN_BF16, "placement": {"actor": "0-1", "critic": "0", "rollout": "0-1"}},
    "bf16, moments in bf16, two ranks": {
        **IN_BF16,
        "placement": {"actor": "0-1", "critic": "0", "rollout": "0-1"},
        "actor": {"optim": {"moments_dtype": "bf16"}},
        "critic": {"optim": {"moments_dtype": "bf16"}},
    },
    "bf16, optimizer not sharded": {
        **IN_BF16,
        "placement": {"actor": "0-1", "critic": "0-3"},
        "actor": {"optim": {"distributed": False}},
        "critic": {"optim": {"distributed": False}},
    },
}
LAYOUTS = (
    *("one rank", "actor tp2, critic pp2", "actor dp2, critic elsewhere tp2 sp", "tp2 dp2 sp"),
    *("actor pp2 vpp2, critic dp4", "actor cp2 dp2, critic tp2 pp2", *BF16),
)
CASES = [
    *((layout, "KL loss", "everything") for layout in LAYOUTS),
    *(("tp2 dp2 sp", "KL loss", offload) for offload in OFFLOADS if offload != "everything"),
    *(("actor cp2 dp2, critic tp2 pp2", method, "everything") for method in METHODS if method != "KL loss"),
]
SHOWN = ("bf16, optimizer sharded, two ranks",)


def compared(rank: int, world_size: int, folder: Path, layout: str, method: str, offload: str) -> None:
    bench = recorder_in(folder)
    parts = (BF16.get(layout) or bench.LAYOUTS[layout], METHODS[method])
    run, other = (
        bench.build(config_of(bench, folder, *parts, {"trainer": {"output_dir": str(folder / name)}}, changes))
        for name, changes in (("with", OFFLOADS[offload]), ("without", {}))
    )
    assert numbers_of(bench, run) == numbers_of(bench, other)
    weights = weights_of(bench, other)
    assert weights_of(bench, run) == weights
    for one in run.models.components.values():
        copied = set(one.spec.offload.value) - {"gradients"}  # which need no copy
        assert (one.offload.host_bytes > 0) == (one.engine is not None and bool(copied))
    with_offload, without = (reduce_ranks(one.exchange.all_gather(one.phase.memory())) for one in (run, other))
    assert ("memory/offloaded_gib/sum" in with_offload) == (offload != "gradients")
    assert "memory/offloaded_gib/sum" not in without
    loaded = bench.build(run.config)
    loaded.progress.restore(loaded.models)
    assert loaded.progress.start_step == 2 and weights_of(bench, loaded) == weights


@pytest.mark.parametrize(
    ("layout", "method", "offload"),
    [pytest.param(*case, marks=() if case[0] in SHOWN else pytest.mark.slow) for case in CASES],
)
def test_the_same_numbers_with_and_without(layout: str, method: str, offload: str, tmp_path: Path) -> None:
    run_ranks(2 if "two ranks" in layout else 4, compared, tmp_path, layout, method, offload)


def used_while_asleep(rank: int, world_size: int, folder: Path) -> None:
    bench = recorder_in(folder)
    run = bench.build(config_of(bench, folder, bench.LAYOUTS["one rank"], OFFLOADS["everything"], IN_BF16))
    batch, _ = run.batches.score(1, run.batches.sample(1, run.phase), run.phase)
    scattered = run.models.scatter(batch)
    for component, phase in (("critic", "old_log_probs"), ("actor", "values")):
        if rank == 0:
            with run.phase(phase), Watch(run), pytest.raises(AssertionError) as error:
                scattered[component].forward()
            assert str(error.value).startswith(f"the {component}'s weights sleep in the phase {phase}")
            with run.phase(phase), pytest.raises(FloatingPointError, match=f"the {component}'s .* are not finite"):
                scattered[component].forward()
    if rank == 0:
        asleep = run.models.actor.offload.asleep
        with run.phase("rollout"):
            with run.phase("sync"):  # of a restarted engine
                assert "weights" not in asleep
            assert "weights" in asleep
        with run.phase("update_critic"), Watch(run), pytest.raises(AssertionError, match="actor's optimizer sleep"):
            optimizer = run.models.actor.engine.optimizer.chained_optimizers[0].optimizer
            optimizer.param_groups[0]["params"][0].sum()


def test_any_use_of_what_sleeps_is_named_and_seen(tmp_path: Path) -> None:
    run_ranks(4, used_while_asleep, tmp_path)


def fifty_steps(rank: int, world_size: int, folder: Path) -> None:
    bench = recorder_in(folder)
    run = bench.build(config_of(bench, folder, bench.LAYOUTS["actor tp2, critic pp2"], OFFLOADS["everything"]))
    found = []
    for step in range(1, 51):
        ppo_step(run, step)
        found.append([one.offload.host_bytes for one in run.models.components.values() if one.engine is not None])
    assert all(found[1]) and bool(found[1]) == (rank < 2)
    assert all(sizes == found[1] for sizes in found[2:])  # the optimizer has its states after a step


@pytest.mark.slow
def test_the_hosts_memory_does_not_grow(tmp_path: Path) -> None:
    run_ranks(4, fifty_steps, tmp_path)

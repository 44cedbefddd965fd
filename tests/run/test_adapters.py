"""Whole runs that train adapters (LoRA): engines get these alone, and what is written at the end holds them."""

import re
from pathlib import Path

import pytest
from exported_adapters import LORA, check_merged, exported_adapters
from program import ONE_RANK_EACH, Program, logged
from safetensors.torch import load_file

OTHERS = ("trainer.total_steps=4", "trainer.save_interval=2", "trainer.eval_interval=0")

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]  # test_python.py trains adapters, too


@pytest.fixture(scope="module")
def adapted(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run."""
    run = tmp_path_factory.mktemp("adapted") / "run"
    options = (f"trainer.output_dir={run}", f"trainer.record_rollouts={run / 'record'}")
    with Program(run.parent, config, *options, *LORA, *OTHERS) as program:
        assert program.wait() == 0, program.output
    return run


def test_engines_get_adapters_alone_and_agree_with_the_actor(adapted, config):
    num_bytes = sum(tensor.nbytes for tensor in exported_adapters(adapted / "hf_actor").values())
    steps = logged(adapted)
    assert [metrics["step"] for metrics in steps] == [1, 2, 3, 4]
    for metrics in steps:
        assert metrics["sync/bytes"] == num_bytes
        assert metrics["sync/log_prob_diff/max"] < 1e-4 and metrics["rollout/log_prob_diff/mean"] < 1e-4
        assert metrics["actor/grad_norm"] > 0 and metrics["critic/grad_norm"] > 0
    check_merged(adapted / "hf_actor", config.parent / "model")


@pytest.mark.parametrize("transport", ["auto", "disk"])
def test_an_engine_elsewhere_gets_adapters_through_a_folder(transport, adapted, config, folder):
    layout = (*ONE_RANK_EACH, "placement.rollout=1", f"rollout.sync.transport={transport}")
    options = (f"trainer.output_dir={folder / 'run'}", "trainer.total_steps=2", "trainer.eval_interval=0")
    with Program(folder, config, *LORA, *layout, *options) as program:
        assert program.wait() == 0, program.output
    for found, expected in zip(logged(folder / "run"), logged(adapted)[:2], strict=True):
        assert found["sync/bytes"] == expected["sync/bytes"]
        assert found["sync/log_prob_diff/max"] < 1e-4 and found["rollout/log_prob_diff/mean"] < 1e-4


def test_engines_get_merged_adapters_on_request(adapted, config, folder):
    options = (f"trainer.output_dir={folder / 'run'}", "rollout.sync.merge_adapters=true", "trainer.total_steps=2")
    with Program(folder, config, *LORA, *options, "trainer.eval_interval=0") as program:
        assert program.wait() == 0, program.output
    merged = load_file(adapted / "hf_actor" / "model.safetensors")
    matrices = sum(tensor.nbytes for name, tensor in merged.items() if name.endswith("_proj.weight"))
    for metrics in logged(folder / "run"):
        assert metrics["sync/bytes"] == matrices and metrics["sync/log_prob_diff/max"] < 1e-4
    check_merged(folder / "run" / "hf_actor", config.parent / "model")


def test_a_run_goes_on_from_its_adapters_as_if_it_had_not_ended(adapted, config, folder):
    """The resumed run trains on the recorded rollouts of the uninterrupted one."""
    run, replay = folder / "run", f"trainer.replay_rollouts={adapted / 'record'}"
    arguments = (
        config,
        f"trainer.output_dir={run}",
        replay,
        *LORA,
        "trainer.save_interval=2",
        "trainer.eval_interval=0",
    )
    with Program(folder / "1", *arguments, "trainer.total_steps=2") as program:
        assert program.wait() == 0, program.output
    with Program(folder / "2", *arguments, "trainer.total_steps=4") as program:
        assert program.wait() == 0, program.output
    for found, expected in zip(logged(run)[2:], logged(adapted)[2:], strict=True):
        for key in ("actor/grad_norm", "critic/grad_norm", "actor/ppo_kl", "reward/score/mean"):
            assert found[key] == expected[key], f"{key} of step {found['step']}"


def test_a_checkpoint_is_evaluated_and_other_models_are_refused(adapted, config, folder):
    options = (
        f"trainer.output_dir={folder / 'evaluation'}",
        f"trainer.eval_checkpoint={adapted}/checkpoints/step_00000004",
    )
    with Program(folder / "1", config, *LORA, *options, "trainer.eval_only=true", "trainer.total_steps=4") as program:
        assert program.wait() == 0, program.output
    with Program(folder / "2", config, f"trainer.output_dir={adapted}", "trainer.total_steps=6") as program:
        assert program.wait() == 2
    adapted = r"(actor|critic) with adapters of rank 4 \([^)]*\)"
    assert re.search(f"holds {adapted}, {adapted}, but this run has actor \\(", program.output)

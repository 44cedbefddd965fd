"""Teachers in a step of real models: their log-probs in any layout, their rows, adapters, and models that are equal."""

import json
import shutil
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from recorder import recorder_in
from safetensors.torch import load_file, save_file
from spawn import run_ranks

from megappo.batch.rows import Rows
from megappo.config.schema import Config
from megappo.recipes.ppo import ppo_step, sample_experience
from megappo.trainer.run import Run

PLACED = {"placement": {"actor": "0-1", "critic": "2-3"}, "algorithm": {"adv_estimator": "gae"}}
ELSEWHERE = {"placement": "2-3", "parallel": {"tensor": 2, "sequence": True}, "offload": ["weights"]}
EVEN, ODD = {"when": {"n": 0}}, {"when": {"n": 1}}


def config_of(bench: ModuleType, folder: Path, teachers: dict, more: dict | None = None, **keys: object) -> Config:
    for one in teachers.values():
        one.setdefault("model_path", str(folder))
    own = {"teachers": teachers, "distillation": keys}
    return Config.model_validate(bench.merged(bench.settings(folder), PLACED, own, more or {}))


def rows_of(bench: ModuleType, config: Config) -> tuple[Run, Rows, dict[str, float]]:
    """Return the rows of a first step before its updates, and its metrics so far."""
    run = bench.build(config)
    experience, _ = sample_experience(run, 1)
    return run, experience.batch.rows, experience.metrics


def write_other(folder: Path) -> None:
    """Write a copy of the model with other weights."""
    shutil.copytree(folder, folder / "other", ignore=shutil.ignore_patterns("other"))
    file = folder / "other" / "model.safetensors"
    generator = torch.Generator().manual_seed(1)
    weights = {name: w + 0.02 * torch.randn(w.shape, generator=generator) for name, w in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})


def write_adapted(folder: Path) -> None:
    """Write adapters of queries, and a copy of the model with the adapters added to its weights."""
    weights, tensors = load_file(folder / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(2)
    for name in [name for name in weights if name.endswith("q_proj.weight")]:
        rows, columns = weights[name].shape
        a, b = (torch.randn(size, generator=generator) / 4 for size in ((2, columns), (rows, 2)))
        weights[name] = weights[name] + 2 * b @ a
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(folder)}
    settings |= {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter" / "adapter_model.safetensors")
    (folder / "merged").mkdir()
    shutil.copy(folder / "config.json", folder / "merged")
    save_file(weights, folder / "merged" / "model.safetensors", {"format": "pt"})


def check(rank: int, world_size: int, folder: Path) -> None:
    bench = recorder_in(folder)
    if rank == 0:
        write_other(folder)
        write_adapted(folder)
    dist.barrier()
    other = str(folder / "other")

    _, rows, metrics = rows_of(bench, config_of(bench, folder, {"same": {}}))
    assert torch.equal(rows.fields["teacher_log_probs"], rows.fields["old_log_probs"])
    assert not rows.fields["distillation_kl"].any() and metrics["distillation/kl/max"] == 0

    _, apart, _ = rows_of(bench, config_of(bench, folder, {"same": {**ELSEWHERE}}))
    torch.testing.assert_close(apart.fields["teacher_log_probs"], rows.fields["old_log_probs"], rtol=0, atol=1e-5)

    _, alone, _ = rows_of(bench, config_of(bench, folder, {"other": {"model_path": other}}, signal="advantage"))
    teachers = {"other": {"model_path": other, **ELSEWHERE, **ODD}, "same": {**EVEN, "placement": "1"}}
    config = config_of(bench, folder, teachers, without_teacher="reward", task_reward=False)
    run, both, metrics = rows_of(bench, config)
    is_first = both.fields["teacher"] == 1
    for own, expected in ((is_first, alone), (~is_first, rows)):
        found, wanted = (one.fields["teacher_log_probs"][own] for one in (both, expected))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert abs(metrics["distillation/kl/teacher/other"]) > 1e-2 > 1e-4 > abs(metrics["distillation/kl/teacher/same"])
    teachers["none"] = {"placement": "0-1", "when": {"n": 9}}
    _, more, _ = rows_of(bench, config_of(bench, folder, teachers, without_teacher="reward"))
    found, wanted = (one.fields["teacher_log_probs"] for one in (more, both))
    assert torch.equal(found, wanted), "rows that only fill the shards of a teacher keep none of its outputs"
    ppo_step(run, 1)
    assert run.phase.timers.lap().keys() >= {"timing_s/teacher_other", "timing_s/teacher_same"}
    assert run.models.trained.keys() == {"actor", "critic"}, "checkpoints have nothing of teachers"

    ours = config_of(bench, folder, {"adapted": {"adapter": str(folder / "adapter"), **ELSEWHERE}})
    merged = config_of(bench, folder, {"merged": {"model_path": str(folder / "merged")}})
    found, expected = (rows_of(bench, config)[1].fields["teacher_log_probs"] for config in (ours, merged))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (found - rows.fields["old_log_probs"]).abs().max() > 1e-2

    once = {"actor": {"ppo_epochs": 1, "ppo_mini_batch_size": bench.PROMPTS}}
    for kind in ("k1+", "full"):
        config = config_of(bench, folder, {"same": {}}, once, signal="loss", kl_type=kind)
        assert ppo_step(bench.build(config), 1)["actor/distillation_loss"] == 0


def test_a_step_with_teachers(tmp_path: Path) -> None:
    run_ranks(4, check, tmp_path, timeout=280)

"""Plans of models that are not on this machine: shapes that ship, and the local cache of the Hugging Face hub."""

import os
from pathlib import Path

import pytest
from planning import REPOSITORY, start_plan

from megappo.architecture.model_folder import SHAPES
from megappo.errors import ActionableError
from megappo.lab.estimate.placed_model import read_shape

PARAMETERS = {
    "deepseek-llm-7b": 6_910_365_696,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-72b": 72_706_203_648,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-vl-7b": 8_292_166_656,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
}
"""As the hub counts them in the models' safetensors."""


def test_shapes_have_the_published_sizes():
    assert {folder.name: read_shape(str(folder)).size for folder in SHAPES.iterdir()} == PARAMETERS


def test_every_recipe_is_estimated_without_its_model(plan, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # without models/
    recipes = [path for ending in ("gpu", "node") for path in (REPOSITORY / "configs").glob(f"*{ending}.yaml")]
    assert len(recipes) == 11
    for recipe in recipes:
        done = plan(tmp_path, str(recipe), "--gpu", "h100")
        assert "which ships with megappo" in done.stdout and "  it fits: " in done.stdout, (recipe, done.stderr)
        assert "no folder models/" in done.stderr and "/bin/hf download " in done.stderr


def test_a_shape_replaces_the_model(plan, run_folder):
    arguments = ("run.yaml", "--gpu", "h100", "--shape")
    done = plan(run_folder, *arguments, "qwen2.5-0.5b")
    assert "Qwen/Qwen2.5-0.5B-Instruct is missing: the estimates take the shape qwen2.5-0.5b" in done.stdout
    assert "bin/hf download Qwen/Qwen2.5-0.5B-Instruct) or correct the path; megappo train downloads" in done.stderr
    unknown = plan(run_folder, *arguments, "qwen9")
    assert unknown.stderr.startswith("error: --shape: no shape qwen9: expected one of deepseek-llm-7b, llama-3.1-70b")


@pytest.fixture
def cache(run_folder: Path, monkeypatch) -> Path:
    """The run's model as the hub's client keeps it, under the id Own/Model."""
    model = run_folder / "cache" / "models--Own--Model"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("0123abcd")
    (model / "snapshots").mkdir()
    (run_folder / "model").rename(model / "snapshots" / "0123abcd")
    monkeypatch.setenv("HF_HUB_CACHE", str(run_folder / "cache"))
    return model


def test_a_model_of_the_local_cache_is_found_by_its_id(cache, run_folder):
    done = start_plan(run_folder, "run.yaml", "model.path=Own/Model", **os.environ)
    assert done.returncode == 0, done.stderr
    assert str(cache / "snapshots" / "0123abcd") in done.stdout


def test_a_model_that_a_run_downloads_is_a_warning(plan, run_folder):
    (run_folder / "models").mkdir()
    for path, code in (("Own/Other", 0), ("Qwen/Qwen2.5-7B", 0), ("models/Other", 2), ("absent", 2)):
        done = plan(run_folder, "run.yaml", f"model.path={path}", f"critic.model_path={path}")
        assert done.returncode == code, (path, done.stderr)
        is_id = f"megappo train downloads models of the hub, and takes this for an id, as there is no folder {path[:3]}"
        assert (is_id in done.stderr) == (code == 0)
        assert f"no folder {path}" in done.stderr and "bin/hf download " in done.stderr
    assert "not checked: tokenizer, prompts" in plan(run_folder, "run.yaml", "model.path=Own/Other").stdout


def test_a_cache_that_cannot_be_read_is_named_with_the_remedy(cache, plan, run_folder):
    (cache / "refs" / "main").write_bytes(b"\xff")
    with pytest.raises(ActionableError) as found:
        plan(run_folder, "run.yaml", "model.path=Own/Model")
    assert str(found.value).startswith(f"cannot read {cache}/refs/main (")
    assert str(found.value).endswith(f"remove {cache}, or name the model's folder")

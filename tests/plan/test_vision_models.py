"""Vision towers in config.json, in layouts and in plans: what is read, what is refused by name, what is counted."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_vision
import yaml
from planning import REPOSITORY, plan_here, write_run
from published_configs import PUBLISHED, QWEN_3_VL, QWEN_25_VL, Config

from megappo.architecture.fit import adapter_errors, engine_fit_errors, fit_errors
from megappo.architecture.parsing import parse
from megappo.config.config_error import ConfigError
from megappo.config.loading import load_config
from megappo.config.model_sections import Lora
from megappo.config.sections import Parallel
from megappo.lab.plan.plan_text import weights_summary
from megappo.lab.plan.run_checks import file_errors
from megappo.placement.run_plan import plan_run

FILE = Path("model/config.json")


def test_the_parts_of_a_tower_are_read() -> None:
    qwen_25, qwen_3 = parse(QWEN_25_VL, FILE), parse(QWEN_3_VL, FILE)
    of_25, of_3 = qwen_25.vision, qwen_3.vision
    assert (of_25.image_token, of_25.patch_size, of_25.merge_size, of_25.deepstack_layers) == (151655, 14, 2, ())
    assert (of_3.image_token, of_3.patch_size, of_3.merge_size, of_3.deepstack_layers) == (151655, 16, 2, (8, 16, 24))
    assert of_25.frequency_axes == [0] * 16 + [1] * 24 + [2] * 24
    assert of_3.frequency_axes == [0, 1, 2] * 20 + [0] * 4
    assert qwen_3.hidden_size == 4096 and qwen_3.rope.base == 5e6, "keys of text_config"
    critic = parse(QWEN_3_VL | {"architectures": ["Qwen3VLForTokenClassification"]}, FILE, "value")
    assert critic.name == "Qwen3VLForConditionalGeneration" and critic.vision == of_3


WITHOUT_SIZE = {key: size for key, size in QWEN_3_VL["vision_config"].items() if key != "patch_size"}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (
            {"architectures": ["Gemma3ForConditionalGeneration"]},
            "image tokens that attend to each other in both directions",
        ),
        ({"architectures": ["Qwen3VLMoeForConditionalGeneration"]}, "a vision tower before a mixture of experts"),
        ({"vision_config": WITHOUT_SIZE}, "it lacks 'patch_size'"),
        (
            {"vision_config": QWEN_3_VL["vision_config"] | {"out_hidden_size": 64}},
            "out_hidden_size .* is not hidden_size",
        ),
        (
            {"text_config": QWEN_3_VL["text_config"] | {"head_dim": 64}},
            r"mrope_section \(24, 20, 20\) has not 32 numbers",
        ),
    ],
)
def test_other_towers_are_refused_by_name(changes: Config, error: str) -> None:
    with pytest.raises((ConfigError, TypeError), match=error):
        parse(QWEN_3_VL | changes, FILE)


def test_layouts_keep_the_layers_of_deepstack_in_the_first_chunk() -> None:
    qwen_3 = parse(QWEN_3_VL, FILE)
    [error] = fit_errors(qwen_3, Parallel(pipeline=2, pipeline_split=(2, 34)), "actor.parallel.{}".format)
    assert error == (
        "actor.parallel.pipeline_split: the first 3 layers of model/config.json get features of images (deepstack), "
        "but the first chunk has 2 layers: begin it with 3 or more"
    )
    assert [*fit_errors(qwen_3, Parallel(pipeline=2, virtual_pipeline=9))], "chunks of two layers"
    for fitting in (Parallel(pipeline=2, pipeline_split=(3, 33)), Parallel(pipeline=12), Parallel(pipeline=4)):
        assert not [*fit_errors(qwen_3, fitting)]
    assert not [*fit_errors(parse(QWEN_25_VL, FILE), Parallel(pipeline=2, virtual_pipeline=14))]


def test_adapters_and_engines_that_cut_a_tower_unevenly_are_refused() -> None:
    qwen_25 = parse(QWEN_25_VL, FILE)
    [error] = adapter_errors(qwen_25, Lora(), Parallel(), "actor")
    assert error == "actor.lora: model/config.json has a vision tower, beside which no adapters can stand: drop lora"
    assert not [*engine_fit_errors(qwen_25, 4)]
    assert any("vision_config.num_heads 16" in error for error in engine_fit_errors(qwen_25, 28))


@pytest.mark.parametrize(
    ("name", "is_refused"),
    [("Qwen/Qwen2.5-0.5B-Instruct", True), ("Qwen/Qwen2.5-VL-3B-Instruct", False), ("Qwen/Qwen3-VL-2B-Instruct", True)],
)
def test_a_critic_needs_the_actors_kind_of_tower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_refused: bool
) -> None:
    folder = write_run(tmp_path)
    monkeypatch.chdir(folder)
    (folder / "model" / "config.json").write_text(json.dumps(QWEN_25_VL))
    shutil.copytree("model", "critic")
    (folder / "critic" / "config.json").write_text(json.dumps(PUBLISHED[name][0]))
    config = load_config("run.yaml", ["critic.model_path=critic", "model.dtype=bf16"])
    named = [error for error in file_errors(config, None) if "vision tower" in error]
    assert bool(named) == is_refused
    replaying = file_errors(config.changed("trainer.replay_rollouts", "records"), None)
    assert [error for error in replaying if "a record holds no images" in error] == [
        "trainer.replay_rollouts: a record holds no images, which model/config.json reads: sample instead"
    ]
    far = "teachers.far.url=http://10.0.0.7:30000"
    served = file_errors(load_config("run.yaml", ["critic.model_path=critic", "model.dtype=bf16", far]), None)
    assert "teachers.far.url: servers get no images, which model/config.json reads: set model_path" in served
    start = "critic.model_path: critic/config.json lacks a vision tower of the actor's kind, with the"
    assert all(error.startswith(start) for error in named)
    [tower] = [line.split() for line in weights_summary(plan_run(config, 4)).splitlines() if "actor's vision" in line]
    assert "676,550,144" in tower


def test_a_plan_counts_towers_and_images(tmp_path: Path) -> None:
    done = plan_here(tmp_path, str(REPOSITORY / "configs" / "qwen2.5_vl_7b_geo3k_8gpu.yaml"), "--gpu", "h100")
    images = [line.split() for line in done.stdout.splitlines() if line.startswith("  actor images")]
    assert len(images[0]) == 4, "in the actor's two phases alone"
    assert "vision towers" in done.stdout and "  it fits: " in done.stdout


def test_the_command_measures_images(tmp_path: Path) -> None:
    folder, image = tiny_vision.vision_folder(tmp_path / "model", "qwen3_vl"), tiny_vision.noise(60, 150, 1)
    (tmp_path / "a.png").write_bytes(image)
    num_tokens = len(tiny_vision.Oracle(folder).expanded([*tiny_vision.PLACEHOLDER], [image]))
    line = json.dumps({"prompt": "<image>", "images": ["a.png"], "label": "1"}) + "\n"
    (tmp_path / "train.jsonl").write_text(256 * line)
    settings = {
        "model": {"path": str(tmp_path / "model")},
        "placement": {"actor, critic, rollout": "0"},
        "rollout": {"max_response_length": 8},
        "data": {"train_files": str(tmp_path / "train.jsonl"), "max_prompt_length": 4},
        "reward": {"function": "exact_match"},
        "trainer": {"output_dir": str(tmp_path / "run"), "total_steps": 1},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "megappo", "plan", tmp_path / "config.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert f"the prompt has {num_tokens} tokens, more than data.max_prompt_length 4" in done.stderr, done.stderr

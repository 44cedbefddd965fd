"""The output folder of an evaluation: never among the files of a run, nor over another evaluation."""

import json
from pathlib import Path

import pytest

from megappo.config.schema import Config
from megappo.preflight.output_folder import resume_errors, with_own_folder


@pytest.mark.parametrize(
    ("output_dir", "weights", "own"),
    [
        ("run", "run/checkpoints/step_00000003", "run/evaluations/step_00000003"),
        ("new", "run/checkpoints/step_00000003", "new/evaluations/step_00000003"),
        ("run", "models/base", "run/evaluations/base"),
        ("run/evaluations/base", "models/base", "run/evaluations/base"),
        ("run/evaluations/other", "models/base", "run/evaluations/other/evaluations/base"),
    ],
)
def test_an_evaluation_has_a_folder_of_its_own(output_dir, weights, own):
    config = make_config(output_dir)
    assert with_own_folder(config, Path(weights)).trainer.output_dir == own


def make_config(output_dir: object) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "models/base"},
            "data": {"train_files": ["f"]},
            "trainer": {"output_dir": str(output_dir), "eval_only": True},
        }
    )


def test_weights_of_the_same_name_have_no_folder_together(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other" / "base").mkdir(parents=True)
    own = tmp_path / "out" / "evaluations" / "base"
    own.mkdir(parents=True)
    written = [
        json.dumps({"weights": str(tmp_path / weights)}) for weights in ("models/base", "gone/base", "other/base")
    ]
    other, foreign = f"evaluates {tmp_path}/other/base, and the evaluation of", "is not what a run writes"
    for content, errors in zip((*written, "", "[1]"), ([], [], [other], [foreign], [foreign]), strict=True):
        (own / "evaluation.json").write_text(content)
        found = [*resume_errors(make_config("out")), *resume_errors(make_config(own))]
        assert len(found) == 2 * len(errors) and all(error in one for one in found for error in errors)

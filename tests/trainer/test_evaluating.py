"""Where an evaluation writes: never among the files of a run."""

from pathlib import Path

import pytest

from megappo.config.schema import Config
from megappo.trainer.evaluating import with_own_folder


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
    config = Config.model_validate(
        {
            "model": {"path": "models/base"},
            "data": {"train_files": ["f"]},
            "trainer": {"output_dir": output_dir, "eval_only": True},
        }
    )
    assert with_own_folder(config, Path(weights)).trainer.output_dir == own

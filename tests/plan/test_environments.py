"""The dry run of an environment."""

import re

import pytest
from planning import errors_of

ENVIRONMENT = """
class Own:
    columns = ("label",)

    async def reset(self, row):
        return "and so on"

    async def step(self, message):
        return None, 0.0, True
"""


def test_its_first_words_are_shown(plan, run_folder):
    (run_folder / "mine.py").write_text(ENVIRONMENT)
    done = plan(run_folder, "run.yaml", "rollout.environment=mine.py:Own", "reward.function=null")
    assert errors_of(done) == []
    assert "  mine.py:Own: reset for the first prompt, [{'role': 'user', 'content': 'and so on'}]\n" in done.stdout


GAME = ("eval.datasets={game: {files: val.jsonl, environment: mine.py:Own, reward: none}}", "trainer.eval_interval=1")


def test_a_data_set_is_played_while_training_has_single_responses(plan, run_folder):
    (run_folder / "mine.py").write_text(ENVIRONMENT)
    (run_folder / "val.jsonl").write_text('{"prompt": "2", "label": 1}\n')
    done = plan(run_folder, "run.yaml", "data.val_files=train.jsonl", *GAME)
    assert errors_of(done) == []
    assert re.search(r"^  game( +[\d.-]+){5}  none +mine.py:Own$", done.stdout, re.M)
    assert re.search(r"^  train( +[\d.-]+){5}  exact_match  none$", done.stdout, re.M)
    scored = "  exact_match: the response '2' to the first prompt scores 1\n"
    assert f"{scored}  mine.py:Own: reset for the first" in done.stdout


def test_what_is_tried_without_training_is_what_the_data_sets_name(plan, run_folder):
    """The environment of training is not tried: it has no data here, and its file is missing."""
    (run_folder / "mine.py").write_text(ENVIRONMENT)
    (run_folder / "val.jsonl").write_text('{"prompt": "2", "label": 1}\n')
    of_training = ("rollout.environment=fails.py:Own", "rollout.max_turns=3", "reward.function=null")
    single = "eval.datasets.single={files: val.jsonl, environment: none, reward: exact_match}"
    done = plan(run_folder, "run.yaml", *of_training, "trainer.eval_only=true", *GAME, single)
    assert errors_of(done) == []
    assert "mine.py:Own: reset for the first prompt" in done.stdout
    assert "exact_match: the response '1' to the first prompt scores 1" in done.stdout


def test_errors_in_the_environment_of_a_data_set_name_its_keys(plan, run_folder):
    (run_folder / "val.jsonl").write_text('{"prompt": "2", "label": 1}\n')
    (run_folder / "mine.py").write_text(ENVIRONMENT.replace('("label",)', '("size",)'))
    [error] = errors_of(plan(run_folder, "run.yaml", *GAME))
    assert "val.jsonl line 1: no field 'size': correct eval.datasets.game.environment" in error
    (run_folder / "mine.py").write_text(ENVIRONMENT.replace("step(", "stepp("))
    [error] = errors_of(plan(run_folder, "run.yaml", *GAME))
    assert error.startswith("error: eval.datasets.game.environment: environment mine.py:Own has no step: expected")


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        (
            "class Own",
            "class Mine",
            "rollout.environment: environment mine.py:Own does not exist: the file defines Mine",
        ),
        ('("label",)', '("label", "size")', "and 297 more: no field 'size': correct rollout.environment"),
        ('"and so on"', "row['size']", "rollout.environment: environment mine.py:Own reset raised KeyError: 'size' ("),
        (
            '"and so on"',
            "3",
            "rollout.environment: environment mine.py:Own reset returned the observation 3;",
        ),
        (
            "step(",
            "stepp(",
            "rollout.environment: environment mine.py:Own has no step: expected a class",
        ),
    ],
)
def test_errors_in_an_environment_are_reported_before_a_run(plan, run_folder, old, new, error):
    (run_folder / "mine.py").write_text(ENVIRONMENT.replace(old, new))
    errors = errors_of(plan(run_folder, "run.yaml", "rollout.environment=mine.py:Own", "reward.function=null"))
    assert len(errors) == 1 and error in errors[0], errors

"""The dry run of an environment."""

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


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        (
            "class Own",
            "class Mine",
            "rollout.environment 'mine.py:Own': {folder}/mine.py defines no Own; it",
        ),
        ('("label",)', '("label", "size")', "rollout.environment: train.jsonl has no field 'size' in any of its "),
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
def test_what_is_wrong_with_it_is_told_before_a_run(plan, run_folder, old, new, error):
    (run_folder / "mine.py").write_text(ENVIRONMENT.replace(old, new))
    errors = errors_of(plan(run_folder, "run.yaml", "rollout.environment=mine.py:Own", "reward.function=null"))
    assert len(errors) == 1 and error.format(folder=run_folder) in errors[0], errors

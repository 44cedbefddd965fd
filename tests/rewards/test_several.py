"""Several reward functions with weights: each with its form and its fields, their scores side by side."""

import textwrap
from pathlib import Path

import pytest
from planning import errors_of, plan_here, write_run

from megappo.config.errors import ConfigError
from megappo.config.loading import load_config
from megappo.rewards.pool import RewardError, load_reward

FUNCTIONS = """
def short(responses):
    lengths = [len(response) for response in responses]
    responses.clear()  # its own
    return [-length for length in lengths]

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    assert not kwargs, kwargs
    return {"score": float(solution_str == ground_truth), "acc": True}

def both(prompts, completions, level):
    return [(n, len(prompt)) for n, prompt in zip(level, prompts)]

def names(responses, **columns):
    return [float(sorted(columns) == ["data_source", "labels", "level", "prompts"]) for _ in responses]

def fails(responses):
    raise ValueError("no")

def wrong(responses):
    return 1.0
"""
COLUMNS = [{"data_source": "a", "level": i, "prompts": "p" * i} for i in range(3)]


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(textwrap.dedent(FUNCTIONS))
    return f"{tmp_path}/mine.py"


def scores_of(specs: dict[str, float], num_workers: int = 2) -> list[list[float]]:
    with load_reward(specs, num_workers=num_workers, timeout_seconds=20) as pool:
        return pool.score(["x"] * 3, ["7", "78", ""], ["7", "7", "7"], COLUMNS)


def test_scores_stand_side_by_side_each_with_its_weight(file):
    assert scores_of({f"{file}:short": 0.5, "exact_match": 2, f"{file}:both": -1}) == [
        [-0.5, 2.0, 0.0, 0.0],
        [-1.0, 0.0, -1.0, -1.0],
        [0.0, 0.0, -2.0, -2.0],
    ]


def test_each_gets_its_own_fields(file):
    assert scores_of({f"{file}:compute_score": 1, f"{file}:both": 1, f"{file}:names": 1})[1] == [0.0, 1.0, 1.0, 1.0]


def test_what_they_take_is_what_any_takes(file):
    def takes(*names: str):
        with load_reward({f"{file}:{name}": 1.0 for name in names}, num_workers=1, timeout_seconds=20) as pool:
            return pool.takes

    of_two = takes("compute_score", "both")
    assert (of_two.needed, of_two.welcome, of_two.raw_prompts) == (("data_source", "level"), ("extra_info",), True)
    assert takes("both", "names").welcome is None
    assert takes("short", "short").needed == ()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong", r"mine.py:wrong \(wrong\) returned float; expected a list of"),
        ("fails", "mine.py:fails raised ValueError: no"),
        ("absent", r"mine.py:absent \(absent\) does not exist"),
    ],
)
def test_the_one_that_is_wrong_is_named(file, name, message):
    with pytest.raises(RewardError, match=message):
        scores_of({"exact_match": 1, f"{file}:{name}": 1})


def test_they_may_be_written_in_yaml_and_on_the_command_line(tmp_path):
    write_run(tmp_path)
    text = (tmp_path / "run.yaml").read_text() + "reward: {function: {exact_match: 1, my/own.py:f: 1e-1}}\n"
    (tmp_path / "run.yaml").write_text(text)
    assert load_config(tmp_path / "run.yaml").reward.weights == {"exact_match": 1.0, "my/own.py:f": 0.1}
    given = load_config(tmp_path / "run.yaml", ["reward.function={gsm8k: 2, exact_match: 0}"]).reward
    assert given.weights == {"gsm8k": 2.0, "my/own.py:f": 0.1}, "merged, as all keys are"
    assert load_config(tmp_path / "run.yaml", ["reward.function=gsm8k"]).reward.weights == {"gsm8k": 1.0}
    with pytest.raises(ConfigError, match="reward.function"):
        load_config(tmp_path / "run.yaml", ["reward.function={gsm8k: .inf}"])


def test_plan_tries_them_together(tmp_path, file):
    write_run(tmp_path)
    both = f"reward.function={{exact_match: 1, {file}:short: 0.1}}"
    done = plan_here(tmp_path, "run.yaml", both)
    assert errors_of(done) == []
    assert f"  exact_match + {file}:short: scored '2' for the first prompt, 1 + -0.1\n" in done.stdout
    errors = errors_of(plan_here(tmp_path, "run.yaml", f"reward.function={{absent: 1, {file}:absent: 0.1}}"))
    assert [error.partition(": ")[2][:30] for error in errors] == [
        "reward.function 'absent': expe",
        "reward.function '" + file[:13],
    ]
    for none, shown in (("{exact_match: 0}", "{'exact_match': 0.0}"), ("{}", "{}")):
        [error] = errors_of(plan_here(tmp_path, "run.yaml", f"reward.function={none}"))
        assert f"reward.function {shown} has no function of a weight but 0: name one" in error

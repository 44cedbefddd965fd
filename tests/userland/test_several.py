"""Several reward functions with weights: each with its form and its fields, their scores side by side."""

import textwrap
from pathlib import Path

import pytest
from planning import errors_of, plan_here, write_run
from reward_pools import rows_of

from megappo.config.config_error import ConfigError
from megappo.config.loading import load_config
from megappo.userland.rewards import RewardError, load_reward
from megappo.userland.spec import BUILTIN

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

def with_parts(responses):
    return [{"score": 1, "long": len(response) > 1, "why": "a text is no metric"} for response in responses]

def parts_of_some(responses):
    return [{"score": 0, "first": 7} if response else 0 for response in responses]

def fails(responses):
    raise ValueError("no")

def large(responses):
    return [1e30 for _ in responses]

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
        return [one.scores for one in pool.score(rows_of(["x"] * 3, ["7", "78", ""], ["7", "7", "7"], COLUMNS))]


def test_scores_stand_side_by_side_each_with_its_weight(file):
    assert scores_of({f"{file}:short": 0.5, "exact_match": 2, f"{file}:both": -1}) == [
        [-0.5, 2.0, 0.0, 0.0],
        [-1.0, 0.0, -1.0, -1.0],
        [0.0, 0.0, -2.0, -2.0],
    ]


def test_a_weight_may_not_make_a_score_too_large(file):
    with pytest.raises(
        RewardError,
        match=r"mine.py:large returned 1e\+30 .*: expected a finite number .* as score, found 1e\+40",
    ):
        scores_of({f"{file}:large": 1e10, f"{file}:short": 1})


def test_each_gets_its_own_fields(file):
    assert scores_of({f"{file}:compute_score": 1, f"{file}:both": 1, f"{file}:names": 1})[1] == [0.0, 1.0, 1.0, 1.0]


def test_what_they_take_is_what_any_takes(file):
    def takes(*names: str):
        with load_reward({f"{file}:{name}": 1.0 for name in names}, num_workers=1, timeout_seconds=20) as pool:
            return pool.takes

    of_two = takes("compute_score", "both")
    assert (of_two.needed, of_two.optional, of_two.raw_prompts) == (("data_source", "level"), ("extra_info",), True)
    assert takes("both", "names").optional is None
    assert takes("short", "short").needed == ()


def test_other_numbers_of_a_dictionary_are_metrics_and_count_nothing(file):
    specs = {f"{file}:{name}": 2.0 for name in ("with_parts", "parts_of_some", "compute_score")}
    with load_reward(specs, num_workers=2, timeout_seconds=20) as pool:
        grades = pool.score(rows_of(["x"] * 3, ["7", "78", ""], ["7"] * 3, COLUMNS))
    assert [one.scores for one in grades] == [[2.0, 0.0, 2.0], [2.0, 0.0, 0.0], [2.0, 0.0, 0.0]]
    assert [one.parts for one in grades] == [
        {"long": 0.0, "first": 7.0, "acc": 1.0},
        {"long": 1.0, "first": 7.0, "acc": 1.0},
        {"long": 0.0, "acc": 1.0},
    ]


def test_numbers_of_one_name_get_their_functions_names(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def first(responses):\n    return [{'score': 0, 'acc': 1, 'own': 5} for _ in responses]\n"
        "def second(responses):\n    return [{'score': 0, 'acc': 0.5} if one else 0 for one in responses]\n"
    )
    specs = {f"{tmp_path}/mine.py:{name}": 1.0 for name in ("first", "second")}
    with load_reward(specs, num_workers=1, timeout_seconds=20) as pool:
        grades = pool.score(rows_of(["x"] * 2, ["7", ""], ["7"] * 2))
    assert [one.parts for one in grades] == [
        {"first/acc": 1.0, "own": 5.0, "second/acc": 0.5},
        {"first/acc": 1.0, "own": 5.0},
    ]


def test_weights_of_losses_multiply_and_scores_of_steps_have_the_weight_of_their_function(tmp_path):
    """Neither is a metric; the scores stay the outcomes'."""
    (tmp_path / "mine.py").write_text(
        "def first(solution_str, **kwargs):\n"
        "    with_parts = {'score': 1, 'loss_weight': 0.5, 'step_scores': [(2, 0.25), (3, -1)], 'acc': 1}\n"
        "    return with_parts if solution_str else 1\n"
        "def second(responses):\n"
        "    return [{'score': 2, 'loss_weight': 3, 'step_scores': [[1, 1]] if one else []} for one in responses]\n"
        "def third(responses):\n    return [[5, 6] for _ in responses]\n"
    )
    specs = {f"{tmp_path}/mine.py:{name}": weight for name, weight in (("first", 2.0), ("third", 1), ("second", 0.5))}
    with load_reward(specs, num_workers=1, timeout_seconds=20) as pool:
        grades = pool.score(rows_of(["x"] * 2, ["yes", ""], ["7"] * 2))
    assert [one.scores for one in grades] == [[2.0, 5.0, 6.0, 1.0]] * 2
    assert [one.totals for one in grades] == [[0.5, 5.0, 6.0, 1.5], [2.0, 5.0, 6.0, 1.0]]
    assert [one.loss_weight for one in grades] == [1.5, 3.0] and [one.parts for one in grades] == [{"acc": 1.0}, {}]
    assert [[list(map(list, steps)) for steps in one.steps] for one in grades] == [
        [[[2, 0.5], [3, -2.0]], [], [], [[1, 0.5]]],
        [],
    ]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            "{'score': 1.0, 'acc': float('nan')}",
            r"'acc': nan} \(value 0\): expected a finite number .* as acc, found nan",
        ),
        ("{'acc': 1.0}", r"returned {'acc': 1.0} \(value 0\): expected a finite number .* as score, found None"),
        ("{'score': 1.0, 'half \\ud800': 1.0}", "expected names of at most 64 printable characters"),
        ("dict.fromkeys(map(str, range(33)), 1) | {'score': 1.0}", "expected at most 32 further numbers, found 33"),
        ("{'score': {'score': 1.0}}", "expected a finite number .* as score, found {'score': 1.0}"),
        ("{'score': 1, 'loss_weight': -0.5}", r"\(value 0\): expected a loss_weight of 0 or more, found -0.5"),
        ("{'score': 1, 'loss_weight': float('nan')}", "expected a finite number .* as loss_weight, found nan"),
        ("{'score': 1, 'loss_weight': None}", "expected a finite number .* as loss_weight, found None"),
        ("{'score': 1, 'step_scores': 0.5}", r"expected a list of \[end, score\] as step_scores, .*, found 0.5"),
        ("{'score': 1, 'step_scores': [[1.5, 2]]}", r"with ascending ends from 1 to 3, .*, found \[1.5, 2\]"),
        ("{'score': 1, 'step_scores': [[0, 1]]}", r"with ascending ends from 1 to 3, .*, found \[0, 1\]"),
        ("{'score': 1, 'step_scores': [[2, 1], [4, 1]]}", r"with ascending ends from 1 to 3, .*, found \[4, 1\]"),
        ("{'score': 1, 'step_scores': [[2, 3], [2, 1]]}", r"with ascending ends from 1 to 3, .*, found \[2, 1\]"),
        ("{'score': 1, 'step_scores': [[1, float('inf')]]}", "expected a finite number .* as step_scores, found inf"),
        ("{'score': 3e38, 'step_scores': [[1, 3e38]]}", r"as the sum of its scores, found 6e\+38"),
        ("{'score': [1, 2], 'step_scores': []}", "expected one score beside step_scores, found 2"),
    ],
)
def test_dictionaries_with_nonsense_are_errors(tmp_path, result, message):
    (tmp_path / "mine.py").write_text(f"def f(responses):\n    return [{result} for _ in responses]\n")
    with (
        load_reward(f"{tmp_path}/mine.py:f", num_workers=1, timeout_seconds=20) as pool,
        pytest.raises(RewardError, match=message) as raised,
    ):
        pool.score(rows_of(["x"], ["yes"], [1]))
    assert "it was scoring response 'yes' to prompt 'x'" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong", r"function [^ ]*mine.py:wrong returned 1.0; expected a list of"),
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
    assert f"  exact_match + {file}:short: the response '2' to the first prompt scores 1 + -0.1\n" in done.stdout
    errors = errors_of(plan_here(tmp_path, "run.yaml", "reward.function={absent: 1, nowhere.py:f: 0.1}"))
    assert [error.partition(": ")[2][:37] for error in errors] == [
        "reward.function 'absent': expected ex",
        "reward.function 'nowhere.py:f': no fi",
    ]
    for none, shown in (("{exact_match: 0}", "{'exact_match': 0.0}"), ("{}", "{}")):
        [error] = errors_of(plan_here(tmp_path, "run.yaml", f"reward.function={none}"))
        assert f"reward.function {shown} names no function with a weight other than 0: name one" in error


PREDICTIONS = """
def verl(solution_str, ground_truth):
    return {"score": 0.0, "pred": {"none": None, "list": [7], "half": "\\ud800"}.get(solution_str, 7.5)}


def silent(responses):
    return [0.0 for _ in responses]
"""


@pytest.mark.parametrize(
    ("specs", "responses", "answers"),
    [
        (("verl",), ["x", "none", "list", "half"], ["7.5", None, None, "?"]),
        (("silent",), ["x"], [None]),
        (("silent", "gsm8k", "verl"), ["#### $1,200.0", "no mark"], ["1200", "7.5"]),
        (("exact_match",), [" 42 \n", "x" * 300], ["42", "x" * 200]),
        (("math",), [r"\boxed{1} or \boxed{ \frac{1}{2} }", "none"], [r"\frac{1}{2}", None]),
        (("multiple_choice",), ["The answer is (B).", "none"], ["B", None]),
    ],
)
def test_the_answer_is_of_the_first_function_that_finds_one(tmp_path, specs, responses, answers):
    (tmp_path / "mine.py").write_text(PREDICTIONS)
    own = {name: 1.0 for name in specs if name in BUILTIN}
    weights = {name if name in own else f"{tmp_path}/mine.py:{name}": 1.0 for name in specs}
    label = "B" if "multiple_choice" in specs else "7"
    with load_reward(weights, num_workers=1, timeout_seconds=20) as pool:
        grades = pool.score(rows_of([""] * len(responses), responses, [label] * len(responses)))
    assert [one.answer for one in grades] == answers

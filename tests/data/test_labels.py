"""Needs of built-in graders, checked by row when data are read."""

import json
from pathlib import Path

import pytest
from planning import errors_of, plan_here, write_run

from megappo.config.schema import Data, Reward
from megappo.data.prompts import PromptDataset
from megappo.data.tokenizer import load_tokenizer
from megappo.userland.spec import check_label

CHECK = "def check(candidate):\n    assert candidate(2) == 4\n"
GOOD = {
    "exact_match": ["4", 4, 0, 4.5, True, " x "],
    "regex_match": [r"\b4\d", 4, "(?m)^b$"],
    "multiple_choice": ["B", "(b)", "j."],
    "gsm8k": ["so 5 + 1\n#### 6", 6, "1,200", "-1/2"],
    "math": ["\\frac12", 0.5, "It is \\boxed{4}."],
    "code": [
        {"inputs": ["1"], "outputs": ["2"]},
        {"inputs": ["1"], "outputs": ["2"], "fn_name": "f"},
        "assert f(1) == 2",
        r"assert f('\d') == 2",
        ["assert f(1) == 2", "check(f)"],
        {"test": CHECK, "entry_point": "f"},
        json.dumps({"test": CHECK, "entry_point": "f"}),
    ],
    "think_answer": ["", None, {}],
    "repetition": ["", None],
    "http": ["", None],
    "judge": ["", {"a": 1}],
    "absent.py:f": ["", None],
}
BAD = {
    "exact_match": (["", "  ", None, [4], {"a": 1}], "exact_match needs strings or numbers as labels"),
    "regex_match": (["", None, "(", "a{9999999999}"], "regex_match needs "),
    "multiple_choice": (["", "K", "AB", 3, None, ["A"]], "multiple_choice needs letters from A to J"),
    "gsm8k": (["", "none", "5 or 6", None, True, "#### "], "gsm8k needs a number as label"),
    "math": (["", " ", "\\boxed{}", "\\boxed{1", None, [1]], "math needs an answer as label"),
    "code": (
        [
            *("", "  ", None, 4, "4", "four", [], {}, {"inputs": ["1"], "outputs": []}, "assert f(1) ==", "x\0"),
            *(["assert f(1) == 2", ""], {"test": "def check(f:\n  pass", "entry_point": "f"}, "(" * 5000 + ")" * 5000),
        ],
        "code ",
    ),
}


def labels_of(table: dict[str, list]) -> list[tuple[str, object]]:
    return [(function, label) for function, labels in table.items() for label in labels]


@pytest.mark.parametrize(("function", "label"), labels_of(GOOD))
def test_a_label_by_which_a_grader_can_grade(function, label, recwarn):
    check_label(label, [function])
    assert not recwarn.list


@pytest.mark.parametrize(("function", "label"), labels_of({name: labels for name, (labels, _) in BAD.items()}))
def test_a_label_by_which_it_cannot(function, label):
    with pytest.raises(ValueError, match=f"^{BAD[function][1]}"):
        check_label(label, ["think_answer", function])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """2,600 prompts, of which three have no answer; a sample leaves one of these out."""
    write_run(tmp_path)
    records = [{"prompt": "1+1=", "label": "" if number % 1200 == 38 else "2"} for number in range(1, 2601)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


LINES = (
    "data.train_files: train.jsonl lines 38, 1238, 2438: {} (data.on_bad_row=skip leaves such out)",
    "math needs an answer as label, or a solution that boxes it, found ''",
)


@pytest.mark.parametrize("function", ["math", "{think_answer: 1, math: 1}"])
def test_plan_names_the_lines(folder, function):
    [error] = errors_of(plan_here(folder, "run.yaml", "--all", f"reward.function={function}"))
    assert error == "error: " + LINES[0].format(LINES[1])


def test_a_function_with_weight_0_needs_nothing(folder):
    done = plan_here(folder, "run.yaml", "--all", "reward.function={think_answer: 1, math: 0}")
    assert errors_of(done) == []


def test_such_rows_may_be_left_out(folder):
    done = plan_here(folder, "run.yaml", "--all", "reward.function=math", "data.on_bad_row=skip")
    assert errors_of(done) == []
    assert "left out: data.train_files: 3 of 2,600 records" in done.stdout


def test_a_data_set_is_held_against_its_own_function(folder):
    own = "eval.datasets.own={files: train.jsonl, reward: math}"
    keys = ("--all", "reward.function=think_answer", own, "trainer.eval_interval=1")
    [error] = errors_of(plan_here(folder, "run.yaml", *keys))
    assert error == "error: " + LINES[0].format(LINES[1]).replace("data.train_files", "eval.datasets.own.files")


def test_a_rank_finds_them_as_the_run_reads(folder):
    file = str(folder / "train.jsonl")
    tokenizer, data = load_tokenizer(str(folder / "model")), Data(train_files=(file,))
    dataset = PromptDataset([file], tokenizer, data, 0, reward=Reward(function="math"))
    halves = (lambda size: range(size // 2), lambda size: range(size // 2, size))
    [error] = dataset.errors([dataset.check(100, half) for half in halves])
    assert f"{file} lines 38, 1238, 2438: math needs an answer as label" in error
    with pytest.raises(ValueError, match="math needs an answer"):
        dataset.at([37])
